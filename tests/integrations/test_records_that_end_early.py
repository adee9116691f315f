"""What is left of a foreign training that was killed, or whose store did not answer."""

import signal
import sys
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pytest
from forked_process import ForkedProcess
from waiting import wait_for

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from foreign_trainings import train_with_accelerate

from runner.core.base.errors import ConfigError
from runner.core.record import journals
from runner.tracking import writer_process
from runner.tracking.writer_process import WriterProcess

SCRIPT = Path(__file__).parents[1] / "helpers" / "foreign_trainer_script.py"


def recorded_steps(folder):
    """Numbers of the steps in the journals under a folder."""
    paths = [*folder.glob("outputs/runs/*/journal.jsonl")]
    records = [record for path in paths for record, _ in journals.read_records(path)]
    return [r["step"] for r in records if r["kind"] == "metrics" and "train/loss" in r["values"]]


def test_a_killed_training_is_uploaded_and_ends_as_killed(lab, clean, root):
    clean["PYTHONPATH"] = f"{root}:{SCRIPT.parent}"
    process = ForkedProcess(
        [sys.executable, str(SCRIPT), str(lab.folder)],
        cwd=lab.folder,
        env=clean,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
    )
    with process:
        wait_for(lambda: len(recorded_steps(lab.folder)) >= 3, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    (stored,) = wait_for(lambda: [run for run in lab.stored() if run.status == "KILLED"])
    result = SimpleNamespace(run_id=stored.id)
    steps = recorded_steps(lab.folder)
    assert list(lab.points(result, "train/loss")) == steps == list(range(1, len(steps) + 1))


def test_an_outage_of_the_store_costs_no_step_and_sync_uploads_the_rest(lab, main, monkeypatch):
    # A writer of this test's own, which ends as that of a training process does.
    writer = WriterProcess()
    monkeypatch.setattr(writer_process, "_shared", writer)
    options = {"tracking_uri": "http://127.0.0.1:9", "patience": 0.5, "folder": "outputs/runs/mine"}
    train_with_accelerate(steps=3, **options)
    writer.kill()
    assert lab.result().run_id is None
    assert lab.stored() == []
    store = f"sqlite:///{lab.folder}/outputs/mlflow.db"
    main("sync", f"tracking.uri={store}").check_ok()
    (stored,) = lab.stored()
    assert (stored.status, stored.name) == ("FINISHED", "32-true accelerate")
    result = SimpleNamespace(run_id=stored.id)
    assert list(lab.points(result, "train/loss")) == [1, 2, 3]


def test_a_store_that_no_mlflow_can_read_is_refused_before_the_training(lab):
    with pytest.raises(ConfigError, match="nowhere"):
        train_with_accelerate(tracking_uri="nowhere://x")
    assert not (lab.folder / "outputs" / "runs").exists()
