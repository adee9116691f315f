import math

import pytest
import torch

from runner.core.base.accelerators import Accelerator
from runner.core.record.tracker import NoTracker
from runner.precision import registry
from runner.training.callbacks.runner_callbacks import MetricLogger


class Notebook(NoTracker):
    """Keeps every point."""

    def __init__(self):
        self.points = []
        self.checks = 0

    def log_metrics(self, records):
        for step, time_ms, values in records:
            self.points += [(key, step, time_ms, value) for key, value in values.items()]

    def check(self):
        self.checks += 1

    def of(self, key):
        return [(step, value) for name, step, _, value in self.points if name == key]


class State:
    """Two tensors of optimizer state: 2 MiB."""

    plain_model, precision = None, registry.load_precision("32-true")

    def optimizer_tensors(self):
        return iter([torch.zeros(2**18), torch.zeros(2**18)])


@pytest.fixture
def notebook():
    return Notebook()


@pytest.fixture
def recorder(notebook):
    return MetricLogger(notebook, State(), Accelerator(torch.device("cpu")))


def test_every_step_at_its_own_number_and_time(notebook, recorder, step):
    recorder.on_steps((step(1, loss=3.0), step(2, loss=2.0, lr=0.05, grad_norm=9.0)), None)
    recorder.on_steps((step(3, loss=1.0),), None)
    assert notebook.of("train/loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert notebook.of("train/lr")[1] == (2, 0.05)
    assert notebook.of("train/grad_norm")[1] == (2, 9.0)
    assert ("train/loss", 2, 1002, 2.0) in notebook.points
    assert notebook.checks == 2


def test_a_precision_without_a_loss_scale_logs_none(notebook, recorder, step):
    recorder.close()
    assert notebook.points == []  # of a run of no steps
    recorder.on_steps((step(1), step(2)), None)
    recorder.close()
    assert not [p for p in notebook.points if p[0].startswith("loss_scale/")]


def test_the_scale_of_every_step(notebook, recorder, step):
    recorder.on_steps((step(1, 8.0, overflow=1.0, skipped=1), step(2, 4.0, skipped=1)), None)
    assert notebook.of("loss_scale/value") == [(1, 8.0), (2, 4.0)]
    assert notebook.of("loss_scale/overflow") == [(1, 1.0), (2, 0.0)]
    assert notebook.of("loss_scale/skipped_steps") == [(1, 1), (2, 1)]


def test_changes_show_each_dip_by_the_value_before_and_after(notebook, recorder, step):
    """One step at half the scale, then back: a line through the changes must drop at once and
    rise at once, with no slope between far points."""
    scales = [8.0, 8.0, 8.0, 4.0, 8.0, 8.0, 16.0, 16.0]
    records = [step(i, scale) for i, scale in enumerate(scales, 1)]
    recorder.on_steps(tuple(records[:4]), None)  # the dip is at the border of two blocks
    recorder.on_steps(tuple(records[4:]), None)
    recorder.close()
    dip = [(3, 8.0), (4, 4.0), (4, 4.0), (5, 8.0)]
    rise = [(6, 8.0), (7, 16.0)]
    assert notebook.of("loss_scale/changes") == [(1, 8.0), *dip, *rise, (8, 16.0)]
    line = dict(notebook.of("loss_scale/changes"))
    for number, scale in enumerate(scales, 1):  # the line through the points is the history
        before = max(s for s in line if s <= number)
        assert line[before] == scale


def test_a_constant_scale_is_two_points(notebook, recorder, step):
    recorder.on_steps(tuple(step(i, 8.0) for i in range(1, 50)), None)
    recorder.close()
    assert notebook.of("loss_scale/changes") == [(1, 8.0), (49, 8.0)]


def test_rates_are_of_a_block(notebook, recorder, step):
    recorder.on_steps((step(1, step_ms=10.0, examples=8), step(2, step_ms=30.0, examples=4)), None)
    assert notebook.of("perf/step_ms") == [(2, 20.0)]
    assert notebook.of("perf/examples_per_second") == [(2, 12 / 0.040)]
    ((at, peak),) = notebook.of("memory/peak_mib")
    assert at == 2
    assert peak > 1


def test_the_optimizers_memory_is_logged_once(notebook, recorder, step):
    recorder.on_steps((step(1), step(2)), None)
    recorder.on_steps((step(3),), None)
    assert notebook.of("memory/optimizer_mib") == [(2, 2.0)]


def test_the_optimizers_memory_waits_for_a_step_that_is_applied(notebook, recorder, step):
    recorder.on_steps((step(1, 8.0, overflow=1.0), step(2, 4.0, overflow=1.0)), None)
    assert notebook.of("memory/optimizer_mib") == []
    recorder.on_steps((step(3, 2.0),), None)
    assert notebook.of("memory/optimizer_mib") == [(3, 2.0)]


def test_an_evaluation(notebook, recorder, evaluation):
    recorder.dispatch(evaluation(5, loss=0.5, accuracy=0.9), None)
    recorder.dispatch(evaluation(9, stagnant=0.25, loss=math.inf), None)
    assert notebook.of("val/loss") == [(5, 0.5), (9, math.inf)]
    assert notebook.of("val/accuracy") == [(5, 0.9)]
    assert notebook.of("guard/stagnant_share") == [(9, 0.25)]
