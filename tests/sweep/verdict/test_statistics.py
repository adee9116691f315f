"""runner.sweeps.verdict.statistics: intervals as scipy's, verdicts with the stated error rate."""

import math
import random
from collections import Counter

import pytest
from scipy import stats

from runner.sweeps.report.wording import VERDICT_WORDS, difference_words
from runner.sweeps.verdict.statistics import (
    ERROR_RATE,
    SeedValues,
    Verdict,
    baseline_spread,
    non_inferiority_test,
    quality_difference,
)

MINE = [0.90, 0.93, 0.95]


@pytest.mark.parametrize(
    ("base", "test", "verdict"),
    [([0.88, 0.92, 0.90], "paired t", "same"), ([0.5, 0.52], "Welch", "better")],
)
def test_the_interval_equals_scipys(base: list[float], test: str, verdict: str) -> None:
    got = quality_difference(list(enumerate(MINE)), list(enumerate(base)), "max")
    paired = test == "paired t"
    found = stats.ttest_rel(MINE, base) if paired else stats.ttest_ind(MINE, base, equal_var=False)
    interval = found.confidence_interval(0.95)
    ends = (got.value - got.ci_half_width, got.value + got.ci_half_width)
    assert ends == pytest.approx((interval.low, interval.high))
    assert (got.test, got.verdict) == (test, verdict)


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e80, 1e200])
def test_an_interval_scales_with_its_values(size: float) -> None:
    def difference(unit: float):
        mine = [(0, 1 * unit), (1, 2 * unit)]
        return quality_difference(mine, [(0, 4 * unit), (1, 6 * unit), (2, 7 * unit)], "min")

    got = difference(size)
    plain = difference(1.0)
    assert got.verdict == plain.verdict
    assert got.ci_half_width / size == pytest.approx(plain.ci_half_width)
    assert "worse by" not in difference_words(got)[0]


@pytest.mark.parametrize("lacks", ["group", "baseline"])
def test_a_seed_that_one_side_lacks_leaves_the_others_in_pairs(lacks: str) -> None:
    base = [(0, 0.90), (1, 0.95), (2, 0.80), (3, 0.99)]
    mine = [(seed, value - 0.001 * (seed + 1)) for seed, value in base]
    sides = (mine[:3], base) if lacks == "group" else (mine, base[:3])
    got = quality_difference(*sides, "max")
    assert (got.test, got.n, got.value) == ("paired t", 3, pytest.approx(-0.002))


@pytest.mark.parametrize("keys", [[None, None], [1, 1], [3, 4]])
def test_seeds_that_do_not_match_are_not_paired(keys: list[int | None]) -> None:
    mine = list(zip(keys, [0.9, 0.8], strict=True))
    assert quality_difference(mine, [(0, 0.9), (1, 0.7)], "max").test == "Welch"


@pytest.mark.parametrize(("direction", "expected"), [("max", "worse"), ("min", "better")])
def test_the_direction_decides_what_is_better(direction, expected: str) -> None:
    mine, base = [(0, 0.50), (1, 0.51), (2, 0.52)], [(0, 0.90), (1, 0.912), (2, 0.921)]
    got = quality_difference(mine, base, direction)
    assert got.verdict == expected
    assert difference_words(got)[0].startswith(f"{expected} by 0.40")


@pytest.mark.parametrize(
    ("mine", "base", "words"),
    [
        ([0.9, 0.9], [0.9, 0.9], ("no measurable difference", "identical in every seed")),
        ([0.0, 0.0], [0.0, 0.0], ("no measurable difference", "identical in every seed")),
        ([0.9, 0.9], [0.8, 0.8], ("not judged (no spread over the seeds)", "+0.1")),
        ([0.99], [0.9, 0.8], ("not judged (one seed)", "+0.14")),
    ],
)
def test_what_has_no_spread_is_not_judged(
    mine: list[float], base: list[float], words: tuple[str, str]
) -> None:
    for offset in (0, 5):
        others: SeedValues = list(enumerate(base, offset))
        assert difference_words(quality_difference(list(enumerate(mine)), others, "max")) == words


@pytest.mark.parametrize(
    ("differences", "spread", "tolerance", "verdict"),
    [
        ([0.05, 0.051, 0.049], 0.1, 1.0, "indistinguishable"),
        ([0.05, 0.051, 0.049], 0.1, 0.1, "worse"),
        ([-0.9, -1.0, -1.1], 0.1, 1.0, "better"),
        ([1.0, -0.9, 0.8], 0.1, 1.0, "unclear"),
        # Equal losses in every seed need no tolerance.
        ([0.0] * 3, 0.1, 0.0, "indistinguishable"),
        # One seed of float32 has no spread.
        ([0.0] * 5, baseline_spread([1.0]), 1.0, "unclear"),
        # Two seeds get no verdict.
        ([5.0], 0.1, 1.0, "unclear"),
        ([5.0, 5.1], 0.1, 1.0, "unclear"),
    ],
)
def test_the_test_of_non_inferiority_decides(
    differences: list[float], spread: float, tolerance: float, verdict: str
) -> None:
    found = non_inferiority_test(differences, tolerance * spread, family_size=1)
    assert (found.verdict, found.n) == (verdict, len(differences))
    assert math.isinf(found.ci_half_width) == (len(differences) < 3 or math.isnan(spread))


def test_a_clear_increase_in_loss_is_worse_with_students_interval() -> None:
    found = non_inferiority_test([0.9, 1.0, 1.1], margin=0.1, family_size=1)
    assert found.verdict == "worse"
    assert found.value == pytest.approx(1.0)
    assert found.ci_half_width == pytest.approx(2.919986 * 0.1 / math.sqrt(3))  # t(0.95, 2 df)
    assert found.margin == pytest.approx(0.1)


def test_the_interval_is_the_one_that_the_verdict_rests_on() -> None:
    few, many = (non_inferiority_test([-0.1, 0.0, 0.1], margin=0.2, family_size=n) for n in (1, 6))
    assert (many.verdict, many.ci_half_width) == ("indistinguishable", few.ci_half_width)
    assert many.ci_half_width < many.margin


def test_false_alarms_are_as_rare_as_stated() -> None:
    """Six equal precisions judged together, without a tolerance to hide behind: a false "worse"
    among them in 5 % of the times, within three standard errors of 3000 draws."""
    draw, alarms = random.Random(1), 0
    for _ in range(3000):
        verdicts = Counter(
            non_inferiority_test([draw.gauss(0, 1) for _ in range(5)], 0.0, 6).verdict
            for _ in range(6)
        )
        alarms += verdicts["worse"] > 0
    assert alarms / 3000 == pytest.approx(ERROR_RATE, abs=3 * math.sqrt(0.05 * 0.95 / 3000))


def test_every_verdict_has_words_of_its_own() -> None:
    assert set(VERDICT_WORDS) == set(Verdict)
    assert len(set(VERDICT_WORDS.values())) == len(Verdict)
