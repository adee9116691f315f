"""Test whether a precision trains worse than float32, or was only luckier or unluckier.

Every precision and float32 train from the same weights on the same batches for each seed, so the
test works on paired differences of the final loss. How large a difference matters is measured in
the spread between float32's own seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

ERROR_RATE = 0.05
"""Chance that, of all precisions tested together, any that is as good as float32 is called worse;
the same chance that any is called better; and, for each, the chance that one just beyond an exactly
known tolerance is called indistinguishable (bench/false_alarms.py measures the tolerance with five
seeds)."""
MIN_SEEDS = 3
"""Fewer seeds get no verdict."""
TestDecision = Literal["indistinguishable", "worse", "better", "unclear"]


@dataclass(frozen=True)
class PairedTest:
    """A precision's final loss compared with 32-true's, from the same weights and batches.

    Attributes:
        mean_difference: mean difference in loss, above 0 if the precision's loss is higher.
        ci_half_width: half-width of its confidence interval, at an error of ERROR_RATE over all
            precisions tested together; infinite below MIN_SEEDS seeds.
        margin: tolerated difference.
        n: paired seeds.
    """

    decision: TestDecision
    mean_difference: float
    ci_half_width: float
    margin: float
    n: int


def baseline_spread(losses: Sequence[float]) -> float:
    """Return the sample standard deviation of float32's losses over seeds, NaN below two."""
    return stdev(losses) if len(losses) > 1 else math.nan


def non_inferiority_test(
    differences: Sequence[float], spread: float, tolerance: float, family_size: int
) -> PairedTest:
    """Test one precision's losses against float32's.

    Worse: the mean difference is beyond the tolerance, and above 0 by the one-sided paired t test
    (Student 1908) at ERROR_RATE / family_size (Bonferroni). Better: the same with the sign changed.
    Indistinguishable: the test at ERROR_RATE finds the difference below the tolerance (a
    non-inferiority test). Unclear: none of these; more seeds or steps would settle it.

    Args:
        differences: loss minus 32-true's, one per seed; finite, not empty.
        spread: baseline_spread() of 32-true's losses.
        tolerance: tolerated difference, in spreads.
        family_size: how many precisions are tested together.
    """
    from scipy.stats import t

    mean = fmean(differences)
    n = len(differences)
    margin = tolerance * spread
    if n < MIN_SEEDS or math.isnan(spread):
        return PairedTest("unclear", mean, math.inf, margin, n)

    standard_error = stdev(differences) / math.sqrt(n)
    # The claim "worse" is corrected for the number of precisions: any false one misleads the
    # reader. "Indistinguishable" is a claim about one precision and is not corrected.
    corrected = float(t.ppf(1 - ERROR_RATE / max(family_size, 1), n - 1)) * standard_error
    uncorrected = float(t.ppf(1 - ERROR_RATE, n - 1)) * standard_error
    decision: TestDecision = "unclear"
    if abs(mean) > max(corrected, margin):
        decision = "worse" if mean > 0 else "better"
    elif mean + uncorrected <= margin:
        decision = "indistinguishable"
    return PairedTest(decision, mean, corrected, margin, n)
