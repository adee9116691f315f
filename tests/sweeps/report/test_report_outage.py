"""A report made while the server of the artifacts is away says which ones it could not fetch."""

import json

import pytest
from quiet_mlflow import MlflowClient
from serving import Server

from runner.sweeps.report.load import load_from_store
from runner.sweeps.report.pages import write_report
from runner.tracking.reader import Reader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # mlflow's own, of SQLAlchemy
]


def test_the_report_names_the_artifacts_of_a_server_that_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    # A database that names a server is refused; here its answers are looked at, not the rule.
    monkeypatch.setattr(Reader, "_check_artifact_place", lambda *_: None)
    server = Server(tmp_path)
    server.start()
    try:
        reader = Reader(f"sqlite:///{tmp_path}/runs.db", make=True)
        location = f"{server.url}/api/2.0/mlflow-artifacts/artifacts/sweep"
        client: MlflowClient = reader.client
        experiment = client.create_experiment("outage", artifact_location=location)
        tags = {"sweep_id": "night", "command": "python -m runner -m"}
        parent = client.create_run(experiment, tags={**tags, "role": "sweep"}, run_name="sweep")
        tags = {"sweep_id": "night", "role": "run", "precision": "32-true"}
        job = client.create_run(experiment, tags=tags, run_name="32-true seed=1").info.run_id
        client.log_metric(job, "train/loss", 0.5, 1, 1)
        result = {"precision": "32-true", "label": "from the artifact", "folder": ""}
        client.log_text(job, json.dumps(result), "result.json")
        (parent,) = [run for run in [reader.run(parent.info.run_id)] if run]

        data = load_from_store(reader, parent)
        assert [one.result.label for one in data.jobs] == ["from the artifact"]
        assert data.fetch_failures == ()

        jobs = reader.jobs
        monkeypatch.setattr(reader, "jobs", lambda parent: [jobs(parent), server.stop()][0])
        data = load_from_store(reader, parent)
    finally:
        server.stop()
    assert [one.result.label for one in data.jobs] == ["32-true seed=1"]
    assert data.jobs[0].curves["train/loss"][2].tolist() == [0.5]
    for path, message in zip(("result.json", "history.npz"), data.fetch_failures, strict=True):
        assert f"the artifact {path} of run {job} in" in message
        assert "Connection refused" in message
    for page in write_report(data, tmp_path)[:2]:
        text = page.read_text()
        assert "Not fetched from the store" in text
        assert "result.json" in text
        assert "history.npz" in text
