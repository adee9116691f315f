"""runner.sweep.report.statistics: decisions with the error rate that they state."""

import math
import random
from collections import Counter

import pytest

from runner.sweep.report.statistics import ERROR_RATE, baseline_spread, non_inferiority_test


def test_a_clear_increase_in_loss_is_worse_with_students_interval() -> None:
    found = non_inferiority_test([0.9, 1.0, 1.1], spread=0.1, tolerance=1.0, family_size=1)
    assert found.verdict == "worse"
    assert found.value == pytest.approx(1.0)
    assert found.ci_half_width == pytest.approx(2.919986 * 0.1 / math.sqrt(3))  # t(0.95, 2 df)
    assert found.margin == pytest.approx(0.1)


def test_an_increase_within_the_tolerance_is_indistinguishable() -> None:
    assert non_inferiority_test([0.05, 0.051, 0.049], 0.1, 1.0, 1).verdict == "indistinguishable"
    assert non_inferiority_test([0.05, 0.051, 0.049], 0.1, 0.1, 1).verdict == "worse"


def test_noise_is_no_evidence() -> None:
    assert non_inferiority_test([1.0, -0.9, 0.8], 0.1, 1.0, 1).verdict == "unclear"


def test_a_gain_is_better() -> None:
    assert non_inferiority_test([-0.9, -1.0, -1.1], 0.1, 1.0, 1).verdict == "better"


@pytest.mark.parametrize("gaps", [[5.0], [5.0, 5.1]])
def test_two_seeds_give_no_verdict(gaps: list[float]) -> None:
    found = non_inferiority_test(gaps, 0.1, 1.0, 1)
    assert (found.verdict, found.ci_half_width, found.n) == ("unclear", math.inf, len(gaps))


def test_equal_losses_in_every_seed_are_indistinguishable_even_without_a_tolerance() -> None:
    assert non_inferiority_test([0.0] * 3, 0.1, 0.0, 1).verdict == "indistinguishable"


def test_one_seed_has_no_baseline_spread() -> None:
    assert math.isnan(baseline_spread([1.0]))
    assert non_inferiority_test([0.0] * 5, math.nan, 1.0, 1).verdict == "unclear"


def test_false_alarms_are_as_rare_as_stated() -> None:
    """Six equal precisions judged together, without a tolerance to hide behind: a false "worse"
    among them in 5 % of the times, within three standard errors of 3000 draws."""
    draw, alarms = random.Random(1), 0
    for _ in range(3000):
        verdicts = Counter(
            non_inferiority_test([draw.gauss(0, 1) for _ in range(5)], 1.0, 0.0, 6).verdict
            for _ in range(6)
        )
        alarms += verdicts["worse"] > 0
    assert alarms / 3000 == pytest.approx(ERROR_RATE, abs=3 * math.sqrt(0.05 * 0.95 / 3000))
