"""Compare the times in which precisions reach an equal loss, from the curves of their jobs.

docs/sweeps.md defines the ratio, and says what it assumes; bench/equal_loss.py tests its interval.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from runner.core import metric_names
from runner.sweeps.verdict.compare import Comparison, Group, has_comparable_quality
from runner.sweeps.verdict.statistics import Ratio, Tolerance, Verdict, pair_by_seed, quality_tests
from runner.tracking.history import Curve, Points, curve_points

WINDOW_SHARE = 0.3
"""Share of the steps so far whose losses make the loss at a step. It grows with the steps, so that
a precision that needs twice the steps for everything is smoothed alike: a window of one length, and
an isotonic regression, were biased (bench/results/equal_loss.md)."""
MIN_POINTS = 8
"""Fewer losses make no curve."""
JobCurves = Mapping[int, Mapping[str, Curve]]
"""Curves of each job by the id() of its result, then by metric."""


def smoothed_curve(curve: Curve) -> Points:
    """Return the means of the last WINDOW_SHARE of the steps at each of them, with the means of
    these steps."""
    points = np.stack(curve_points(curve))
    # A store has the greatest float in place of infinity. A loss before the first step has no time.
    points = points[:, (np.abs(points[1]) < 1e300) & (points[0] > 0)]
    ends = np.arange(1, points.shape[1] + 1)
    starts = np.searchsorted(points[0], (1 - WINDOW_SHARE) * points[0])
    sums = np.pad(points.cumsum(1), ((0, 0), (1, 0)))
    steps, losses = (sums[:, ends] - sums[:, starts]) / (ends - starts)
    return steps, losses


def time_to_loss(curve: Points, loss: float) -> float:
    """Return when a curve first falls to a loss, between two points by interpolation.

    Nothing is extrapolated: a curve that begins below the loss reaches it at its first point.

    Args:
        curve: times and losses, that ends at the loss or below it.
        loss: to reach.
    """
    times, losses = curve
    after = int(np.argmax(losses <= loss))
    around = [after, max(after - 1, 0)]
    return float(np.interp(loss, losses[around], times[around]))


def with_equal_loss(comparison: Comparison, curves: JobCurves, tolerance: Tolerance) -> Comparison:
    """Return a comparison with its equal_loss.

    Args:
        comparison: with its test of the quality.
        curves: of the jobs of both groups.
        tolerance: accepted difference in quality, and without max_gap in another loss.
    """
    group, baseline = comparison.group, comparison.baseline
    is_timed = comparison.speed_ratio and comparison.has_learned
    if not baseline or not is_timed or not has_comparable_quality(comparison):
        return comparison
    pairs: list[tuple[Points, Points]] = []
    # Validation, unless more seeds have enough points of the training loss.
    for name in (metric_names.VAL_LOSS, "train/loss"):
        sides = [_timed_curves(each, name, curves) for each in (group, baseline)]
        pairs = max(pairs, pair_by_seed(*sides), key=len)
    if not pairs or group.device != baseline.device:
        return comparison
    rows = []
    for pair in pairs:
        ends = [float(losses[-1]) for _, losses in pair]
        rows.append((*ends, *(time_to_loss(curve, max(ends)) for curve in pair)))
    own, base, own_times, base_times = ([*enumerate(each)] for each in zip(*rows, strict=True))
    if group.metric != metric_names.VAL_LOSS:
        tolerance = replace(tolerance, max_gap=None)
    (test,) = quality_tests([own], base, "min", tolerance)
    ratio = Ratio.of_groups(base_times, own_times)
    if group.counts["diverged"] or Verdict.WORSE in (test.verdict, comparison.verdict):
        ratio = Ratio(0.0, len(pairs), 0.0, 0.0)
    return replace(comparison, equal_loss=ratio)


def _timed_curves(group: Group, name: str, curves: JobCurves) -> list[tuple[int | None, Points]]:
    """Return (seed, smoothed curve over milliseconds of steps) of each job that has such a curve.

    Args:
        group: the jobs.
        name: of the curve.
        curves: of all jobs.
    """
    found = []
    for job in group.jobs:
        curve = curves.get(id(job), {}).get(name)
        if job.outcome == "finished" and job.timed_step_ms and curve is not None:
            steps, losses = smoothed_curve(curve)
            if len(steps) >= MIN_POINTS:
                found.append((job.seed, (job.timed_step_ms * steps, losses)))
    return found
