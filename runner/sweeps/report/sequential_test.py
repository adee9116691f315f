"""Decide on a difference from as few seeds as possible: a sequential t test against a bar.

After each seed from MIN_SEEDS on, a confidence interval of the mean paired difference is looked at:
below the bar it is accepted, above the bar it is rejected, else another seed is trained. Looking
several times raises the chance of an error, so that each look uses a smaller error rate, the same
one for all looks (Pocock, Biometrika 64, 1977, here for Student's t).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Literal

from runner.sweeps.report.statistics import ERROR_RATE, MIN_SEEDS, paired_half_width

Decision = Literal["accepted", "rejected", "undecided"]
SIMULATED_SEQUENCES = 100_000
"""Sequences of seeds from which look_error_rate() is found; ERROR_RATE then holds within 0.001."""


@dataclass(frozen=True)
class Look:
    """The decision after some seeds.

    Attributes:
        seeds: how many there were.
        gap: mean difference.
        half_width: half the confidence interval of the gap.
        decision: by the interval and the bar.
    """

    seeds: int
    gap: float
    half_width: float
    decision: Decision


def look_until_decided(gaps: Sequence[float], bar: float, max_seeds: int) -> list[Look]:
    """Return the looks at a precision until one of them decides; empty below MIN_SEEDS seeds.

    The chance that a precision whose true gap is the bar or more is accepted is ERROR_RATE over
    all looks, and so is the chance that one whose true gap is the bar or less is rejected, where
    differences are normal and the bar is not estimated from the same seeds.

    Args:
        gaps: loss minus the baseline's, in the order in which the seeds were trained; finite.
        bar: largest accepted gap.
        max_seeds: seeds after which there is no further look.
    """
    error_rate = look_error_rate(max_seeds)
    looks: list[Look] = []
    for count in range(MIN_SEEDS, min(len(gaps), max_seeds) + 1):
        gap = fmean(gaps[:count])
        half_width = paired_half_width(gaps[:count], error_rate)
        decision: Decision = "undecided"
        if gap + half_width <= bar:
            decision = "accepted"
        elif gap - half_width > bar:
            decision = "rejected"
        looks.append(Look(count, gap, half_width, decision))
        if decision != "undecided":
            break
    return looks


@cache
def look_error_rate(max_seeds: int) -> float:
    """Return the one-sided error rate of each look for ERROR_RATE over all looks.

    It depends on nothing but the number of looks: if the true gap is the bar, Student's t of the
    differences has the same distribution whatever their deviation is. Found by simulation with a
    fixed seed.

    Args:
        max_seeds: seeds at the last look; MIN_SEEDS or more.
    """
    import numpy as np
    from scipy.stats import t

    draws = np.random.default_rng(0).standard_normal((SIMULATED_SEQUENCES, max_seeds))
    counts = np.arange(1, max_seeds + 1)
    means = draws.cumsum(1) / counts
    squares = (draws**2).cumsum(1) - counts * means**2
    least = np.ones(SIMULATED_SEQUENCES)
    for count in range(MIN_SEEDS, max_seeds + 1):
        deviation = np.sqrt(squares[:, count - 1] / (count - 1))
        statistic = means[:, count - 1] / (deviation / np.sqrt(count))
        least = np.minimum(least, t.cdf(statistic, count - 1))
    # The least p value over the looks is below this one in ERROR_RATE of the sequences.
    return float(np.quantile(least, ERROR_RATE))
