"""A resumed run's callbacks continue with what the checkpoint holds of them."""

import copy

import pytest
import torch

from runner.core.loop.step_records import EvalRecord, StepRecord
from runner.core.record import checkpoint_file
from runner.diagnostics.numerics.probe import NumericsCallback
from runner.modes.training_callbacks import TrainingCallbacks
from runner.tracking import locate
from runner.training.callbacks.guard import EarlyStopping, Guard
from runner.training.callbacks.progress import NotebookProgress, ProgressBar, ProgressLines
from runner.training.callbacks.runner_callbacks import (
    Checkpointing,
    MetricLogger,
    Profiler,
    RunSummary,
)
from runner.training.callbacks.user_callbacks import UserCallbacks

RUN = (
    *("model=mlp", "model.hidden=[8]", "data=digits", "train.batch_size=16", "tracking=none"),
    *("train.eval_every=2", "train.log_every=2", "checkpoint.best=true"),
)
OVERFLOWS = (
    *("precision=16-mixed", "precision.loss_scale.init_scale=1e8"),
    *("guard.overflow=warn", "guard.overflow_steps=3"),
)
IN_EVERY_RUN = {RunSummary: "summary", MetricLogger: "metric_logger", Guard: "guard"}
KEYS = {
    **IN_EVERY_RUN,
    EarlyStopping: "early_stopping",
    Checkpointing: "checkpointing",
    Profiler: "profiler",
    NumericsCallback: "numerics",
    UserCallbacks: "own_callbacks",
    **dict.fromkeys((ProgressBar, ProgressLines, NotebookProgress), "progress"),
}
"""By each class of callbacks, the key of its state in the checkpoints that users have."""
RECORD = StepRecord(7, 1, 1, 0.5, 0.1, 2.0, 3.0, 8, 1024.0, 0.0, 2)


@pytest.fixture
def interrupted(main, tmp_path):
    """Train a run that can be resumed at its last step, and return its folder and its output."""

    def train(*typed):
        done = main(*RUN, "train.max_steps=12", *typed, f"hydra.run.dir={tmp_path / 'run'}")
        done.check_ok()
        return tmp_path / "run", done.stdout + done.stderr

    return train


@pytest.fixture
def restored(monkeypatch):
    """Return the callbacks' states, by key, as they are right after a command's restore."""
    states = {}
    restore = TrainingCallbacks.restore

    def spy(callbacks, saved):
        messages = restore(callbacks, saved)
        states.update({c.key: copy.deepcopy(c.state_dict()) for c in callbacks.callbacks})
        return messages

    monkeypatch.setattr(TrainingCallbacks, "restore", spy)
    return states


def test_every_callback_continues_with_the_state_of_the_checkpoint(main, interrupted, restored):
    folder, said = interrupted(*OVERFLOWS, "train.early_stop=9")
    assert "steps in a row overflowed" in said
    saved = checkpoint_file.load(locate.find_checkpoint(str(folder)))["callbacks"]
    done = main(f"checkpoint.resume={folder}", "train.max_steps=14").check_ok()
    assert restored == saved
    assert saved["guard"]["said"] == ["overflow"]
    # The repeated command overflows again, and the first run has said so.
    assert "steps in a row overflowed" not in done.stdout + done.stderr


def test_a_callback_that_the_first_run_had_not_begins_with_no_history(main, interrupted, restored):
    folder, _ = interrupted()
    main(f"checkpoint.resume={folder}", "train.max_steps=14", "train.early_stop=3").check_ok()
    assert restored["early_stopping"] == EarlyStopping("val/accuracy", "max", 3).state_dict()


def test_a_checkpoint_without_the_state_of_a_callback_of_every_run_is_refused(main, interrupted):
    folder, _ = interrupted()
    path = locate.find_checkpoint(str(folder))
    content = torch.load(path, weights_only=True)
    for key in IN_EVERY_RUN.values():
        others = {name: state for name, state in content["callbacks"].items() if name != key}
        torch.save({**content, "callbacks": others}, path)
        main(f"checkpoint.resume={path}", "train.max_steps=14").check_refused(
            f"callbacks.{key}", "init.weights"
        )


def test_the_keys_of_the_callbacks_are_those_of_the_checkpoints_that_users_have():
    """A key that changes loses the state of a resumed run."""
    assert {kind: kind.key for kind in KEYS} == KEYS
    assert [kind for kind in KEYS if kind.is_in_every_run] == [*IN_EVERY_RUN]


def test_every_callback_of_a_run_is_listed(main, restored, interrupted):
    """Those of a run that asks for all of them."""
    folder, _ = interrupted("train.early_stop=9")
    own = ("callbacks.mine._target_=process_callbacks.Stop", "callbacks.mine.at=99")
    typed = (*own, "checkpoint.every_steps=2", "debug.profile=2", "numerics.every=2")
    main(f"checkpoint.resume={folder}", "train.max_steps=14", *typed).check_ok()
    assert set(restored) == set(KEYS.values())


def test_a_stored_record_has_names_and_no_gauges():
    state = RECORD._replace(gauges={"a": 1.0}).to_state()
    assert state["step"] == 7
    assert "gauges" not in state
    assert StepRecord(**state) == RECORD


@pytest.mark.parametrize(("change", "word"), [({"odd": 1}, "odd"), ({"step": None}, "step")])
def test_a_stored_record_of_other_fields_is_refused(change, word):
    state = {**RECORD.to_state(), **change}
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(TypeError, match=word):
        StepRecord(**state)


def test_the_summary_restores_its_own_state():
    first, second = RunSummary("val/accuracy", "max"), RunSummary("val/accuracy", "max")
    first.on_steps((RECORD._replace(step=1), RECORD), None)
    first.on_evaluation(EvalRecord(7, 1, 1, {"val/accuracy": 0.5}, 0.25), None)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.result_values() == first.result_values()
