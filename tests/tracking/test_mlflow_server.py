"""The same over HTTP: a real server with one worker, started after the run."""

import math
import threading
from pathlib import Path

import pytest
import torch
from faults import progress_of
from torch import nn
from torch.utils.data import TensorDataset
from waiting import wait_for

from runner.core.record.tracker import RunInfo
from runner.data.fingerprint import describe_data
from runner.data.splits import Splits
from runner.precision.registry import load_precision
from runner.tracking import history
from runner.tracking.mlflow import MlflowTracker
from runner.training.formats.export import export

pytestmark = pytest.mark.slow


@pytest.fixture
def record_model(tmp_path):
    """Export a model and describe a data set in a run's record."""

    def record(tracker, step):
        data = Splits(*2 * [TensorDataset(torch.ones(3))])
        tracker.inputs(describe_data("digits", {"_target_": "d"}, data))
        folder = tmp_path / "run" / "model"
        exported = export(nn.Linear(3, 2), load_precision("bf16-mixed"), torch.randn(4, 3), folder)
        tracker.model(folder, {**exported.facts, "step": step})

    return record


def test_a_server_that_comes_late_and_goes_stores_a_whole_run(
    server, record_model, reader, tmp_path
):
    """It begins after the run, goes away while the run trains, and comes back after its end."""
    tracker = MlflowTracker(uri=server.url, register="net", patience=600)
    tracker.open(RunInfo(tmp_path / "run", params={"a": "1"}))
    before = [(step, 1_700_000_000_000 + step, step / 3) for step in range(1, 1501)]
    tracker.log_metrics((step, time_ms, {"train/loss": value}) for step, time_ms, value in before)
    (tmp_path / "run" / "note.txt").write_text("kept by the server")
    tracker.artifact(tmp_path / "run" / "note.txt")
    server.start(wait=False)
    wait_for(lambda: tracker.run_id is not None)
    server.stop()
    tracker.log_metrics([(1501, 5, {"train/loss": math.inf, "val/loss": 0.5})])
    tracker.log_metrics([(1502, 6, {"train/loss": math.nan, "val/loss": 0.25})])
    record_model(tracker, 1502)
    tracker.note("came later")
    closing = threading.Thread(target=tracker.close, args=["FINISHED"])
    closing.start()
    wait_for(lambda: progress_of(tmp_path / "run").outage)
    assert closing.is_alive()
    server.start()
    closing.join(timeout=600)
    assert not closing.is_alive()
    tracker.check()

    store = reader(server.url)
    run = store.run(tracker.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"a": "1"})
    assert run.data.tags["mlflow.note.content"] == "came later"
    assert store.points(tracker.run_id, "train/loss")[:1500] == before
    assert store.points(tracker.run_id, "val/loss") == [(1501, 5, 0.5), (1502, 6, 0.25)]
    files = [file.path for file in store.client.list_artifacts(tracker.run_id)]
    assert files == ["history.npz", "note.txt"]
    kept = store.client.download_artifacts(tracker.run_id, "history.npz", str(tmp_path))
    curve = history.read_history(Path(kept))["train/loss"]
    assert str(curve[2, 1500:].tolist()) == "[inf, nan]"
    assert len(run.inputs.dataset_inputs) == 1
    assert len(run.outputs.model_outputs) == 1
    (version,) = store.client.search_model_versions("name = 'net'")
    assert version.run_id == tracker.run_id
    assert tracker.dashboard is None, "it belongs to no sweep"
