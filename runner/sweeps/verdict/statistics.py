"""Means, spreads, ratios and tested differences of a sweep's numbers over seeds.

Two tests compare a precision with a baseline and share one vocabulary of verdicts. An ordinary
sweep describes: `quality_difference` finds whether a two-sided 95 % interval contains 0.
mode=advise has to decide: `non_inferiority_test` finds by one-sided tests whether a precision
trains worse, or at most worse by a margin.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median, stdev
from typing import Literal

ERROR_RATE = 0.05
"""Error rate of every test. In mode=advise it is the chance that, of all precisions tested
together, any that is as good as the baseline is called worse; the same chance that any is called
better; and, for each, the chance that one just beyond an exactly known tolerance is called
indistinguishable (bench/false_alarms.py measures the tolerance with five seeds)."""
MIN_SEEDS = 3
"""Fewer seeds get no verdict in mode=advise."""
RELATIVE_ROUNDING_ERROR = 1e-9
"""Half-widths below this share of the largest value are rounding errors, not a spread."""
SeedValues = Sequence[tuple[int | None, float | None]]
"""(seed, value) of each job; None for an unknown seed or value."""


class Verdict(StrEnum):
    """What a comparison with 32-true says of a precision.

    The members from RECOMMENDED on are of mode=advise alone: they say what it recommends, and why
    it did not test a precision.
    """

    BETTER = "better"
    WORSE = "worse"
    # The interval of the difference contains 0, which is no proof of equality.
    SAME = "same"
    # Worse by no more than the tolerance, as the test of mode=advise has found.
    INDISTINGUISHABLE = "indistinguishable"
    # The test of mode=advise found none of these: more seeds or steps would settle it.
    UNCLEAR = "unclear"
    # Without a spread over seeds nothing is tested.
    UNJUDGED = "unjudged"
    RECOMMENDED = "recommended"
    BASELINE = "baseline"
    DIVERGED = "diverged"
    SLOW = "slow"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"


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
class Ratio:
    """Median, count and range of a ratio over seeds.

    The median, so that one job that another program slowed down does not change the value.
    """

    value: float
    n: int
    low: float
    high: float

    @classmethod
    def of_values(cls, values: Iterable[float]) -> "Ratio | None":
        """Return the ratio over seeds, None without any value."""
        ratios = list(values)
        if not ratios:
            return None
        return cls(median(ratios), len(ratios), min(ratios), max(ratios))


@dataclass(frozen=True)
class Difference:
    """Mean of a precision minus the baseline's mean, with the verdict of a test.

    Attributes:
        ci_half_width: half-width of its confidence interval; infinite with too few seeds.
        test: "paired t" over the seeds that both have (Student 1908), or "Welch" (1947) over all.
        n: seeds of the precision; of a paired test, the pairs.
        margin: tolerated difference.
    """

    verdict: Verdict
    value: float
    n: int
    ci_half_width: float = math.inf
    test: str = ""
    margin: float = 0.0


def quality_difference(
    group: SeedValues, baseline: SeedValues, direction: Literal["max", "min"]
) -> Difference:
    """Return the difference of two groups' mean qualities, by a two-sided 95 % interval.

    Where both have the same seeds, or MIN_SEEDS in common, these alone are compared, in pairs.

    Args:
        group: (seed, quality) of the group; finite, not empty.
        baseline: (seed, quality) of the baseline; finite, not empty.
        direction: whether a larger ("max") or a smaller ("min") quality is better.
    """
    values = _known_values(group)
    others = _known_values(baseline)
    pairs = pair_by_seed(group, baseline) or []
    # Two pairs among more seeds have an interval that is wider than without pairs.
    is_paired = len(pairs) >= MIN_SEEDS or len(pairs) == len(values) == len(others)
    if is_paired:
        # A seed that only one of them has says more of the seed than of the precision.
        values = [value for value, _ in pairs]
        others = [value for _, value in pairs]
    n = len(values)
    difference = fmean(values) - fmean(others)
    if n < 2 or len(others) < 2:
        return Difference(Verdict.UNJUDGED, difference, n)

    if is_paired:
        test = "paired t"
        half_width = paired_half_width([a - b for a, b in pairs], ERROR_RATE / 2)
    else:
        test = "Welch"
        half_width = _welch_half_width(values, others, ERROR_RATE / 2)
    largest_value = max(map(abs, [*values, *others]))
    smallest_spread = RELATIVE_ROUNDING_ERROR * largest_value
    if half_width <= smallest_spread:
        # The same difference in every seed: a constant has no spread to be judged by.
        is_zero = abs(difference) <= smallest_spread
        return Difference(Verdict.SAME if is_zero else Verdict.UNJUDGED, difference, n, 0.0, test)
    verdict = Verdict.SAME
    if abs(difference) > half_width:
        verdict = _direction_verdict(difference, direction)
    return Difference(verdict, difference, n, half_width, test)


def baseline_spread(losses: Sequence[float]) -> float:
    """Return the sample standard deviation of the baseline's losses over seeds, NaN below two."""
    return stdev(losses) if len(losses) > 1 else math.nan


def non_inferiority_test(
    differences: Sequence[float], margin: float, family_size: int
) -> Difference:
    """Test whether a precision trains worse than the baseline, or was only luckier or unluckier.

    Every precision and the baseline train from the same weights on the same batches for each seed,
    so the test works on paired differences of the final loss.

    Worse: the mean difference is beyond the margin, and above 0 by the one-sided paired t test
    (Student 1908) at ERROR_RATE / family_size (Bonferroni). Better: the same with the sign changed.
    Indistinguishable: the test at ERROR_RATE finds the difference below the margin (a
    non-inferiority test). Unclear: none of these.

    Args:
        differences: loss minus the baseline's, one per seed; finite, not empty.
        margin: tolerated difference; NaN if it is unknown.
        family_size: how many precisions are tested together.
    """
    mean = fmean(differences)
    n = len(differences)
    if n < MIN_SEEDS or math.isnan(margin):
        return Difference(Verdict.UNCLEAR, mean, n, margin=margin)

    # The claim "worse" is corrected for the number of precisions: any false one misleads the
    # reader. "Indistinguishable" is a claim about one precision and is not corrected.
    corrected = paired_half_width(differences, ERROR_RATE / max(family_size, 1))
    uncorrected = paired_half_width(differences, ERROR_RATE)
    verdict = Verdict.UNCLEAR
    if abs(mean) > max(corrected, margin):
        verdict = _direction_verdict(mean, "min")
    elif mean + uncorrected <= margin:
        verdict = Verdict.INDISTINGUISHABLE
    # The interval that the verdict rests on.
    half_width = uncorrected if verdict is Verdict.INDISTINGUISHABLE else corrected
    return Difference(verdict, mean, n, half_width, "paired t", margin)


def pair_by_seed(group: SeedValues, baseline: SeedValues) -> list[tuple[float, float]] | None:
    """Return the two values of each seed for which both groups have one.

    Returns:
        None if the groups share no seed, or one of them has a seed twice, which has no partner.
    """
    first = dict(group)
    second = dict(baseline)
    if len(first) < len(group) or len(second) < len(baseline):
        return None
    shared = [seed for seed in first if seed is not None and seed in second]
    if not shared:
        return None
    pairs = [(first[seed], second[seed]) for seed in shared]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _known_values(group: SeedValues) -> list[float]:
    return [value for _, value in group if value is not None]


def _direction_verdict(difference: float, direction: Literal["max", "min"]) -> Verdict:
    is_better = (difference > 0) == (direction == "max")
    return Verdict.BETTER if is_better else Verdict.WORSE


def paired_half_width(differences: Sequence[float], one_sided_error: float) -> float:
    """Return the half-width of the interval of paired differences' mean (Student 1908)."""
    from scipy.stats import t

    count = len(differences)
    standard_error = stdev(differences) / math.sqrt(count)
    return float(t.ppf(1 - one_sided_error, count - 1)) * standard_error


def _welch_half_width(
    values: Sequence[float], others: Sequence[float], one_sided_error: float
) -> float:
    """Return the half-width with degrees of freedom after Welch and Satterthwaite."""
    from scipy.stats import t

    error_a = stdev(values) / math.sqrt(len(values))
    error_b = stdev(others) / math.sqrt(len(others))
    error = math.hypot(error_a, error_b)
    if error == 0:
        return 0.0
    # Shares instead of variances: the variances of diverged losses overflow.
    share_a = (error_a / error) ** 2
    share_b = (error_b / error) ** 2
    freedom = 1 / (share_a**2 / (len(values) - 1) + share_b**2 / (len(others) - 1))
    return float(t.ppf(1 - one_sided_error, freedom)) * error
