"""Means, spreads, ratios and tested differences of a sweep's numbers over seeds.

One test judges quality for an ordinary sweep, mode=advise and, in a sequential form, mode=gate:
`non_inferiority_test` finds whether a precision trains worse than the baseline, or at most worse
by a tolerance. An interval that contains 0 is no evidence of equality, and no verdict.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from statistics import fmean, median, stdev
from typing import Literal, TypeVar

ERROR_RATE = 0.05
"""Error rate of every test: the chance that, of all precisions tested together, any that is as good
as the baseline is called worse; the same chance that any is called better; and the chance that any
that is worse by the tolerance or more is called within tolerance (bench/sweep_errors.py)."""
MIN_SEEDS = 3
"""Fewer seeds get no verdict."""
MAX_SEEDS = 50
"""Largest number of seeds that an answer asks for."""
_Value = TypeVar("_Value")
BySeed = Sequence[tuple[int | None, _Value | None]]
"""(seed, value) of each job; None for an unknown seed or value."""
SeedValues = BySeed[float]


class Verdict(StrEnum):
    """What a comparison with the baseline says of a precision, the best first.

    RECOMMENDED, BASELINE and the members from DIVERGED on are of mode=advise alone: they say what
    it recommends, and why it did not test a precision.
    """

    RECOMMENDED = "recommended"
    BASELINE = "baseline"
    BETTER = "better"
    # Worse by no more than the tolerance.
    INDISTINGUISHABLE = "indistinguishable"
    # The test found none of these: more seeds or steps would settle it.
    UNCLEAR = "unclear"
    # Without a spread over seeds nothing is tested.
    UNJUDGED = "unjudged"
    # Most weights no longer moved: a loss as good says nothing of what follows.
    STALLED = "stalled"
    WORSE = "worse"
    DIVERGED = "diverged"
    SLOW = "slow"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"

    @property
    def rank(self) -> int:
        """Return the place in the order of the members, 0 the best."""
        return [*Verdict].index(self)


MAX_DECIMALS = 8
"""Smaller errors are written with an exponent."""
LARGEST_ERROR = 1e300
"""Keeps the logarithm of an infinite error finite."""


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (divisor n-1; None for one value), count and range."""

    mean: float
    sd: float | None
    n: int
    low: float
    high: float

    @classmethod
    def of_values(cls, values: Iterable[float | None]) -> "Spread | None":
        """Return the spread of the finite values, None without any."""
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if not finite:
            return None
        sd = stdev(finite) if len(finite) > 1 else None
        return cls(fmean(finite), sd, len(finite), min(finite), max(finite))


@dataclass(frozen=True)
class Tolerance:
    """What loss above the baseline's is accepted.

    Attributes:
        deviations: advise.tolerance, in standard deviations of the baseline's loss between seeds.
        max_gap: advise.max_gap, in the unit of the loss, which then counts alone; None for none.
    """

    deviations: float = 1.0
    max_gap: float | None = None

    def gap(self, spread: float) -> float:
        """Return the accepted difference by the baseline's measured standard deviation.

        NaN where the spread is 0 or NaN: seeds that do not differ measure no tolerance.
        """
        if self.max_gap is not None:
            return self.max_gap
        return self.deviations * spread if spread > 0 else math.nan

    def certain_gap(self, spread: float, seeds: int) -> float:
        """Return the lower confidence bound of the accepted difference, at ERROR_RATE.

        Few seeds measure a standard deviation badly: of three it is 0.58 times the measured one,
        of ten 0.73 times (the interval of a variance by chi-square, Fisher 1925).

        Args:
            spread: standard deviation of the baseline's loss between seeds.
            seeds: that it was measured by.
        """
        gap = self.gap(spread)
        if self.max_gap is not None or seeds < 2:
            return gap
        return gap * _surely_measured_share(seeds)


@dataclass(frozen=True)
class MeanDifference:
    """The difference of two means, with what its confidence interval follows from.

    Attributes:
        value: the group's mean minus the baseline's.
        n: pairs, or values of the smaller side.
        standard_error: of `value`; NaN below two.
        freedom: degrees of freedom.
        test: "paired t" over the seeds that both have (Student 1908), or "Welch" (1947) over all.
        resolution: smallest difference of a quality that counts examples, as an accuracy does; 0
            for a loss.
    """

    value: float
    n: int
    standard_error: float = math.nan
    freedom: float = 0.0
    test: str = ""
    resolution: float = 0.0

    @classmethod
    def of_pairs(cls, differences: Sequence[float], resolution: float = 0.0) -> "MeanDifference":
        """Return the mean of paired differences; finite, not empty."""
        n = len(differences)
        mean = fmean(differences)
        if n < 2:
            return cls(mean, n)
        error = stdev(differences) / math.sqrt(n)
        return cls(mean, n, error, n - 1, "paired t", resolution)

    @classmethod
    def of_groups(cls, group: SeedValues, baseline: SeedValues) -> "MeanDifference | None":
        """Return the difference of two groups' means, None if one of them has no value.

        Seeds that both have are compared in pairs, see pair_by_seed().
        """
        pairs = pair_by_seed(group, baseline)
        if pairs:
            return cls.of_pairs([a - b for a, b in pairs])
        values = _known_values(group)
        others = _known_values(baseline)
        n = min(len(values), len(others))
        if not n:
            return None
        error = _welch_error(values, others) if n > 1 else ()
        return cls(fmean(values) - fmean(others), n, *error, test="Welch" if n > 1 else "")

    def half_width(self, one_sided_error: float) -> float:
        """Return the half-width of the interval of the mean; infinite below two values.

        A quality that counts examples may be equal in all of n seeds by chance. At 5 % the mean
        difference is then at most 3 / n examples (rule of three, JAMA 249, 1983), which is the
        least half-width.
        """
        if self.n < 2:
            return math.inf
        least = -math.log(one_sided_error) * self.resolution / self.n
        return max(_quantile(one_sided_error, self.freedom) * self.standard_error, least)

    def p_value(self, bound: float) -> float:
        """Return the one-sided error for which the interval of half_width() ends at a bound.

        1.0 for a bound below the mean, or NaN.
        """
        from scipy.stats import t

        gap = bound - self.value
        if not gap >= 0:
            return 1.0
        least = math.exp(-gap * self.n / self.resolution) if self.resolution else 0.0
        if not self.standard_error > 0:
            return least
        return max(float(t.sf(gap / self.standard_error, self.freedom)), least)

    def with_seeds(self, seeds: int) -> "MeanDifference":
        """Return the difference for another number of seeds, with the same mean and spread."""
        error = self.standard_error * math.sqrt(self.n / seeds)
        return replace(self, n=seeds, standard_error=error, freedom=seeds - 1)


@dataclass(frozen=True)
class Ratio:
    """Median and count of a ratio over seeds, with the 95 % confidence interval of its mean.

    The median, so that one job that another program slowed down does not change the value; the
    interval, of the mean logarithm by the t test, then contains 1. One seed has no interval:
    `low` and `high` are the value.
    """

    value: float
    n: int
    low: float
    high: float

    @classmethod
    def of_groups(cls, group: SeedValues, baseline: SeedValues) -> "Ratio | None":
        """Return the ratio of two groups' values, by seed where they match, else of the medians.

        Returns:
            None if one of the groups has no value.
        """
        mean = MeanDifference.of_groups(_logarithms(group), _logarithms(baseline))
        if not mean:
            return None
        pairs = pair_by_seed(group, baseline)
        value = median(_known_values(group)) / median(_known_values(baseline))
        if pairs:
            value = median(a / b for a, b in pairs)
        if mean.n < 2:
            return cls(value, mean.n, value, value)
        half_width = mean.half_width(ERROR_RATE / 2)
        ends = (math.exp(mean.value - half_width), math.exp(mean.value + half_width))
        return cls(value, mean.n, *ends)


@dataclass(frozen=True)
class Difference:
    """Mean of a precision minus the baseline's mean, with the verdict of a test.

    Attributes:
        n: see MeanDifference, as `test`.
        ci_half_width: half-width of the confidence interval that the verdict rests on; infinite
            with one seed.
        margin: largest difference that is surely tolerated, see Tolerance.certain_gap.
        seeds_needed: how many seeds would show it within tolerance, if the mean and the spreads
            stay as they are, at least MIN_SEEDS; None for more than MAX_SEEDS, or where nothing is
            missing.
        resolution: see MeanDifference.
    """

    verdict: Verdict
    value: float
    n: int
    ci_half_width: float = math.inf
    test: str = ""
    margin: float = math.nan
    seeds_needed: int | None = None
    resolution: float = 0.0


def quality_tests(
    groups: Sequence[SeedValues],
    baseline: SeedValues,
    direction: Literal["max", "min"],
    tolerance: Tolerance,
    family_size: int = 1,
    resolution: float = 0.0,
) -> list[Difference]:
    """Test the quality of groups against their baseline's by non_inferiority_tests().

    Args:
        groups: (seed, quality) of each group; finite, none empty.
        baseline: (seed, quality) of the baseline; finite, not empty.
        direction: whether a larger ("max") or a smaller ("min") quality is better.
        tolerance: accepted difference.
        family_size: how many precisions are tested together.
        resolution: of the quality, see MeanDifference.
    """
    sign = 1 if direction == "min" else -1
    losses = []
    for group in groups:
        mean = MeanDifference.of_groups(group, baseline)
        assert mean
        losses.append(replace(mean, value=sign * mean.value, resolution=resolution))
    tests = non_inferiority_tests(losses, _known_values(baseline), tolerance, family_size)
    return [replace(test, value=sign * test.value) for test in tests]


def non_inferiority_tests(
    differences: Sequence[MeanDifference],
    baseline: Sequence[float],
    tolerance: Tolerance,
    family_size: int,
) -> list[Difference]:
    """Test several precisions against their baseline by non_inferiority_test().

    The claim "within tolerance" is corrected by Hochberg's step-up test (Biometrika 75, 1988). The
    p values are sorted, the largest first. The first one that is at most ERROR_RATE / k at place k
    passes, and all smaller ones with it. So precisions that are all as good as the baseline need no
    more seeds together than one of them alone.

    Args:
        differences: of the losses, one for each precision.
        baseline: see non_inferiority_test, as the rest.
        tolerance: accepted difference.
        family_size: how many precisions are tested together.
    """
    tests = [
        non_inferiority_test(difference, baseline, tolerance, family_size)
        for difference in differences
    ]
    p_values: list[tuple[float, int]] = []
    for index, test in enumerate(tests):
        # A precision whose whole interval is beyond the tolerance cannot pass by chance.
        may_pass = not test.value - test.ci_half_width > test.margin
        if test.n >= MIN_SEEDS and may_pass:
            p_values.append((differences[index].p_value(test.margin), index))
    has_passed = False
    error_rate = ERROR_RATE
    # Equal ones stay in the order of the precisions.
    for rank, (p, index) in enumerate(sorted(p_values, key=lambda pair: -pair[0]), 1):
        if not has_passed:
            error_rate = ERROR_RATE / rank
            has_passed = p <= error_rate
        tests[index] = non_inferiority_test(
            differences[index], baseline, tolerance, family_size, error_rate
        )
    return tests


def non_inferiority_test(
    difference: MeanDifference,
    baseline: Sequence[float],
    tolerance: Tolerance,
    family_size: int,
    error_rate: float = ERROR_RATE,
) -> Difference:
    """Test whether a precision trains worse than the baseline, or was only luckier or unluckier.

    Every precision and the baseline train from the same weights on the same batches for each seed,
    so the test works on paired differences of the final loss where it can.

    Worse: the mean difference is beyond the tolerance, and above 0 by the one-sided t test at
    ERROR_RATE / family_size (Bonferroni). Better: the same with the sign changed.
    Indistinguishable: the test at `error_rate` finds the difference below what is surely tolerated
    (a non-inferiority test). Unclear: none of these.

    Args:
        difference: of the losses.
        baseline: the baseline's losses, whose spread is the unit of the tolerance.
        tolerance: accepted difference.
        family_size: how many precisions are tested together.
        error_rate: of the claim that it is within tolerance, see non_inferiority_tests().
    """
    mean = difference.value
    n = difference.n
    spread = baseline_spread(baseline)
    margin = tolerance.gap(spread)
    certain = tolerance.certain_gap(spread, len(baseline))
    if n < 2:
        return Difference(Verdict.UNJUDGED, mean, n, margin=certain, seeds_needed=MIN_SEEDS)

    # The resolution may be overestimated, and could then hide a precision that is worse.
    continuous = replace(difference, resolution=0.0)
    corrected = continuous.half_width(ERROR_RATE / max(family_size, 1))
    half_width = difference.half_width(error_rate)
    verdict = Verdict.UNCLEAR
    needed = None
    if n >= MIN_SEEDS and abs(mean) > max(corrected, margin):
        verdict = Verdict.WORSE if mean > 0 else Verdict.BETTER
        half_width = corrected
    elif n >= MIN_SEEDS and mean + half_width <= certain:
        verdict = Verdict.INDISTINGUISHABLE
    else:
        needed = _seeds_needed(difference, spread, tolerance, error_rate)
    test, resolution = difference.test, difference.resolution
    return Difference(verdict, mean, n, half_width, test, certain, needed, resolution)


def _seeds_needed(
    difference: MeanDifference, spread: float, tolerance: Tolerance, error_rate: float
) -> int | None:
    """Return the seeds with which non_inferiority_test() finds a difference within the tolerance.

    The mean and the spreads are taken to stay as they are. None for more than MAX_SEEDS; for a
    difference of fewer than MIN_SEEDS seeds, whose spread says little, at least MIN_SEEDS.
    """
    for count in range(max(difference.n + 1, MIN_SEEDS), MAX_SEEDS + 1):
        half_width = difference.with_seeds(count).half_width(error_rate)
        if difference.value + half_width <= tolerance.certain_gap(spread, count):
            return count
    return MIN_SEEDS if difference.n < MIN_SEEDS else None


def baseline_spread(losses: Sequence[float]) -> float:
    """Return the sample standard deviation of the baseline's losses over seeds, NaN below two."""
    return stdev(losses) if len(losses) > 1 else math.nan


def pair_by_seed(group: BySeed[_Value], baseline: BySeed[_Value]) -> list[tuple[_Value, _Value]]:
    """Return the two values of each seed for which both groups have one.

    These seeds are then compared alone: any other seed says more of the seed than of the precision.

    Returns:
        Nothing if a group has a seed twice, which has no partner, or if both groups have more seeds
        than they share and these are fewer than MIN_SEEDS: all values then say more.
    """
    first = dict(group)
    second = dict(baseline)
    if len(first) < len(group) or len(second) < len(baseline):
        return []
    known = ((first[seed], second.get(seed)) for seed in first if seed is not None)
    pairs = [(a, b) for a, b in known if a is not None and b is not None]
    fewest = min(len(_known_values(group)), len(_known_values(baseline)))
    return pairs if len(pairs) >= min(MIN_SEEDS, fewest) else []


def _known_values(group: BySeed[_Value]) -> list[_Value]:
    return [value for _, value in group if value is not None]


def _logarithms(group: SeedValues) -> SeedValues:
    return [(seed, None if value is None else math.log(value)) for seed, value in group]


@cache
def _surely_measured_share(seeds: int) -> float:
    """Return the lower confidence bound of a standard deviation over the measured one."""
    from scipy.stats import chi2

    return math.sqrt((seeds - 1) / float(chi2.ppf(1 - ERROR_RATE, seeds - 1)))


@cache
def _quantile(one_sided_error: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution that a one-sided error leaves above."""
    from scipy.stats import t

    return float(t.ppf(1 - one_sided_error, freedom))


def _welch_error(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return standard error and degrees of freedom after Welch and Satterthwaite."""
    error_a = stdev(values) / math.sqrt(len(values))
    error_b = stdev(others) / math.sqrt(len(others))
    error = math.hypot(error_a, error_b)
    if error == 0:
        return 0.0, 1.0
    # Shares instead of variances: the variances of diverged losses overflow.
    share_a = (error_a / error) ** 2
    share_b = (error_b / error) ** 2
    return error, 1 / (share_a**2 / (len(values) - 1) + share_b**2 / (len(others) - 1))


def format_interval(value: float, error: float, sign: str = "") -> str:
    """Return value ± error, both with the decimals that show two digits of the error.

    Args:
        value: the middle of the interval.
        error: half of its width.
        sign: "+" writes the sign of a positive value, too.
    """
    places = 4
    if error > 0:
        places = 1 - math.floor(math.log10(min(error, LARGEST_ERROR)))
    if not -3 < places <= MAX_DECIMALS:
        return f"{value:{sign}.3g} ± {error:.2g}"
    places = max(0, places)
    # A sum with 0.0, for -0.0 has a sign.
    return f"{round(value, places) + 0.0:{sign}.{places}f} ± {error:.{places}f}"
