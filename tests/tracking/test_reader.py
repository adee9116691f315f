"""A reader tells a missing answer of a store from a missing store, and hides secrets."""

import pytest
from quiet_mlflow import MlflowClient

from runner.core.base.errors import TrackingError
from runner.core.record.journals import JOURNAL_TAG
from runner.tracking.reader import Reader


def test_a_password_is_redacted_before_the_text_is_shortened(monkeypatch):
    reader = Reader("http://127.0.0.1:9")

    def fail(*_):
        raise OSError(f"{'x' * 280} mysql://ann:hunter2@h/db")

    monkeypatch.setattr(reader.client, "get_metric_history", fail)
    with pytest.raises(TrackingError, match="cannot be read: xxx") as caught:
        reader.curve("run", "loss")
    assert "hunter2" not in str(caught.value)


@pytest.mark.slow
def test_a_missing_artifact_is_none_and_one_of_an_absent_server_an_error(server_url, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    client = MlflowClient(server_url)
    # With the server's artifacts; those of the default experiment lie where the store was made.
    run_id = client.create_run(client.create_experiment("read")).info.run_id
    client.log_text(run_id, "kept", "jobs/a.json")
    reader = Reader(server_url)
    assert reader.artifact(run_id, "jobs/a.json") == b"kept"
    assert reader.artifact(run_id, "jobs/b.json") is None
    assert reader.artifact(run_id, "result.json") is None
    reader = Reader("http://127.0.0.1:9")
    for path in ("jobs/a.json", "jobs/b.json"):
        with pytest.raises(TrackingError, match=f"artifact {path} of run {run_id} .* not be fetch"):
            reader.artifact(run_id, path)
    assert reader.artifact_or_notice(run_id, "jobs/a.json") is None
    (notice,) = reader.notices
    assert "jobs/a.json" in notice
    assert "Connection refused" in notice


def test_a_run_that_was_opened_after_the_one_that_replaced_it_is_left_out(empty_store, tmp_path):
    """A job starts over while the store has not opened its killed run, whose journal it names."""
    uri = empty_store(tmp_path / "mlflow.db")
    client = MlflowClient(uri)
    experiment = client.create_experiment("sweep")
    job = {"sweep_id": "s", "role": "run"}
    ids = [
        client.create_run(experiment, tags=tags).info.run_id
        for tags in (
            {"sweep_id": "s", "role": "sweep"},
            job | {JOURNAL_TAG: "new", "supersedes": "killed"},
            job | {JOURNAL_TAG: "killed"},
            job | {JOURNAL_TAG: "other"},
            job,
        )
    ]
    reader = Reader(uri)
    assert {run.run_id for run in reader.jobs(reader.run(ids[0]))} == {ids[1], *ids[3:]}
