import math
from dataclasses import replace

import pytest

from runner.core.config.schema import GuardSpec, RunSpec, TrainSpec
from runner.precision.registry import load_precision
from runner.training.callbacks.guard import MIN_SPIKE_STEPS, Guard

SAMPLES_NOTE = "The samples are in x.json"


class Messages(list):
    """The warnings, and in `saved` the steps whose samples were saved."""

    def __init__(self):
        self.saved = []

    def save_samples(self, record, why):
        self.saved.append((record.step, why))
        return SAMPLES_NOTE


@pytest.fixture
def messages():
    return Messages()


def make_guard(messages, precision="16-mixed", optimizer=None, train=None, **guard):
    spec = replace(
        RunSpec(),
        guard=GuardSpec(**guard),
        train=train or TrainSpec(),
        optimizer={"lr": 0.1} if optimizer is None else optimizer,
    )
    return Guard(spec, load_precision(precision), messages.append, messages.save_samples)


def overflowing(step, count, scale=8.0):
    return tuple(step(n, scale, 1.0, n, loss=math.inf) for n in range(1, count + 1))


def test_a_healthy_run_is_silent(messages, step, evaluation):
    guard = make_guard(messages)
    guard.on_steps((step(1, 65536.0), step(2, 32768.0), step(3, 1.0)), None)
    guard.on_evaluation(evaluation(3, stagnant=0.5), None)
    guard.on_evaluation(evaluation(3, stagnant=None), None)
    assert messages == messages.saved == []
    assert guard.weights_are_good
    assert not guard.stop_reason


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops(messages, step, loss):
    guard = make_guard(messages, "32-true")
    guard.on_steps((step(1), step(2, loss=loss), step(3, loss=math.nan)), None)
    assert (bool(guard.stop_reason), guard.weights_are_good, messages) == (True, False, [])
    assert messages.saved == [(2, f"the loss is {loss} at step 2")]
    assert guard.stop_reason == (
        f"guard.non_finite: the loss is {loss} at step 2.\n"
        "Try optimizer.lr=0.01 or train.clip_norm=1.0; "
        "guard.non_finite=warn continues regardless.\n"
        f"{SAMPLES_NOTE}"
    )


def test_gradients_that_are_not_finite_stop_a_step_before_the_loss_does(messages, step):
    guard = make_guard(messages, "bf16-mixed")
    guard.on_steps((step(1), step(2, grad_norm=math.nan), step(3, loss=math.nan)), None)
    assert "the gradient norm is nan at step 2 (loss 0.5)" in guard.stop_reason
    assert "precision=32-true or optimizer.lr=0.01" in guard.stop_reason


def test_a_warning_comes_once_and_the_run_continues(messages, step):
    guard = make_guard(messages, non_finite="warn")
    guard.on_steps((step(1, 8.0), step(2, 8.0, loss=math.nan)), None)
    guard.on_steps((step(3, 8.0, loss=math.nan),), None)
    (message,) = messages
    assert message.startswith("warning: the loss is nan at step 2.\nTry precision=bf16-mixed or ")
    assert "precision.keep_fp32=[<module>]" in message
    assert not guard.stop_reason
    assert len(messages.saved) == 1


def test_an_ignored_finding_is_neither_reported_nor_saved(messages, step):
    guard = make_guard(messages, non_finite="ignore", overflow="ignore", scale_floor="ignore")
    guard.on_steps((step(1, loss=math.nan), *overflowing(step, 40, 2.0**-9)), None)
    assert (messages, messages.saved, bool(guard.stop_reason)) == ([], [], False)


def test_an_overflow_is_no_finding(messages, step):
    """Dynamic scaling overflows by design; the step is skipped."""
    guard = make_guard(messages)
    guard.on_steps(overflowing(step, 29), None)
    guard.on_steps((step(30, 8.0), *overflowing(step, 29)), None)
    assert (messages, bool(guard.stop_reason)) == ([], False)


def test_overflows_in_a_row_stop_across_blocks_with_good_weights(messages, step):
    guard = make_guard(messages, overflow_steps=3)
    for record in overflowing(step, 3):
        assert not guard.stop_reason
        guard.on_steps((record,), None)
    assert (bool(guard.stop_reason), guard.weights_are_good) == (True, True)
    assert "overflow: 3 steps in a row overflowed, up to step 3 (loss scale 8)" in guard.stop_reason
    assert "Try precision=bf16-mixed or precision.keep_fp32=[<module>]" in guard.stop_reason


@pytest.mark.parametrize(
    ("scale", "fixed", "remedies"),
    [
        (1e9, True, "fixed=null or precision=bf16-mixed or precision.keep_fp32=[<module>]"),
        (1e21, False, "init_scale=65536 or precision=bf16-mixed or precision.keep_fp32=[<module>]"),
    ],
)
def test_where_all_steps_were_skipped_the_rate_is_no_cause(messages, step, scale, fixed, remedies):
    guard = make_guard(messages, overflow_steps=2)
    loss_scale = {"fixed": scale if fixed else None}
    guard.spec = replace(guard.spec, precision={"loss_scale": loss_scale})
    guard.on_steps(tuple(step(n, scale, 1.0, n) for n in (1, 2)), None)
    assert f"\nTry precision.loss_scale.{remedies}; guard.overflow=warn" in guard.stop_reason


def test_after_an_applied_step_the_learning_rate_may_be_a_cause(messages, step):
    guard = make_guard(messages, overflow_steps=2)
    guard.on_steps((step(1, 8.0), step(2, 8.0, 1.0, 1), step(3, 8.0, 1.0, 2)), None)
    assert "or optimizer.lr=0.01 or train.clip_norm=1.0;" in guard.stop_reason


@pytest.mark.parametrize(("action", "stops"), [("warn", False), ("stop", True)])
def test_a_collapsed_scale(messages, step, action, stops):
    guard = make_guard(messages, scale_floor=action)
    guard.on_steps((step(1, 1.0), step(2, 0.5), step(3, 0.25)), None)
    message = guard.stop_reason if stops else messages[0]
    assert "the loss scale fell to 0.5 at step 2" in message
    assert "precision.keep_fp32=[<module>]" in message
    assert (bool(guard.stop_reason), len(messages), len(messages.saved)) == (stops, not stops, 1)


def losses(step, values):
    return tuple(step(n, loss=loss) for n, loss in enumerate(values, 1))


HUGE_FIRST = {count: [1e6, *[2.0] * count, 200.0, 2.0] for count in (MIN_SPIKE_STEPS, 60)}
FALLING = [1e4, *(0.99**i for i in range(200)), 60.0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0] * MIN_SPIKE_STEPS + [12.0], f"12 at step {MIN_SPIKE_STEPS + 1}, 12 times its runni"),
        *(
            (HUGE_FIRST[n], f"200 at step {n + 2}, 100 times its running median")
            for n in HUGE_FIRST
        ),
        (FALLING, "60 at step 202"),
    ],
)
def test_a_spike_is_reported_against_the_running_median(messages, step, values, text):
    make_guard(messages, "32-true").on_steps(losses(step, values), None)
    (message,) = messages
    assert f"loss leapt to {text}" in message
    assert "Try optimizer.lr=0.01 or train.clip_norm=1.0." in message


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * (MIN_SPIKE_STEPS - 1) + [99.0],  # too early to know what is usual
        [1.0] * MIN_SPIKE_STEPS + [9.0],  # under the factor
        [0.01, 0.01, 0.01, 0.2] * 10 + [0.3],  # as noisy as ever
        [-1.0] * MIN_SPIKE_STEPS + [99.0],  # a loss without a scale of its own
        [0.0] * MIN_SPIKE_STEPS + [0.1],
        [2.3, 0.5, *[0.001] * MIN_SPIKE_STEPS, 0.048, 0.4],  # near 0: one example of a batch
        [-5.0, *[0.01] * MIN_SPIKE_STEPS, -0.2],
        [1e6, 1e6, *[2.0] * 60, 200.0],  # learned: a share of 2e-4 of what it began with
        [1e6, *[2.0] * (MIN_SPIKE_STEPS - 1), 200.0],  # too early
    ],
)
def test_a_loss_that_is_usual_early_or_without_scale_is_no_spike(messages, step, values):
    make_guard(messages).on_steps(losses(step, values), None)
    assert messages == []


def test_a_loss_that_returns_half_of_the_way_to_the_first_one_is_a_spike(messages, step):
    curve = losses(step, [2.3, *[0.001] * 99, 1.2])
    before = make_guard(messages, "32-true")
    before.on_steps(curve[:-1], None)
    # The first loss is long out of the window, and stays known after a resume.
    guard = make_guard(messages, "32-true")
    guard.load_state_dict(before.state_dict())
    guard.on_steps(losses(step, [0.048]), None)
    assert messages == []
    guard.on_steps(curve[-1:], None)
    assert "leapt to 1.2" in messages[0]


def test_a_spike_can_stop_and_its_factor_be_chosen(messages, step):
    guard = make_guard(messages, "32-true", spike="stop", spike_factor=3.0)
    guard.on_steps(losses(step, [1.0] * MIN_SPIKE_STEPS + [4.0]), None)
    assert (bool(guard.stop_reason), guard.weights_are_good) == (True, False)
    assert guard.stop_reason.startswith("guard.spike: the loss leapt to 4")


def test_nothing_is_advised_that_is_set_or_unknown(messages, step):
    guard = make_guard(messages, "32-true", {"muon": {"lr": 0.1}}, TrainSpec(clip_norm=1.0))
    guard.on_steps((step(1, loss=math.nan),), None)
    assert "Try a smaller learning rate; guard." in guard.stop_reason


def test_updates_that_are_rounded_away(messages, evaluation):
    guard = make_guard(messages)
    guard.on_evaluation(evaluation(10, stagnant=0.75), None)
    guard.on_evaluation(evaluation(20, stagnant=0.9), None)
    (message,) = messages
    assert message.startswith("warning: 75% of the parameter elements with a gradient did not move")
    assert "precision=16-mixed" in message
    assert "optimizer.lr" in message


@pytest.mark.parametrize("rule", ["nearest", "kahan", "stochastic_rounding"])
def test_a_rule_that_keeps_updates_is_not_advised_where_one_does(messages, evaluation, rule):
    guard = make_guard(messages)
    guard.precision = load_precision("bf16-true", update=rule)
    guard.on_evaluation(evaluation(10, stagnant=0.75), None)
    assert ("Type precision.update=kahan" in messages[0]) == (rule == "nearest")
    assert "a larger optimizer.lr" in messages[0]
