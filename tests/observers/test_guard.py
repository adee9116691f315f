import math

import pytest

from runner.observers.guard import Guard


@pytest.fixture
def said():
    return []


@pytest.fixture
def guard(said):
    return Guard(said.append, "16-mixed")


def test_a_healthy_run_is_silent(guard, said, step, evaluation):
    guard.steps((step(1, 65536.0), step(2, 32768.0), step(3, 1.0)))
    guard.evaluation(evaluation(3, stagnant=0.5))
    guard.evaluation(evaluation(3, stagnant=None))
    assert said == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_once(guard, said, step, loss):
    guard.steps((step(1, 8.0), step(2, 8.0, loss=loss)))
    guard.steps((step(3, 8.0, loss=loss),))
    assert said == [f"warning: the loss is {loss} at step 2. Type precision=bf16-mixed."]


def test_an_overflow_is_no_warning(guard, said, step):
    """Dynamic scaling overflows by design; the step is skipped."""
    guard.steps((step(1, 8.0, overflow=1.0, skipped=1, loss=math.inf),))
    assert said == []


def test_no_precision_is_advised_where_the_range_is_not_the_cause(said, step):
    Guard(said.append, "32-true").steps((step(1, loss=math.nan),))
    assert said == ["warning: the loss is nan at step 1."]


def test_a_collapsed_scale(guard, said, step):
    guard.steps((step(1, 1.0), step(2, 0.5), step(3, 0.25)))
    (message,) = said
    assert "the loss scale fell to 0.5 at step 2" in message
    assert "precision.keep_fp32=[<module>]" in message


def test_updates_that_are_rounded_away(guard, said, evaluation):
    guard.evaluation(evaluation(10, stagnant=0.75))
    guard.evaluation(evaluation(20, stagnant=0.9))
    (message,) = said
    assert message.startswith("warning: 75% of the parameter elements with a gradient did not move")
    assert "precision=16-mixed" in message
    assert "optimizer.lr" in message
