"""Bringing records from the device to the host."""

from time import perf_counter, time

import pytest
import torch
from states import CPU, decaying_sgd, make_state, regression_batch, regression_net
from torch.nn import functional as F

from runner.core.base.accelerators import Accelerator
from runner.core.base.errors import ConfigError
from runner.core.loop.step import loss_of, train_step
from runner.core.loop.step_records import STEP_METRICS, HostTransfer, RecordBuffer, StepMetric
from runner.core.record.metric_names import METRICS
from runner.core.record.tracker import NoTracker
from runner.diagnostics.data_checks import checked_losses
from runner.training.callbacks.runner_callbacks import MetricLogger
from runner.training.tasks.regression import Regression


def small_state(name, lr=0.1, **options):
    return make_state(regression_net(), name, optimizer=decaying_sgd(lr), **options)


def test_records_are_exact_and_in_order():
    state = small_state("32-true")
    started = perf_counter()
    pending = [train_step(state, [regression_batch(4, seed)]) for seed in range(5)]
    records = HostTransfer(pending, started).records(0)
    assert [r.step for r in records] == [1, 2, 3, 4, 5]
    for p, r in zip(pending, records, strict=True):
        assert r.loss == p.loss.item()
        assert r.grad_norm == torch.linalg.vector_norm(p.norms).item()
        assert (r.lr, r.epoch, r.examples, r.time_ms) == (p.lr, p.epoch, 4, p.time_ms)
        assert (r.loss_scale, r.overflow, r.skipped_steps) == (None, None, None)
    total = (pending[-1].ended_at - started) * 1e3
    assert sum(r.step_ms for r in records) == pytest.approx(total)
    assert all(r.step_ms > 0 for r in records)
    assert abs(records[-1].time_ms - 1000 * time()) < 100_000


def test_float64_comes_over_whole():
    state = small_state("64-true")
    pending = [train_step(state, [regression_batch(4)])]
    (record,) = HostTransfer(pending, 0.0).records(0)
    assert record.loss == pending[0].loss.item()
    assert record.loss != float(torch.tensor(record.loss, dtype=torch.float32))


def test_skipped_steps_are_counted_across_blocks():
    scale = {"init_scale": 2.0**30, "growth_interval": 50}
    state = small_state("16-mixed", lr=0.0, loss_scale=scale)
    skipped, overflows = 0, []
    for _ in range(5):
        pending = [train_step(state, [regression_batch(4)]) for _ in range(5)]
        block = HostTransfer(pending, 0.0).records(skipped)
        for p, r in zip(pending, block, strict=True):
            overflows.append(r.overflow)
            assert r.overflow in (0.0, 1.0)
            assert r.loss_scale == p.scale.item()
            assert (r.skipped_steps, type(r.skipped_steps)) == (int(sum(overflows)), int)
        skipped = block[-1].skipped_steps
    assert overflows[0] == 1.0
    assert 5 < sum(overflows) < 25
    scales = 2.0**30 * 0.5 ** sum(overflows)
    assert state.scale.value.item() == scales


def test_steps_may_differ_in_their_numbers_of_gradients():
    state = small_state("32-true")
    pending = [train_step(state, [regression_batch(4)])]
    state.model[2].requires_grad_(False)
    pending.append(train_step(state, [regression_batch(4)]))
    assert [len(p.norms) for p in pending] == [4, 2]
    records = HostTransfer(pending, 0.0).records(0)
    for p, r in zip(pending, records, strict=True):
        assert r.grad_norm == pytest.approx(torch.linalg.vector_norm(p.norms).item())


def test_gauges_are_those_of_the_blocks_last_step(monkeypatch):
    """Also where the block arrives later."""
    monkeypatch.setattr("runner.core.loop.step_records.HostTransfer.is_ready", False)
    state = small_state("32-true")
    monkeypatch.setattr(
        type(state.precision),
        "gauges",
        lambda self, model: {"fp8/amax/0": torch.tensor(state.step)},
    )
    blocks, seen = RecordBuffer(state), []
    for seed in range(6):
        blocks.add(train_step(state, [regression_batch(4, seed)]))
        if state.step % 2 == 0:
            blocks.send()
            seen += blocks.ready_records()
    seen += blocks.flush()
    assert [[record.gauges for record in block] for block in seen] == [
        [None, {"fp8/amax/0": float(step)}] for step in (2, 4, 6)
    ]


class Points(NoTracker):
    """Keeps the values of each step."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, records):
        self.logged += [(step, values) for step, _, values in records]


@pytest.mark.parametrize("name", ["32-true", "16-mixed"])
def test_a_metric_is_added_by_one_entry_of_the_table(monkeypatch, name):
    state = small_state(name)
    tracker = Points()
    logger = MetricLogger(tracker, state, Accelerator(CPU))
    before = logger.state_dict()
    largest = StepMetric(
        field="largest_weight",
        metric="train/largest_weight",
        measure=lambda state: state.model[0].weight.abs().max(),
    )
    monkeypatch.setattr("runner.core.loop.step_records.STEP_METRICS", (*STEP_METRICS, largest))
    wanted, buffer = {}, RecordBuffer(state)
    for seed in range(4):
        buffer.add(train_step(state, [regression_batch(4, seed)]))
        wanted[state.step] = state.model[0].weight.abs().max().item()
        if state.step % 2 == 0:
            buffer.send()
    for block in buffer.flush():
        logger.on_steps(block, None)
    key = "train/largest_weight"
    assert {step: values[key] for step, values in tracker.logged if key in values} == wanted
    assert all("train/loss" in values for _, values in tracker.logged if key in values)
    # The checkpoint's format is the same with the metric and without it.
    stored = logger.state_dict()
    assert stored.keys() == before.keys()
    assert not {key, "largest_weight", "measured"} & stored["last"].keys()


def test_every_metric_of_the_table_has_a_description():
    assert {entry.metric for entry in STEP_METRICS} <= METRICS.keys()


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
    return [record.tracker_values() for block in buffer.flush() for record in block]


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
        (
            lambda output, loss: {"lr": loss},
            "named 'lr'. Allowed: .* but not loss, lr, .* the runner records",
        ),
        (lambda output, loss: {"a=b": loss}, "named 'a=b'. Allowed: text of letters"),
        (lambda output, loss: {"size": 3.0}, "returned as size a float. Allowed: a tensor of one"),
        (lambda output, loss: {"size": output}, r"returned as size a tensor \[4, 2\] on cpu"),
        (lambda output, loss: loss, r"returned a tuple of 2. It returns the loss, or \(loss, val"),
    ],
)
def test_what_cannot_be_recorded_is_refused(terms, message):
    state = make_state(regression_net(), task=Sized(terms))
    with pytest.raises(ConfigError, match=message), checked_losses(state.task):
        loss_of(state, *regression_batch(4))


def test_other_names_in_a_later_step_are_refused():
    names = iter(["first", "first", "second"])
    task = Sized(lambda output, loss: {next(names): loss})
    with pytest.raises(ConfigError, match=r"values first before, and in step 3 second\. Return"):
        recorded([regression_batch(4)], task, steps=3)


def test_a_value_on_another_device_is_refused():
    task = Sized(lambda output, loss: {"size": torch.empty((), device="meta")})
    with pytest.raises(ConfigError, match="on meta"), checked_losses(task):
        loss_of(make_state(regression_net(), task=task), *regression_batch(4))
