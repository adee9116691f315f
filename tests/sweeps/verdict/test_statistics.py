"""runner.sweeps.verdict.statistics: intervals as scipy's, verdicts with the stated error rate."""

import math
import random
from collections import Counter
from statistics import stdev

import pytest
from scipy import stats

from runner.sweeps.report.wording import VERDICT_LOOKS, difference_words
from runner.sweeps.verdict.statistics import (
    ERROR_RATE,
    MeanDifference,
    Tolerance,
    Verdict,
    non_inferiority_test,
    non_inferiority_tests,
    quality_tests,
)

MINE = [0.90, 0.93, 0.95]


def judged(mine, base, direction="max", **tolerance):
    """Return the test of seeds that are numbered from 0."""
    accepted = Tolerance(**tolerance)
    return judge(list(enumerate(mine)), list(enumerate(base)), direction, accepted)


def judge(mine, base, direction, accepted):
    """Return the test of one group."""
    return quality_tests([mine], base, direction, accepted)[0]


def loss_test(differences, margin, family_size):
    """Return the test of paired differences with a tolerance in the unit of the loss."""
    mean = MeanDifference.of_pairs(differences)
    return non_inferiority_test(mean, [1.0, 2.0], Tolerance(max_gap=margin), family_size)


@pytest.mark.parametrize("base", [[0.88, 0.92, 0.90], [0.5, 0.52]])
def test_the_interval_equals_scipys(base: list[float]) -> None:
    seeds = [0, 1, 2] if len(base) == 3 else [7, 8]
    got = MeanDifference.of_groups(list(enumerate(MINE)), list(zip(seeds, base, strict=True)))
    assert got is not None
    paired = len(base) == 3
    found = stats.ttest_rel(MINE, base) if paired else stats.ttest_ind(MINE, base, equal_var=False)
    interval = found.confidence_interval(0.95)
    half_width = got.half_width(0.025)
    ends = (got.value - half_width, got.value + half_width)
    assert ends == pytest.approx((interval.low, interval.high))
    assert got.test == ("paired t" if paired else "Welch")


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e80, 1e200])
def test_an_interval_scales_with_its_values(size: float) -> None:
    def difference(unit: float):
        mine = [(0, 1 * unit), (1, 2 * unit)]
        base = [(5, 4 * unit), (6, 6 * unit), (7, 7 * unit)]
        return judge(mine, base, "min", Tolerance())

    got = difference(size)
    plain = difference(1.0)
    assert got.verdict == plain.verdict
    assert got.ci_half_width / size == pytest.approx(plain.ci_half_width)
    assert "worse by" not in difference_words(got)[0]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("lacks", ["group", "baseline"])
def test_a_seed_that_one_side_lacks_leaves_the_others_in_pairs(lacks: str, count: int) -> None:
    """A sweep that failed in part: the seed's own luck is in no number."""
    base = [(0, 0.90), (1, 0.95), (2, 0.80), (3, 0.99)]
    mine = [(seed, value - 0.001 * (seed + 1)) for seed, value in base]
    sides = (mine[:count], base) if lacks == "group" else (mine, base[:count])
    got = judge(*sides, "max", Tolerance())
    assert (got.n, got.value) == (count, pytest.approx(-0.001 * (count + 1) / 2))


@pytest.mark.parametrize("keys", [[None] * 3, [1, 1, 2], [3, 4, 5], [2, 3, 4]])
def test_seeds_that_do_not_match_are_not_paired(keys: list[int | None]) -> None:
    mine = list(zip(keys, [0.9, 0.8, 0.85], strict=True))
    assert judge(mine, [(0, 0.9), (1, 0.7), (2, 0.8)], "max", Tolerance()).test == "Welch"


@pytest.mark.parametrize(("direction", "expected"), [("max", "worse"), ("min", "better")])
def test_the_direction_decides_what_is_better(direction, expected: str) -> None:
    got = judged([0.50, 0.51, 0.52], [0.90, 0.912, 0.921], direction)
    assert got.verdict == expected
    assert difference_words(got)[0].startswith(f"{expected} by 0.40")


@pytest.mark.parametrize(
    ("mine", "base", "words"),
    [
        ([0.90, 0.91, 0.92], [0.90, 0.91, 0.92], ("within tolerance", "identical in every seed")),
        # Seeds that do not differ measure no tolerance, two seeds no spread.
        ([1.0] * 3, [1.0] * 3, ("not enough evidence", "identical in every seed")),
        ([0.9, 0.8], [0.9, 0.8], ("not enough evidence", "identical in every seed")),
        ([0.99], [0.9, 0.8], ("not judged (one seed)", "+0.09")),
        # Two seeds that lose 10 and 6 points: the interval contains 0, which is no evidence.
        ([0.85, 0.88], [0.95, 0.94], ("not enough evidence", "-0.08 ± 0.13")),
        ([0.85, 0.87, 0.91], [0.95, 0.93, 0.93], ("not enough evidence", "-0.060 ± 0.067")),
    ],
)
def test_what_is_no_evidence_is_called_so(
    mine: list[float], base: list[float], words: tuple[str, str]
) -> None:
    assert difference_words(judged(mine, base)) == words


@pytest.mark.parametrize(
    ("differences", "margin", "verdict"),
    [
        ([0.05, 0.051, 0.049], 0.1, "indistinguishable"),
        ([0.05, 0.051, 0.049], 0.01, "worse"),
        ([-0.9, -1.0, -1.1], 0.1, "better"),
        ([1.0, -0.9, 0.8], 0.1, "unclear"),
        # Equal losses in every seed need no tolerance.
        ([0.0] * 3, 0.0, "indistinguishable"),
        # Two seeds get no verdict.
        ([5.0], 0.1, "unjudged"),
        ([5.0, 5.1], 0.1, "unclear"),
    ],
)
def test_the_test_of_non_inferiority_decides(
    differences: list[float], margin: float, verdict: str
) -> None:
    found = loss_test(differences, margin, family_size=1)
    assert (found.verdict, found.n) == (verdict, len(differences))
    assert math.isinf(found.ci_half_width) == (len(differences) < 2)


def test_a_clear_increase_in_loss_is_worse_with_students_interval() -> None:
    found = loss_test([0.9, 1.0, 1.1], 0.1, family_size=1)
    assert found.verdict == "worse"
    assert found.value == pytest.approx(1.0)
    assert found.ci_half_width == pytest.approx(2.919986 * 0.1 / math.sqrt(3))  # t(0.95, 2 df)
    assert found.margin == pytest.approx(0.1)


def test_a_tolerance_in_deviations_is_the_lower_bound_of_its_interval() -> None:
    values = [1.0, 1.2, 1.4, 1.1, 1.3]
    low = stats.chi2.ppf(0.95, 4)
    bound = stdev(values) * math.sqrt(4 / low)
    assert Tolerance(2.0).certain_gap(stdev(values), 5) == pytest.approx(2 * bound)
    assert Tolerance(2.0, max_gap=0.3).certain_gap(stdev(values), 5) == 0.3
    assert math.isnan(Tolerance().certain_gap(0.0, 5))
    assert math.isnan(Tolerance().certain_gap(math.nan, 1))


def test_as_many_seeds_are_asked_for_as_show_what_the_first_ones_suggest() -> None:
    def twice_as_spread(seeds: int):
        """The differences and the baseline have mean 0 and deviation 1."""
        plain = [i - (seeds - 1) / 2 for i in range(seeds)]
        base = [value / stdev(plain) for value in plain]
        return judged([2 * value for value in base], base)

    needed = twice_as_spread(3).seeds_needed
    assert needed is not None
    assert twice_as_spread(needed - 1).verdict == "unclear"
    assert twice_as_spread(needed).verdict == "indistinguishable"
    # A loss of nearly the tolerance: no number of seeds up to MAX_SEEDS shows that it is less.
    assert judged([-0.9, 0.1, 1.1], [0.0, 1.0, 2.0]).seeds_needed is None


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("effect", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_what_is_worse_than_the_tolerance_is_seldom_called_within_it(seeds, effect, spread):
    """Also where the tolerance is measured by as few seeds; bench/false_alarms.py has the rest."""
    draw = random.Random(seeds)
    wrong = 0
    for _ in range(400):
        base = [draw.gauss(0, 1) for _ in range(seeds)]
        mine = [effect + spread * draw.gauss(0, 1) for _ in base]
        wrong += judged(mine, base, "min").verdict in ("indistinguishable", "better")
    assert wrong / 400 <= ERROR_RATE + 0.02


@pytest.mark.parametrize(("pairing", "spread"), [(0.0, 2.0), (0.99, 1.0)])
def test_of_three_that_are_worse_by_the_tolerance_seldom_one_is_called_within_it(pairing, spread):
    draw = random.Random(0)
    wrong = 0
    for _ in range(400):
        base = [draw.gauss(0, 1) for _ in range(3)]
        groups = []
        for _ in range(3):
            own = [pairing * b + math.sqrt(1 - pairing**2) * draw.gauss(0, 1) for b in base]
            groups.append(list(enumerate(1 + spread * value for value in own)))
        tests = quality_tests(groups, list(enumerate(base)), "min", Tolerance(), 3)
        wrong += any(test.verdict == "indistinguishable" for test in tests)
    assert wrong / 400 <= ERROR_RATE + 0.02


@pytest.mark.parametrize(("count", "seeds"), [(2, 20), (6, 20)])
def test_of_several_at_a_tolerance_in_units_of_the_loss_few_are_called_within_it(count, seeds):
    """Half of them are called worse than the baseline; the claim for the rest stays as strict."""
    draw = random.Random(0)
    wrong = 0
    for _ in range(1000):
        means = []
        for _ in range(count):
            gaps = [draw.gauss(1, 1) for _ in range(seeds)]
            means.append(MeanDifference.of_pairs(gaps))
        tests = non_inferiority_tests(means, [1.0, 2.0], Tolerance(max_gap=1.0), count)
        wrong += any(test.verdict == "indistinguishable" for test in tests)
    assert wrong / 1000 <= ERROR_RATE + 0.015


def test_the_most_doubtful_of_several_that_passes_decides_for_the_better_ones() -> None:
    """The p values of the mean being below the tolerance are 0.04, 0.02 and 0.01, or 0.2 in place
    of the first: the second then needs 0.05 / 2."""

    def verdicts(*p_values):
        means = []
        for p_value in p_values:
            value = 1.0 - stats.t.isf(p_value, 4) * 0.1
            means.append(MeanDifference(value, 5, 0.1, 4, "paired t"))
        tests = non_inferiority_tests(means, [1.0, 2.0], Tolerance(max_gap=1.0), 1)
        return [test.verdict == "indistinguishable" for test in tests]

    assert verdicts(0.04, 0.02, 0.01) == [True] * 3
    assert verdicts(0.02, 0.2, 0.01) == [True, False, True]
    assert verdicts(0.04, 0.2, 0.01) == [False, False, True]
    assert verdicts(0.2, 0.04, 0.03) == [False] * 3


def test_of_equal_p_values_the_first_precision_has_the_first_place() -> None:
    """None passes, so that each interval is that of its place: the error rate divided by it."""
    mean = MeanDifference(0.9, 5, 0.1, 4, "paired t")
    tests = non_inferiority_tests([mean] * 3, [1.0, 2.0], Tolerance(max_gap=1.0), 1)
    half_widths = [test.ci_half_width for test in tests]
    assert half_widths == [mean.half_width(ERROR_RATE / place) for place in (1, 2, 3)]


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_what_happens_in_no_seed_may_happen_three_times_in_their_number(seeds):
    """What happens three times in `seeds` seeds on average happens in none of them in 5 %."""
    mean = MeanDifference(0.0, seeds, 0.0, seeds - 1, "paired t", resolution=0.01)
    half_width = mean.half_width(ERROR_RATE)
    assert half_width == pytest.approx(0.03 / seeds, rel=0.002)
    assert mean.p_value(half_width) == pytest.approx(ERROR_RATE)
    assert mean.with_seeds(2 * seeds).half_width(ERROR_RATE) == pytest.approx(half_width / 2)


def test_the_interval_is_the_one_that_the_verdict_rests_on() -> None:
    few, many = (loss_test([-0.1, 0.0, 0.1], 0.2, family_size=n) for n in (1, 6))
    assert (many.verdict, many.ci_half_width) == ("indistinguishable", few.ci_half_width)
    assert many.ci_half_width < many.margin


def test_false_alarms_are_as_rare_as_stated() -> None:
    """Six equal precisions judged together, without a tolerance to hide behind: a false "worse"
    among them in 5 % of the times, within three standard errors of 3000 draws."""
    draw, alarms = random.Random(1), 0
    for _ in range(3000):
        verdicts = Counter(
            loss_test([draw.gauss(0, 1) for _ in range(5)], 0.0, 6).verdict for _ in range(6)
        )
        alarms += verdicts["worse"] > 0
    assert alarms / 3000 == pytest.approx(ERROR_RATE, abs=3 * math.sqrt(0.05 * 0.95 / 3000))


def test_every_verdict_has_words_of_its_own() -> None:
    assert set(VERDICT_LOOKS) == set(Verdict)
    assert len({look.words for look in VERDICT_LOOKS.values()}) == len(Verdict)
