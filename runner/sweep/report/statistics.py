"""Means, spreads and the intervals by which a difference is judged."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Literal

Verdict = Literal["same", "better", "worse", "unjudged"]
Seeded = Sequence[tuple[int | None, float]]
"""Values by the seed of their jobs."""


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (divisor n-1; None for one value), count and range."""

    mean: float
    sd: float | None
    n: int
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Of those that are finite; None without any."""
        found = [v for v in values if v is not None and math.isfinite(v)]
        if not found:
            return None
        sd = stdev(found) if len(found) > 1 else None
        return cls(fmean(found), sd, len(found), min(found), max(found))


@dataclass(frozen=True)
class Ratio:
    """Median over the seeds, count and range: one job that the machine held up must not speak for
    the others."""

    value: float
    n: int
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Ratio | None":
        """None without any."""
        found = list(values)
        return cls(median(found), len(found), min(found), max(found)) if found else None


@dataclass(frozen=True)
class Difference:
    """Mean quality minus the baseline's.

    Attributes:
        half: half-width of its 95 % interval; None with one seed.
        test: "paired t" where the seeds of both match (Student 1908), else "Welch" (1947).
        verdict: "same" where the interval holds 0; "unjudged" without a spread.
    """

    value: float
    half: float | None
    test: str
    verdict: Verdict


def quality_difference(mine: Seeded, base: Seeded, direction: Literal["max", "min"]) -> Difference:
    """Of two groups' (seed, quality); both finite and not empty."""
    values, others = [q for _, q in mine], [q for _, q in base]
    gap = fmean(values) - fmean(others)
    if len(values) < 2 or len(others) < 2:
        return Difference(gap, None, "", "unjudged")
    pairs = pair_by_seed(mine, base)
    half = _paired_half([a - b for a, b in pairs]) if pairs else _welch_half(values, others)
    tiny = 1e-9 * max(map(abs, [*values, *others]))
    verdict: Verdict
    if half <= tiny:  # equal in every seed; a constant gap has no spread to be judged by
        half, verdict = 0.0, "same" if abs(gap) <= tiny else "unjudged"
    elif abs(gap) <= half:
        verdict = "same"
    else:
        verdict = "better" if (gap > 0) == (direction == "max") else "worse"
    return Difference(gap, half, "paired t" if pairs else "Welch", verdict)


def pair_by_seed(mine: Seeded, base: Seeded) -> list[tuple[float, float]]:
    """The values of equal seeds; empty unless each seed is once in both."""
    first, second = dict(mine), dict(base)
    if None in first or first.keys() != second.keys():
        return []
    if len(first) < len(mine) or len(second) < len(base):
        return []
    return [(value, second[seed]) for seed, value in first.items()]


def _paired_half(gaps: Sequence[float]) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, len(gaps) - 1)) * stdev(gaps) / math.sqrt(len(gaps))


def _welch_half(values: Sequence[float], others: Sequence[float]) -> float:
    """Degrees of freedom after Welch and Satterthwaite."""
    from scipy.stats import t

    a, b = stdev(values) / math.sqrt(len(values)), stdev(others) / math.sqrt(len(others))
    error = math.hypot(a, b)
    if error == 0:
        return 0.0
    a, b = (a / error) ** 2, (b / error) ** 2  # shares: the variances of diverged losses overflow
    freedom = 1 / (a**2 / (len(values) - 1) + b**2 / (len(others) - 1))
    return float(t.ppf(0.975, freedom)) * error
