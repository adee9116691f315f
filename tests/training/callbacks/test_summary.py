import math

import pytest

from runner.training.callbacks.runner_callbacks import RunSummary


@pytest.fixture
def summary():
    return RunSummary("val/accuracy", "max")


def test_rates_leave_the_first_block_out(summary, step):
    empty = summary.result_values()
    assert [empty[key] for key in ("steps", "best", "examples_per_second")] == [0, None, None]
    summary.on_steps((step(1, step_ms=900.0), step(2, step_ms=200.0), step(3, step_ms=200.0)), None)
    result = summary.result_values()
    assert (result["step_ms"], result["examples_per_second"]) == (200.0, 40.0)  # of one block
    summary.on_steps((step(4, step_ms=100.0), step(5, step_ms=300.0)), None)
    summary.on_steps((step(6, step_ms=500.0, loss=1.5),), None)
    result = summary.result_values()
    assert result["step_ms"] == 300.0
    assert result["examples_per_second"] == pytest.approx(3 * 8 / 0.900)
    assert (result["steps"], result["train_loss"]) == (6, 1.5)
    assert (summary.scales, result["loss_scale"]) == ([], None)


def test_scales_where_they_change_and_steps_that_were_skipped(summary, step):
    summary.on_steps((step(1, 8.0), step(2, 8.0, overflow=1.0, skipped=1)), None)
    summary.on_steps((step(3, 4.0, skipped=1), step(4, 4.0, overflow=1.0, skipped=2)), None)
    assert summary.scales == [(1, 8.0), (3, 4.0)]
    assert summary.overflows == [2, 4]
    assert summary.result_values()["skipped_steps"] == 2
    assert summary.result_values()["loss_scale"] == 4.0


@pytest.mark.parametrize(("direction", "best"), [("max", 0.9), ("min", 0.2)])
def test_the_best_in_the_tasks_direction_and_the_last(evaluation, direction, best):
    summary = RunSummary("val/accuracy", direction)
    for number, value in enumerate((0.5, 0.9, math.nan, 0.2, 0.4), 1):
        summary.on_evaluation(evaluation(number, accuracy=value, stagnant=value), None)
    assert summary.result_values()["best"] == best
    assert summary.result_values()["metrics"] == {"val/accuracy": 0.4}
    assert summary.result_values()["stagnant_share"] == 0.4


def test_less_than_a_quarter_of_a_second_gives_no_rate(step):
    summary = RunSummary("val/accuracy", "max")
    summary.on_steps((step(1, step_ms=900.0), *(step(n, step_ms=12.0) for n in range(2, 22))), None)
    assert summary.result_values()["examples_per_second"] is None
    assert summary.result_values()["step_ms"] == 12.0
    single = RunSummary("val/accuracy", "max")
    single.on_steps((step(1, step_ms=20.0),), None)
    assert single.result_values()["step_ms"] == 20.0
