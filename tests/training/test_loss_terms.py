"""Values that a task returns with its loss are recorded in every step as the loss is."""

import pytest
import torch
from states import make_state, regression_batch, regression_net
from torch.nn import functional as F

from runner.training.record_buffer import RecordBuffer
from runner.training.step import loss_of, train_step
from runner.training.step_metrics import tracker_values
from runner.training.tasks.regression import Regression
from runner.utils.errors import ConfigError


class Sized(Regression):
    """Returns what `terms` returns of the output and the loss, with the loss."""

    def __init__(self, terms):
        super().__init__()
        self.terms = terms

    def loss(self, output, target):
        loss = F.mse_loss(output, target)
        return loss, self.terms(output, loss)


def penalised(output, loss):
    return {"fit": loss, "size": output.square().mean()}


def recorded(micros, task, steps=1):
    state = make_state(regression_net(), "64-true", task=task)
    buffer = RecordBuffer(state)
    for _ in range(steps):
        buffer.add(train_step(state, micros))
    return [tracker_values(record) for block in buffer.flush() for record in block]


def test_every_step_records_them_beside_the_same_loss():
    found = recorded([regression_batch(4)], Sized(penalised), steps=3)
    plain = recorded([regression_batch(4)], Regression(), steps=3)
    assert [step.pop("train/fit") for step in found] == [step["train/loss"] for step in found]
    assert all(step.pop("train/size") > 0 for step in found)
    assert found == plain


def test_micro_batches_weigh_by_their_labels():
    inputs, targets = regression_batch(6)
    micros = [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])]
    (whole,) = recorded([(inputs, targets)], Sized(penalised))
    (parts,) = recorded(micros, Sized(penalised))
    assert parts == pytest.approx(whole, rel=1e-12)


def test_a_plain_loss_records_nothing_more():
    state = make_state(regression_net())
    assert train_step(state, [regression_batch(4)]).measured == {}


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (lambda output, loss: {"lr": loss}, "named lr, and train/lr is recorded by the runner"),
        (lambda output, loss: {"a=b": loss}, "named 'a=b'. Allowed: text of letters"),
        (lambda output, loss: {"size": 3.0}, "returned as size a float. Allowed: a tensor of one"),
        (lambda output, loss: {"size": output}, r"returned as size a tensor \[4, 2\] on cpu"),
        (lambda output, loss: loss, r"returned a tuple of 2. It returns the loss, or \(loss, val"),
    ],
)
def test_what_cannot_be_recorded_is_refused(terms, message):
    state = make_state(regression_net(), task=Sized(terms))
    with pytest.raises(ConfigError, match=message):
        loss_of(state, *regression_batch(4))


def test_other_names_in_a_later_step_are_refused():
    names = iter(["first", "first", "second"])
    task = Sized(lambda output, loss: {next(names): loss})
    with pytest.raises(ConfigError, match=r"values first before, and in step 3 second\. Return"):
        recorded([regression_batch(4)], task, steps=3)


def test_a_value_on_another_device_is_refused():
    task = Sized(lambda output, loss: {"size": torch.empty((), device="meta")})
    with pytest.raises(ConfigError, match="on meta"):
        loss_of(make_state(regression_net(), task=task), *regression_batch(4))
