"""The same over HTTP: a real server with one worker, started after the run."""

import math
import threading
from pathlib import Path

import pytest
import torch
from faults import progress_of
from serving import Server
from torch import nn
from torch.utils.data import TensorDataset
from waiting import wait_for

from runner.checkpoint.export import export
from runner.data.fingerprint import describe_data
from runner.data.splits import Splits
from runner.precision.registry import load_precision
from runner.tracking import history
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.tracker import RunInfo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def late_server(tmp_path_factory, empty_store):
    """A server that has not begun yet."""
    folder = tmp_path_factory.mktemp("server")
    server = Server(folder, empty_store(folder / "mlflow.db"))
    yield server
    server.stop()


def test_a_run_that_opens_before_its_server_is_stored_completely(late_server, reader, tmp_path):
    uri = late_server.url
    tracker = MlflowTracker(uri=uri)
    tracker.open(RunInfo(tmp_path / "run", params={"a": "1"}))
    expected = [(step, 1_700_000_000_000 + step, step / 3) for step in range(1, 1501)]
    tracker.log_metrics((step, time_ms, {"train/loss": value}) for step, time_ms, value in expected)
    (tmp_path / "run" / "note.txt").write_text("kept by the server")
    tracker.artifact(tmp_path / "run" / "note.txt")
    late_server.start(wait=False)
    wait_for(lambda: tracker.run_id is not None)
    tracker.close("FINISHED")
    tracker.check()

    store = reader(uri)
    run = store.run(tracker.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"a": "1"})
    assert store.points(tracker.run_id, "train/loss") == expected
    assert [file.path for file in store.client.list_artifacts(tracker.run_id)] == [
        "history.npz",
        "note.txt",
    ]


def model_folder(folder):
    """An exported model, and its facts."""
    precision = load_precision("bf16-mixed")
    made = export(nn.Linear(3, 2), precision, torch.randn(4, 3), folder)
    return folder, {**made.facts, "step": 2}


def test_model_and_data_sets_are_uploaded_when_the_server_is_back(late_server, reader, tmp_path):
    """It goes away while the run trains and stays away while it ends."""
    uri = late_server.url
    if not late_server.process:
        late_server.start()
    tracker = MlflowTracker(uri=uri, register="net", patience=600)
    tracker.open(RunInfo(tmp_path / "run"))
    tracker.log_metrics([(1, 1000, {"train/loss": math.inf, "val/loss": 0.5})])
    wait_for(lambda: tracker.run_id is not None)
    late_server.stop()
    tracker.log_metrics([(2, 2000, {"train/loss": math.nan, "val/loss": 0.25})])
    tracker.inputs(
        describe_data("digits", {"_target_": "d"}, Splits(*2 * [TensorDataset(torch.ones(3))]))
    )
    tracker.model(*model_folder(tmp_path / "run" / "model"))
    tracker.note("came later")
    closing = threading.Thread(target=tracker.close, args=["FINISHED"])
    closing.start()
    wait_for(lambda: progress_of(tmp_path / "run").outage)
    assert closing.is_alive()
    late_server.start()
    closing.join(timeout=600)
    assert not closing.is_alive()
    tracker.check()
    store = reader(uri)
    run = store.run(tracker.run_id)
    assert (run.info.status, run.data.tags["mlflow.note.content"]) == ("FINISHED", "came later")
    assert [(step, value) for step, _, value in store.points(tracker.run_id, "val/loss")] == [
        (1, 0.5),
        (2, 0.25),
    ]
    kept = store.client.download_artifacts(tracker.run_id, "history.npz", str(tmp_path))
    assert str(history.read_history(Path(kept))["train/loss"][2].tolist()) == "[inf, nan]"
    assert len(run.inputs.dataset_inputs) == 1
    assert len(run.outputs.model_outputs) == 1
    assert [v.run_id for v in store.client.search_model_versions("name = 'net'")] == [
        run.info.run_id
    ]
    tags = store.client.get_experiment(tracker.experiment_id).tags
    assert "mlflow.sharedViewState.precision-runner" in tags
    assert tracker.dashboard.startswith(f"/#/experiments/{tracker.experiment_id}/runs?")
