"""What hooks of a step are called for, and when."""

from contextlib import contextmanager

import pytest
import torch
from states import make_state, regression_batch, regression_net

from runner.core.loop.step import train_step
from runner.core.loop.train_state import ScheduledOptimizer, StepHook
from runner.diagnostics.data_checks import checked_losses
from runner.training.tasks.regression import Regression


class Notes(StepHook):
    """Notes what it is called for."""

    def __init__(self):
        self.seen = []

    def begin(self, step):
        self.seen.append(f"begin {step}")

    @contextmanager
    def around_forwards(self):
        self.seen.append("enter")
        try:
            yield
        finally:
            self.seen.append("leave")

    def before_update(self):
        self.seen.append("update")

    def end(self, found_infs):
        self.seen.append(f"end {[flag if flag is None else flag.item() for flag in found_infs]}")


def noted_state(precision="32-true", **options):
    state = make_state(regression_net(), precision, **options)
    notes = Notes()
    state.hooks.add(notes)
    state.model[0].register_forward_hook(lambda *_: notes.seen.append("forward"))
    return state, notes


@pytest.mark.parametrize(("precision", "flag"), [("32-true", "None"), ("16-mixed", "0.0")])
def test_a_hook_is_called_around_all_forwards_and_around_the_update(precision, flag):
    state, notes = noted_state(precision)
    train_step(state, [regression_batch(4), regression_batch(4, 2)])
    expected = ["begin 1", "enter", "forward", "forward", "leave", "update", f"end [{flag}]"]
    assert notes.seen == expected
    state.hooks.remove(notes)
    train_step(state, [regression_batch(4)])
    assert notes.seen == [*expected, "forward"]


def test_a_hook_is_called_around_each_evaluation_of_a_closure():
    def lbfgs(parameters):
        optimizer = torch.optim.LBFGS(parameters, max_iter=2)
        return ScheduledOptimizer(optimizer, takes_closure=True)

    state, notes = noted_state(optimizer=lbfgs)
    train_step(state, [regression_batch(4)])
    evaluation = ["enter", "forward", "leave"]
    assert notes.seen == ["begin 1", "update", *evaluation, *evaluation, "end [None]"]


def test_an_error_in_a_forward_leaves_the_contexts():
    state, notes = noted_state()
    with pytest.raises(RuntimeError):
        train_step(state, [(torch.ones(4, 7), torch.ones(4, 2))])
    assert notes.seen == ["begin 1", "enter", "leave"]


class Changing(Regression):
    """Returns a further value in every second micro-batch."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def loss(self, output, target):
        self.calls += 1
        value = super().loss(output, target)
        return (value, {"odd": value}) if self.calls % 2 else value


def test_micro_batches_with_other_values_are_refused():
    state = make_state(regression_net(), task=Changing())
    with pytest.raises(KeyError, match="odd"):
        train_step(state, [regression_batch(4), regression_batch(4, 2)])


def test_the_check_of_a_tasks_values_ends_with_its_context():
    task = Regression()
    with checked_losses(task):
        assert "loss" in vars(task)
    assert "loss" not in vars(task)
