"""Is a precision worse than float32, or only luckier or unluckier? Judged by paired seeds against
the spread between float32's own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

ERROR = 0.05
"""Chance that of all precisions judged together any that is as good as float32 is called worse; as
much that any is called better; and, of each, that one just beyond a tolerance that is known exactly
is called indistinguishable (bench/false_alarms.py: with the tolerance measured by five seeds)."""
LEAST = 3
"""Seeds below which no verdict is given."""
Verdict = Literal["indistinguishable", "worse", "better", "unclear"]


@dataclass(frozen=True)
class PairedTest:
    """A precision's final loss against 32-true's from the same weights on the same batches.

    Attributes:
        gap: mean difference in loss, above 0 where the precision's is higher.
        half: half-width of its interval, of the error that is ERROR over all that are judged;
            infinite below LEAST seeds.
        margin: difference that is tolerated.
        n: paired seeds.
    """

    verdict: Verdict
    gap: float
    half: float
    margin: float
    n: int


def baseline_spread(losses: Sequence[float]) -> float:
    """Sample standard deviation of float32's losses between seeds; NaN of fewer than two."""
    return stdev(losses) if len(losses) > 1 else math.nan


def test_non_inferiority(
    gaps: Sequence[float], spread: float, tolerance: float, judged: int
) -> PairedTest:
    """The verdict on one precision.

    Worse: the mean gap is beyond the tolerance, and above 0 by the one-sided paired t test
    (Student 1908) at ERROR / judged (Bonferroni). Indistinguishable: the test at ERROR finds the
    gap below the tolerance (a non-inferiority test). Better as worse, with the sign changed.
    Neither: unclear, which more seeds or steps would settle.

    Args:
        gaps: loss minus 32-true's, one per seed; finite, not empty.
        spread: yardstick() of 32-true's losses.
        tolerance: in spreads.
        judged: how many precisions are judged together.
    """
    from scipy.stats import t

    gap, n, margin = fmean(gaps), len(gaps), tolerance * spread
    if n < LEAST or math.isnan(spread):
        return PairedTest("unclear", gap, math.inf, margin, n)
    error = stdev(gaps) / math.sqrt(n)
    half, near = (float(t.ppf(1 - p, n - 1)) * error for p in (ERROR / max(judged, 1), ERROR))
    verdict: Verdict = "unclear"
    if abs(gap) > max(half, margin):
        verdict = "worse" if gap > 0 else "better"
    elif gap + near <= margin:
        verdict = "indistinguishable"
    return PairedTest(verdict, gap, half, margin, n)
