"""Means, spreads and confidence intervals of a sweep's numbers over seeds.

`quality_difference` judges ordinary sweeps by a two-sided interval; mode=advise uses the one-sided
test of non_inferiority.py, because it has to decide instead of to describe.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Literal

DifferenceVerdict = Literal["same", "better", "worse", "unjudged"]
SeedValues = Sequence[tuple[int | None, float]]
"""(seed, value) of each job."""
RELATIVE_ROUNDING_ERROR = 1e-9
"""Half-widths below this share of the largest value are rounding errors, not a spread."""


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
    """Mean quality minus the baseline's mean quality.

    Attributes:
        ci_half_width: half-width of the 95 % confidence interval; None with one seed.
        test: "paired t" if the seeds of both match (Student 1908), else "Welch" (1947).
        verdict: "same" if the interval contains 0; "unjudged" without a spread.
    """

    value: float
    ci_half_width: float | None
    test: str
    verdict: DifferenceVerdict


def quality_difference(
    group: SeedValues, baseline: SeedValues, direction: Literal["max", "min"]
) -> Difference:
    """Return the difference of two groups' mean qualities, with its interval and verdict.

    Args:
        group: (seed, quality) of the group; finite, not empty.
        baseline: (seed, quality) of the baseline; finite, not empty.
        direction: whether a larger ("max") or a smaller ("min") quality is better.
    """
    values = [quality for _, quality in group]
    others = [quality for _, quality in baseline]
    difference = fmean(values) - fmean(others)
    if len(values) < 2 or len(others) < 2:
        return Difference(difference, None, "", "unjudged")

    pairs = pair_by_seed(group, baseline)
    if pairs:
        test = "paired t"
        half_width = _paired_half_width([a - b for a, b in pairs])
    else:
        test = "Welch"
        half_width = _welch_half_width(values, others)
    largest_value = max(map(abs, [*values, *others]))
    smallest_spread = RELATIVE_ROUNDING_ERROR * largest_value
    verdict: DifferenceVerdict
    if half_width <= smallest_spread:
        # The same difference in every seed: a constant has no spread to be judged by.
        half_width = 0.0
        verdict = "same" if abs(difference) <= smallest_spread else "unjudged"
    elif abs(difference) <= half_width:
        verdict = "same"
    else:
        verdict = "better" if (difference > 0) == (direction == "max") else "worse"
    return Difference(difference, half_width, test, verdict)


def pair_by_seed(group: SeedValues, baseline: SeedValues) -> list[tuple[float, float]]:
    """Return the two values of each seed; empty unless each seed occurs once in both groups."""
    first = dict(group)
    second = dict(baseline)
    if None in first or first.keys() != second.keys():
        return []
    # A seed that occurs twice has no single partner.
    if len(first) < len(group) or len(second) < len(baseline):
        return []
    return [(value, second[seed]) for seed, value in first.items()]


def _paired_half_width(differences: Sequence[float]) -> float:
    """Return the half-width of the 95 % interval of paired differences."""
    from scipy.stats import t

    count = len(differences)
    return float(t.ppf(0.975, count - 1)) * stdev(differences) / math.sqrt(count)


def _welch_half_width(values: Sequence[float], others: Sequence[float]) -> float:
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
    return float(t.ppf(0.975, freedom)) * error
