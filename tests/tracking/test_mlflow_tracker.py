"""What MLflow holds after a run: everything, once, under the right run. Real SQLite store."""

import logging
import math
import os
import signal
import time
import warnings
from subprocess import PIPE

import pytest
from faults import progress_of
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from waiting import wait_for

from runner.cli.sync import sync
from runner.core.base.errors import ConfigError, TrackingError
from runner.core.record.tracker import RunInfo
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.writer_process import shared_writer

KEYS = tuple(f"train/metric_{number}" for number in range(7))


@pytest.fixture
def begin(store, tmp_path):
    """Return a function that opens a run in a folder under tmp_path."""
    opened = []

    def start(name, experiment="runs", **info):
        tracker = MlflowTracker(uri=store.uri, experiment=experiment, tags={"team": "a"})
        tracker.open(RunInfo(tmp_path / name, name=name, **info))
        opened.append(tracker)
        return tracker

    yield start
    for tracker in opened:
        tracker.close("FINISHED")


def block(first, last):
    return [
        (step, 1_700_000_000_000 + step, {key: math.sin(step) for key in KEYS})
        for step in range(first, last + 1)
    ]


def expected(last):
    return [(step, time_ms, values[KEYS[0]]) for step, time_ms, values in block(1, last)]


def test_a_finished_run_holds_everything(begin, store, tmp_path):
    params = {"model.width": "64", "a[1]@b": "x", "long": "y" * 20_000}
    params |= {f"many.{number}": str(number) for number in range(250)}
    tracker = begin("whole", params=params, tags={"precision": "32-true", "git_commit": "abc"})
    tracker.log_metrics(block(1, 900))
    tracker.tags({"converted": "53/54"})
    (tmp_path / "whole" / "plot.txt").write_text("a plot")
    tracker.artifact(tmp_path / "whole" / "plot.txt", "plots")
    tracker.close("FINISHED")
    tracker.check()

    run = store.run(tracker.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "whole")
    assert run.info.experiment_id == tracker.experiment_id
    assert len(run.data.params) == 253
    assert run.data.params["a_1__b"] == "x"
    assert len(run.data.params["long"]) >= 500
    tags = {"precision": "32-true", "team": "a", "converted": "53/54"}
    assert tags.items() <= run.data.tags.items()
    assert run.data.tags["mlflow.source.git.commit"] == "abc"
    assert [file.path for file in store.client.list_artifacts(tracker.run_id, "plots")] == [
        "plots/plot.txt"
    ]
    for key in KEYS:
        assert store.points(tracker.run_id, key) == expected(900)


def test_a_record_of_more_values_than_one_call_takes(begin, store):
    tracker = begin("wide")
    tracker.log_metrics([(1, 1, {f"fp8/amax/{number}": number / 7 for number in range(2_500)})])
    tracker.close("FINISHED")
    metrics = store.run(tracker.run_id).data.metrics
    assert metrics == {f"fp8/amax/{number}": number / 7 for number in range(2_500)}


def test_non_finite_values_do_not_stop_the_rest(begin, store):
    tracker = begin("overflow")
    tracker.log_metrics([(1, 1, {"a": math.inf, "b": math.nan, "c": 1.0})])
    tracker.log_metrics([(2, 2, {"a": 2.0, "b": 2.0, "c": 2.0})])
    tracker.close("FINISHED")
    assert [value for *_, value in store.points(tracker.run_id, "c")] == [1.0, 2.0]
    assert store.points(tracker.run_id, "a")[0][2] > 1e308


def test_a_run_in_progress_shows_its_first_points_without_close(begin, store):
    tracker = begin("early")
    tracker.log_metrics([(1, 1, {"a": 1.0})])
    wait_for(lambda: tracker.run_id is not None)
    wait_for(lambda: store.points(tracker.run_id, "a") == [(1, 1, 1.0)])


def test_children_are_nested_under_the_sweeps_run(begin, store, tmp_path, start_trainer):
    """Three children: two of this process, one of another that starts before the parent."""
    given = {"sweep": "night", "name": "child"}
    with start_trainer(store.uri, tmp_path / "other", "finished", info=given, stdout=PIPE) as other:
        other.stdout.readline()
        parent = begin("parent", experiment="endings", sweep="night", role="sweep")
        children = [begin(f"job{n}", experiment="endings", sweep="night") for n in range(2)]
        for child in children:
            child.log_metrics(block(1, 50))
            child.close("FINISHED")
        other.communicate(timeout=60)
    parent.close("FINISHED")

    query = f"tags.`mlflow.parentRunId` = '{parent.run_id}'"
    nested = store.client.search_runs([parent.experiment_id], query)
    assert {run.info.run_name for run in nested} == {"job0", "job1", "child"}
    assert {run.data.tags["sweep_id"] for run in nested} == {"night"}
    assert store.run(parent.run_id).data.tags["role"] == "sweep"
    assert all(store.points(child.run_id, KEYS[0]) == expected(50) for child in children)


def test_a_killed_writer_is_replaced_and_nothing_is_lost_or_doubled(begin, store, caplog):
    tracker = begin("orphaned")
    tracker.log_metrics(block(1, 600))
    wait_for(lambda: tracker.run_id is not None)
    with caplog.at_level(logging.WARNING, "runner.tracking"):
        os.kill(shared_writer().process.pid, signal.SIGKILL)
        tracker.log_metrics(block(601, 1200))
        tracker.close("FINISHED")
    said = [record.getMessage() for record in caplog.records]
    assert sum("started again" in text for text in said) == 1
    assert all(
        "started again" in text or text.startswith("Uploading the last records to") for text in said
    )
    assert store.run(tracker.run_id).info.status == "FINISHED"
    assert store.points(tracker.run_id, KEYS[0]) == expected(1200)


def test_killed_runs_are_uploaded_later(store, start_trainer, tmp_path, begin, capsys):
    with start_trainer(store.uri, tmp_path / "left", "sleep", stdout=PIPE) as trainer:
        writer = int(trainer.stdout.readline().split()[1])
        os.kill(writer, signal.SIGSTOP)  # or it would settle the run itself
        trainer.kill()
        os.kill(writer, signal.SIGKILL)
    # A run of another machine, of which this one has no journal.
    elsewhere = store.client.create_run(store.experiment("endings")).info.run_id
    alive = begin("alive")  # settles it behind our back, at the same time
    assert sync([str(tmp_path)]) == 0
    assert "uploaded to sqlite:///" in capsys.readouterr().out
    (run,) = store.named("endings", "sleep")
    assert run.info.status == "KILLED"
    assert len(store.points(run.info.run_id, "train/loss")) == 400
    assert sync([str(tmp_path)]) == 0
    assert (
        capsys.readouterr().out == "0 uploaded, 0 failed, 1 already uploaded, 1 still training.\n"
    )
    alive.close("FINISHED")
    assert store.run(alive.run_id).info.status == "FINISHED"
    assert store.run(elsewhere).info.status == "RUNNING"


def test_a_stored_run_moves_to_another_store_as_a_whole(begin, reader, empty_store, tmp_path):
    tracker = begin("moved")
    tracker.log_metrics(block(1, 300))
    tracker.close("FINISHED")
    uri = empty_store(tmp_path / "other" / "mlflow.db")
    for _ in range(2):  # nothing is uploaded twice
        assert sync([str(tmp_path / "moved")], uri) == 0
    other = reader(uri)
    (run,) = other.named("runs", "moved")
    assert run.info.status == "FINISHED"
    assert other.points(run.info.run_id, KEYS[0]) == expected(300)


def test_a_lost_offset_doubles_nothing(begin, store, tmp_path):
    """The writer died after a batch was stored and before it saved the offset."""
    tracker = begin("twice")
    tracker.log_metrics(block(1, 300))
    tracker.close("FINISHED")
    state = tmp_path / "twice" / "journal.state"
    state.write_bytes(b'{"tried": true, "run_id": null, "offset": 0}')
    assert sync([str(tmp_path)]) == 0
    (run,) = store.named("runs", "twice")
    assert store.points(run.info.run_id, KEYS[0]) == expected(300)


def test_a_notice_names_the_experiment_that_replaces_a_deleted_one(begin, store, caplog):
    store.client.delete_experiment(store.experiment("old"))
    with caplog.at_level(logging.WARNING, "runner.tracking"):
        tracker = begin("beside", experiment="old")
        wait_for(lambda: tracker.run_id is not None)
        tracker.close("FINISHED")
    assert "runs go to 'old 2'" in caplog.text
    assert "mlflow experiments restore --experiment-id" in caplog.text
    assert store.client.get_experiment(tracker.experiment_id).name == "old 2"


def test_a_store_that_refuses_dashboards_gives_one_notice_alone(tmp_path, monkeypatch, empty_store):
    from runner.tracking.dashboard import SweepView
    from runner.tracking.writer.store import Store

    def refuse(*_):
        raise MlflowException.invalid_parameter_value("no tags here")

    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlflow's, of SQLAlchemy
        store = Store(empty_store(tmp_path / "mlflow.db"))
        experiment = store.experiment("plain")
    view = SweepView("s1", "0123abc", "mlp")
    assert [store.dashboard(experiment, (), view) for _ in range(3)] == [None] * 3
    (notice,) = store.notices
    assert "no tags here" in notice


def test_a_deleted_experiment_that_is_asked_for_by_id_is_refused(
    begin, store, tmp_path, monkeypatch
):
    experiment = store.experiment("gone")
    store.client.delete_experiment(experiment)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    tracker = begin("refused", experiment=None)
    wait_for(lambda: progress_of(tmp_path / "refused").refusal)
    with pytest.raises(TrackingError, match=r"'gone' .* mlflow experiments restore"):
        tracker.check()
    start = time.monotonic()
    tracker.close("FAILED")
    assert time.monotonic() - start < 30  # of the 60 s that an end waits for a store


def test_a_missing_artifact_is_reported_and_the_run_continues(begin, store, tmp_path, caplog):
    tracker = begin("gap")
    tracker.artifact(tmp_path / "gap" / "no such file")
    tracker.log_metrics([(1, 1, {"a": 1.0})])
    with caplog.at_level(logging.WARNING, "runner.tracking"):
        tracker.close("FINISHED")
    assert "no such file" in caplog.text
    assert store.points(tracker.run_id, "a") == [(1, 1, 1.0)]
    assert store.run(tracker.run_id).info.status == "FINISHED"


def test_a_file_outside_the_runs_folder_is_not_sent(begin, store, tmp_path, caplog):
    """A journal may come from anywhere, and be sent to anywhere."""
    tracker = begin("trap")
    (tmp_path / "private").write_text("key")
    (tmp_path / "trap" / "link").symlink_to(tmp_path / "private")
    (tmp_path / "trap" / "inside").mkdir()
    (tmp_path / "trap" / "inside" / "link").symlink_to(tmp_path)
    for name in ("private", "trap/../private", "trap/link", "trap/inside"):
        tracker.artifact(tmp_path / name)
    with caplog.at_level(logging.WARNING, "runner.tracking"):
        tracker.close("FINISHED")
    assert "private is not in the run's folder" in caplog.text
    names = [file.path for file in store.client.list_artifacts(tracker.run_id)]
    assert names in ([], ["history.npz"])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    tracker = MlflowTracker(uri=f"sqlite:///{tmp_path}/file/mlflow.db")
    tracker.open(RunInfo(tmp_path / "run"))
    tracker.close("FINISHED")
    with pytest.raises(TrackingError, match=r"cannot be written.*runner sync.*tracking=none"):
        tracker.check()


def test_a_record_before_open_or_after_close_raises_an_error(begin):
    tracker = begin("closed")
    tracker.close("FINISHED")
    with pytest.raises(TrackingError, match="not open"):
        tracker.log_metrics([(1, 1, {"a": 1.0})])
    with pytest.raises(TrackingError, match="not open"):
        MlflowTracker().tags({})


def test_a_tag_of_the_runners_own_is_refused(tmp_path):
    tracker = MlflowTracker(uri=f"sqlite:///{tmp_path}/mlflow.db", tags={"precision": "fake"})
    with pytest.raises(ConfigError, match=r"tracking\.tags\.my_precision"):
        tracker.open(RunInfo(tmp_path, tags={"precision": "32-true"}))
    assert not list(tmp_path.iterdir())


def test_a_sweep_to_join_must_exist(tmp_path, store):
    with pytest.raises(ConfigError, match=r"tracking\.sweep=nowhere: there is no such sweep"):
        MlflowTracker(uri=store.uri, sweep="nowhere").check_store()
    with pytest.raises(ConfigError, match="There is no store at"):
        MlflowTracker(uri=f"sqlite:///{tmp_path}/none.db", sweep="s").check_store()
    parent = MlflowTracker(uri=store.uri)
    parent.open(RunInfo(tmp_path, name="a sweep", sweep="here", role="sweep"))
    parent.close("FINISHED")
    MlflowTracker(uri=store.uri, sweep="here").check_store()
