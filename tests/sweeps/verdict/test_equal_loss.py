"""The ratio of the times to an equal loss, on curves whose crossings are known by a formula."""

import math
from dataclasses import replace

import numpy as np
import pytest
from job_results import CPU, finished, lost

from runner.output.markup import to_markdown
from runner.sweeps.report.advice_page import advice_blocks
from runner.sweeps.report.columns import groups_table
from runner.sweeps.report.sweep_data import Job, SweepData
from runner.sweeps.verdict.advise_request import AdviseRequest
from runner.sweeps.verdict.equal_loss import MIN_POINTS, smoothed_curve, time_to_loss
from runner.sweeps.verdict.statistics import Tolerance

STEPS = 200
ANY_LOSS = Tolerance(max_gap=1e9)
LEVELS = (1.0, 1.01, 0.99)
"""What the losses of each seed are multiplied by: the baseline's seeds differ."""


def curve(losses, steps=None):
    steps = np.arange(1, len(losses) + 1) if steps is None else steps
    return np.array([steps, steps, losses], dtype=float)


def line(efficiency=1.0, count=STEPS, every=1):
    """Return losses that fall by 0.01 for each 1 / efficiency steps: means of them lie on it."""
    return 10 - 0.01 * efficiency * every * np.arange(1, count + 1)


def job(precision, seed, losses, speed=1.0, curves=None, **more):
    """Return a job that is judged by a loss, with its training losses."""
    values = {
        "quality": "val/loss",
        "direction": "min",
        "metrics": {"val/loss": float(losses[-1])},
        "examples_per_second": 100.0 * speed,
        "step_ms": 10 / speed,
    }
    result = replace(finished(precision, seed), **(values | more))
    return Job(result, {"train/loss": curve(losses)} if curves is None else curves)


def sweep(efficiency=1.0, speed=1.2, seeds=3, tolerance=ANY_LOSS, **more):
    """Return a sweep of 32-true, and of a precision that needs 1 / efficiency of its steps."""
    jobs = []
    for seed, level in enumerate(LEVELS[:seeds]):
        jobs.append(job("32-true", seed, level * line()))
        jobs.append(job("b", seed, level * line(efficiency), speed, **more))
    return SweepData(jobs, tolerance=tolerance)


def of(data, name="b"):
    return next(each for each in data.compared if each.group.name == name)


def test_a_mean_of_a_line_lies_on_the_line():
    steps, losses = smoothed_curve(curve(line()))
    assert losses == pytest.approx(10 - 0.01 * steps)
    # The last 30 % of 200 steps, 140 among them.
    assert (steps[0], steps[-1]) == (1, pytest.approx(170))


def test_losses_that_are_no_numbers_and_those_before_the_first_step_are_left_out():
    losses = [5.0, 4.0, math.nan, math.inf, np.finfo(float).max, 3.0]
    steps, smoothed = smoothed_curve(curve(losses, np.arange(6)))
    assert (steps.tolist(), smoothed.tolist()) == ([1, 5], [4, 3])
    assert smoothed_curve(np.empty((3, 0)))[0].tolist() == []


def test_a_repeated_step_counts_once():
    twice = curve([9.0, 1.0, 9.0, 3.0], np.array([8, 9, 9, 10]))
    assert smoothed_curve(twice)[1].tolist() == [9, 9, 7]


@pytest.mark.parametrize(
    ("loss", "time"), [(5.0, 1.0), (4.0, 2.0), (3.0, 3.0), (2.5, 3.5), (1.0, 7.0), (6.0, 1.0)]
)
def test_a_crossing_is_the_first_one_and_lies_between_two_points(loss, time):
    points = (np.array([1.0, 2, 4, 5, 7]), np.array([5.0, 4, 2, 3, 1]))
    assert time_to_loss(points, loss) == pytest.approx(time)


@pytest.mark.parametrize("efficiency", [1.0, 1.25, 0.8, 3.0])
def test_the_ratio_is_that_of_the_steps_times_that_of_their_speeds(efficiency):
    found = of(sweep(efficiency)).equal_loss
    assert (found.value, found.n) == (pytest.approx(1.2 * efficiency, rel=2e-3), 3)
    assert found.low == pytest.approx(found.high, rel=1e-3)


def test_equal_curves_give_the_ratio_of_the_speeds():
    compared = of(sweep())
    assert compared.equal_loss.value == pytest.approx(compared.speed_ratio.value, rel=1e-12)
    assert compared.equal_loss.low == pytest.approx(1.2, rel=1e-12)


def test_exchanging_the_precisions_inverts_the_ratio():
    one = sweep(1.25, speed=1.0)
    names = {"32-true": "b", "b": "32-true"}
    other = []
    for each in one.jobs:
        name = names[each.result.precision]
        other.append(replace(each, result=replace(each.result, precision=name, group=name)))
    inverse = of(SweepData(other, tolerance=ANY_LOSS)).equal_loss
    assert inverse.value == pytest.approx(1 / of(one).equal_loss.value, rel=1e-12)


def test_a_precision_that_ends_measurably_above_does_not_reach_the_loss():
    # Its quality is as good: the accuracy does not see what the loss does.
    accuracy = {"quality": "val/accuracy", "direction": "max"}
    data = sweep(0.9, speed=1.5)
    jobs = []
    for each in data.jobs:
        metrics = {"val/accuracy": 0.9 + each.result.seed / 100}
        jobs.append(replace(each, result=replace(each.result, metrics=metrics, **accuracy)))
    # advise.max_gap is in the unit of the accuracy, and says nothing of the loss.
    data = SweepData(jobs, tolerance=Tolerance(max_gap=0.5))
    compared = of(data)
    assert (compared.verdict, compared.speed_ratio.value) == ("indistinguishable", 1.5)
    assert (compared.equal_loss.value, compared.speed_verdict) == (0.0, "no gain")
    answer = data.answer
    assert answer.sentence == "Stay with 32-true: b is no faster to equal loss."
    assert "b is 1.50 × as fast as 32-true, not reaching its loss." in answer.text
    assert answer.record.metrics["answer/equal_loss_speed_ratio/b"] == 0.0
    table = groups_table(data.compared, answer.pick)
    cells = [row[table.head.index("speed to equal loss")] for row in table.rows]
    assert [cell.text for cell in cells] == ["", "not reached"]


def test_a_precision_of_worse_quality_does_not_reach_the_loss():
    data = sweep(tolerance=Tolerance(max_gap=0.01))
    jobs = [*data.jobs]
    for i, each in enumerate(jobs):
        if each.result.precision == "b":
            worse = {"val/loss": each.result.metrics["val/loss"] + 1}
            jobs[i] = replace(each, result=replace(each.result, metrics=worse))
    compared = of(SweepData(jobs, tolerance=data.tolerance))
    assert (compared.verdict, compared.equal_loss.value) == ("worse", 0.0)


def test_a_precision_that_diverged_in_a_seed_does_not_reach_the_loss():
    jobs = [*sweep(seeds=2).jobs, job("32-true", 2, line())]
    jobs.append(job("b", 2, line(), 1.2, diverged=True))
    assert of(SweepData(jobs)).equal_loss.value == 0.0


def test_one_that_is_faster_in_each_step_and_as_slow_to_the_loss_is_not_faster():
    data = sweep(0.7, speed=1.2)
    compared = of(data)
    assert compared.equal_loss.value == pytest.approx(0.84, rel=2e-3)
    assert compared.speed_verdict == "no gain"
    assert data.answer.sentence == "Stay with 32-true: b is no faster to equal loss."
    assert "1.20 × as fast as 32-true" in data.answer.text
    assert "0.84 × to equal loss" in data.answer.text
    assert data.answer.pick.is_baseline


def test_one_that_ends_better_gets_its_due():
    data = sweep(1.5)
    assert data.answer.sentence.startswith("Train in b: 1.20 × as fast")
    assert "1.80 × to equal loss" in data.answer.text


def test_a_noisy_ratio_keeps_the_verdict_on_the_steps():
    jobs = []
    draw = np.random.default_rng(0)
    for seed, level in enumerate(LEVELS):
        for name, speed in (("32-true", 1.0), ("b", 1.2)):
            losses = level * (1 + STEPS / np.arange(1, STEPS + 1)) ** 0.1
            noisy = losses * np.exp(0.2 * draw.standard_normal(STEPS))
            jobs.append(job(name, seed, noisy, speed, metrics={"val/loss": level}))
    compared = of(SweepData(jobs, tolerance=ANY_LOSS))
    assert compared.equal_loss.low < 1.2 < compared.equal_loss.high
    assert compared.speed_verdict == "faster"


def test_one_seed_has_no_interval_and_leaves_the_verdict_to_the_steps():
    compared = of(sweep(0.7, seeds=1))
    assert compared.equal_loss.low == compared.equal_loss.high == compared.equal_loss.value
    assert (compared.equal_loss.n, compared.speed_verdict) == (1, "faster")


def test_validation_counts_from_eight_points_on():
    for count, ratio in ((MIN_POINTS, 1.2 * 1.25), (MIN_POINTS - 1, 1.2)):
        steps = 20 * np.arange(1, count + 1)
        jobs = []
        for seed, level in enumerate(LEVELS):
            for name, efficiency, speed in (("32-true", 1.0, 1.0), ("b", 1.25, 1.2)):
                sparse = curve(level * line(efficiency, count, 20), steps)
                curves = {"val/loss": sparse, "train/loss": curve(level * line())}
                jobs.append(job(name, seed, line(), speed, curves))
        found = of(SweepData(jobs, tolerance=ANY_LOSS)).equal_loss
        assert found.value == pytest.approx(ratio, rel=1e-6)


def test_seeds_without_a_curve_on_one_side_are_left_out():
    jobs = [*sweep(1.25).jobs]
    jobs[0] = replace(jobs[0], curves={})
    found = of(SweepData(jobs, tolerance=ANY_LOSS))
    assert (found.equal_loss.n, found.speed_ratio.n) == (2, 3)
    jobs[3] = replace(jobs[3], curves={})
    jobs[5] = replace(jobs[5], curves={"train/loss": curve(line(count=MIN_POINTS - 1))})
    assert of(SweepData(jobs, tolerance=ANY_LOSS)).equal_loss is None


def test_seeds_that_one_side_lacks_are_left_out():
    jobs = [*sweep(1.25).jobs, job("32-true", 7, line()), job("32-true", 8, line())]
    assert of(SweepData(jobs, tolerance=ANY_LOSS)).equal_loss.n == 3
    jobs[-1] = Job(lost("b", seed=7))
    assert of(SweepData(jobs, tolerance=ANY_LOSS)).equal_loss.n == 3
    # Two common seeds and one alone on each side: the groups are compared unpaired.
    jobs = [*sweep(seeds=2).jobs, job("32-true", 2, line()), job("b", 3, line())]
    assert of(SweepData(jobs, tolerance=ANY_LOSS)).equal_loss is None


@pytest.mark.parametrize(
    "more",
    [
        {"examples_per_second": None},
        {"kernels": "emulated", "examples_per_second": None, "step_ms": None},
        {"trains": 0.1},
        {"trained_in": "32-true"},
        {"device": CPU},
        {"curves": {}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_is_not_comparable_has_no_ratio(more):
    data = sweep(**more)
    assert of(data).equal_loss is None
    assert of(data, "32-true").equal_loss is None
    assert not any("equal_loss" in name for name in data.answer.record.metrics)


def advised(mode="advise", efficiency=0.7, **more):
    asked = AdviseRequest("time", 1.0, 10, 60, 3, "5m", ["python"], max_gap=1e9, mode=mode)
    return SweepData(sweep(efficiency, **more).jobs, request=asked)


def test_advise_ranks_by_it_and_shows_it():
    data = advised()
    assert [each.name for each in data.advice.verdicts] == ["32-true", "b"]
    assert data.answer.sentence.startswith("Stay with 32-true")
    page = to_markdown("", [*advice_blocks(data.advice, None)])
    assert "| speed × 32-true | speed to equal loss |" in page
    assert "| 0.84" in page
    better = advised(efficiency=1.5)
    assert better.answer.sentence.startswith("Use b: 1.20 × as fast")
    assert "b is 1.20 × as fast as 32-true, 1.80 × to equal loss" in better.answer.text


def test_a_gate_says_it_and_records_it():
    data = advised("gate")
    assert "It is 1.20 × as fast as 32-true, 0.84 × to equal loss" in data.answer.text
    recorded = data.gate.to_json()["equal_loss_speed_ratio"]
    assert recorded == pytest.approx(0.84, rel=2e-3)
    assert data.answer.record.metrics["answer/equal_loss_speed_ratio/b"] == recorded


def test_headlines_are_short():
    for data in (sweep(), sweep(0.7), sweep(1.5), advised(), advised("gate")):
        assert len(data.answer.sentence.split()) <= 15
