"""Runs that version 0.1 left behind resume, evaluate and replay in the version that is tested.

tests/data/run_of_0_1 holds what version 0.1 wrote for the command

    python -m runner model=mlp 'model.hidden=[8]' data=digits optimizer=adamw scheduler=cosine
        optimizer.lr=0.05 precision=16-mixed precision.loss_scale.init_scale=1e7
        precision.loss_scale.growth_interval=3 train.max_steps=60 train.batch_size=16
        train.eval_every=2 train.log_every=2 train.early_stop=4 guard.overflow=warn
        guard.overflow_steps=3 checkpoint.best=true seed=1

which received SIGTERM after the evaluation at step 24. The second folder is a run of
precision=transformer-engine precision.emulate=true adapter=lora, stopped at step 10 of 20. In each,
end.json says how version 0.1 itself finished the run, and with which torch and CPU. The files are
never written again: a later version reads them as they are.
"""

import copy
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from runner.checkpoint import checkpoint_file, locate
from runner.modes.training_callbacks import TrainingCallbacks
from runner.training import state_dict
from runner.training.callbacks.callback import Callback
from runner.training.callbacks.early_stopping import EarlyStopping
from runner.training.callbacks.summary import RunSummary
from runner.training.records import EvalRecord, StepRecord, record_from_state, record_to_state
from runner.utils import accelerator

DATA = Path(__file__).parents[1] / "data"
RUNS = ("run_of_0_1", "run_of_0_1_transformer_engine_emulated")


@pytest.fixture
def old_run(tmp_path):
    """Copy a stored run's folder to a place where a command may write."""

    def copied(name):
        return Path(shutil.copytree(DATA / name, tmp_path / "old"))

    return copied


@pytest.fixture
def restored(monkeypatch):
    """Return the observers' states, by key, as they are right after a command's restore."""
    states = {}
    state_dict = TrainingCallbacks.restore

    def spy(callbacks, saved):
        messages = state_dict(callbacks, saved)
        states.update({o.key: copy.deepcopy(o.state_dict()) for o in callbacks.callbacks})
        return messages

    monkeypatch.setattr(TrainingCallbacks, "restore", spy)
    return states


def sha256_of_weights(path):
    digest = hashlib.sha256()
    for name, weight in torch.load(path, weights_only=True)["model"].items():
        digest.update(name.encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def computes_the_same_bits(end):
    """Return whether this machine's torch and CPU are those that computed end.json."""
    return (
        torch.__version__.partition("+")[0] == end["torch"]
        and torch.backends.cpu.get_cpu_capability() == end["capability"]
        and end["cpu"] in accelerator.cpu_name()
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_old_version_resumes_and_ends_as_it_would_have(name, main, old_run):
    folder, end = old_run(name), json.loads((DATA / name / "end.json").read_text())
    done = main(f"checkpoint.resume={folder}", "tracking=none")
    assert done.rc == 0, done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["steps"] == end["steps"]  # where early stopping counts on, in the first run
    assert result["skipped_steps"] == end["skipped_steps"]
    assert result["loss_scale"] == end["loss_scale"]
    assert result["best"] == pytest.approx(end["best"], abs=0.02)
    assert result["metrics"] == pytest.approx(end["metrics"], rel=0.1)
    assert result["train_loss"] == pytest.approx(end["train_loss"], rel=0.05)
    if computes_the_same_bits(end):
        assert result["metrics"] == end["metrics"]
        assert result["train_loss"] == end["train_loss"]
        assert sha256_of_weights(locate.find_checkpoint(str(folder))) == end["sha256_of_weights"]
    states = checkpoint_file.load(locate.find_checkpoint(str(folder)))["observers"]
    names_of_0_1 = {"Tally", "Recorder", "Guard", "EarlyStop", "Checkpoints"}
    assert states.keys() & names_of_0_1 == set()
    assert states["summary"]["last"]["step"] == end["steps"]


def test_the_callbacks_restore_what_an_old_version_stored(main, old_run, restored):
    folder = old_run("run_of_0_1")
    stored = checkpoint_file.load(folder / "checkpoints" / "step-00000024.pt")["observers"]
    assert main(f"checkpoint.resume={folder}", "tracking=none").rc == 0

    assert restored["early_stopping"] == {"best": 0.3955431754874652, "worse": 2}
    assert restored["checkpointing"] == {"best": 0.3955431754874652}
    assert restored["guard"]["said"] == ["overflow"]
    assert restored["guard"]["losses"] == stored["Guard"]["losses"]
    assert len(restored["guard"]["losses"]) == 13
    summary = restored["summary"]
    assert summary["best"] == 0.3955431754874652
    assert summary["evaluated"] == 24
    assert summary["overflows"] == [1, 2, 3, 4, 5, 7, 9, 14, 18, 22, 23]
    assert summary["scales"][-1] == (24, 39062.5)
    assert (summary["examples"], summary["steps"], summary["blocks"]) == (352, 22, 12)
    assert summary["milliseconds"] == stored["Tally"]["_milliseconds"]
    assert summary["last"]["step"] == 24
    assert summary["last"]["skipped_steps"] == 11
    assert summary["last"]["loss"] == 1.8733272552490234
    assert restored["metric_logger"] == {"last": summary["last"], "sized": True}


def test_a_warning_that_the_first_run_printed_is_not_printed_again(main, old_run):
    """The guard's state is restored; the repeated command overflows three times in a row again."""
    done = main(
        f"checkpoint.resume={old_run('run_of_0_1')}",
        "tracking=none",
        "precision=16-mixed",
        "precision.loss_scale.init_scale=1e8",
    )
    assert done.rc == 0, done.stderr
    assert "steps in a row overflowed" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_of_an_old_version_is_evaluated(name, main, old_run, tmp_path):
    folder = old_run(name)
    done = main("mode=evaluate", f"checkpoint={folder}", "tracking=none")
    assert done.rc == 0, done.stderr
    (written,) = tmp_path.glob("outputs/runs/*/result.json")
    metrics = json.loads(written.read_text())["metrics"]
    (path,) = folder.glob("checkpoints/*.pt")
    stored = checkpoint_file.load(path)["observers"]["Tally"]["metrics"]
    assert metrics == pytest.approx(stored, rel=0.05)


def test_a_batch_that_a_guard_of_an_old_version_saved_is_replayed(main, old_run):
    folder = old_run("run_of_0_1")
    done = main("mode=replay", f"batch={folder / 'guard' / 'batch-000003.json'}", "tracking=none")
    assert done.rc == 0, done.stderr
    assert "replay of step 3: 16 samples" in done.stdout


def kinds(kind):
    for sub in kind.__subclasses__():
        yield sub
        yield from kinds(sub)


def test_the_keys_of_the_observers_are_those_of_the_checkpoints_that_users_have():
    """A key that changes loses the state of a resumed run."""
    runners = [k for k in kinds(Callback) if k.__module__.startswith("runner.")]
    assert {k.key for k in runners} == {
        "summary",
        "metric_logger",
        "guard",
        "early_stopping",
        "checkpointing",
        "progress",
        "profiler",
        "numerics",
        "stream",
        "own_callbacks",
        "pruning",
    }
    assert {k.key for k in runners if k.is_in_every_run} == {"summary", "metric_logger", "guard"}
    assert set(state_dict._OBSERVERS_OF_0_1.values()) <= {k.key for k in runners}


RECORD = StepRecord(7, 1, 1, 0.5, 0.1, 2.0, 3.0, 8, 1024.0, 0.0, 2)


def test_a_stored_record_has_names_and_no_gauges():
    state = record_to_state(RECORD._replace(gauges={"a": 1.0}))
    assert state["step"] == 7
    assert "gauges" not in state
    assert record_from_state(state) == RECORD
    assert record_to_state(None) is None
    assert record_from_state(None) is None


def test_a_stored_record_of_another_version_is_read():
    state = record_to_state(RECORD)
    assert record_from_state({**state, "of_a_later_version": 1}) == RECORD
    del state["skipped_steps"]  # as if the first version had not had it
    assert record_from_state(state) == RECORD._replace(skipped_steps=None)
    assert record_from_state(list(RECORD)) == RECORD
    with pytest.raises(TypeError, match="examples"):
        record_from_state(list(RECORD)[:7])
    with pytest.raises(TypeError, match="int"):
        record_from_state(7)


def test_the_summary_restores_its_own_state():
    first, second = RunSummary("val/accuracy", "max"), RunSummary("val/accuracy", "max")
    first.steps((RECORD._replace(step=1), RECORD))
    first.evaluation(EvalRecord(7, 1, 1, {"val/accuracy": 0.5}, 0.25))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.result_values() == first.result_values()


def test_an_observer_that_the_first_run_had_not_begins_with_no_history(main, old_run, restored):
    folder = old_run("run_of_0_1_transformer_engine_emulated")
    done = main(f"checkpoint.resume={folder}", "tracking=none", "train.early_stop=3")
    assert done.rc == 0, done.stderr
    assert restored["early_stopping"] == EarlyStopping("val/accuracy", "max", 3).state_dict()


@pytest.mark.parametrize("key", ["summary", "metric_logger", "guard"])
def test_a_checkpoint_without_the_state_of_an_observer_of_every_run_is_refused(key, main, old_run):
    folder = old_run("run_of_0_1")
    (path,) = folder.glob("checkpoints/*.pt")
    content = torch.load(path, weights_only=True)
    names = {new: old for old, new in state_dict._OBSERVERS_OF_0_1.items()}
    del content["observers"][names[key]]
    torch.save(content, path)
    done = main(f"checkpoint.resume={folder}", "tracking=none")
    assert done.rc == 2
    assert f"observers.{key}" in done.stderr
    assert "init.weights" in done.stderr
