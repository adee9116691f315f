"""Draw curves of many steps with few points, without losing dips and peaks of a single step."""

import numpy as np
from numpy.typing import NDArray

from runner.tracking.history import Curve

Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps and values, both of shape [points]."""
ENVELOPE_BUCKETS = 750
"""Each becomes two points, its least and its greatest value: a chart has fewer pixels."""
MEAN_BUCKETS = 200
"""Buckets of a smoothed curve."""


def curve_points(curve: Curve) -> Points:
    """Return steps and values in order of steps.

    A step that was repeated after a resume has its last value.
    """
    # np.unique() returns the first index of each step: reversed, the last value recorded for it.
    steps, first = np.unique(curve[0][::-1], return_index=True)
    return steps, curve[2][::-1][first]


def envelope(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Points:
    """Return each bucket's least and greatest value, in their order.

    These are at most 2 * ENVELOPE_BUCKETS points. Values that are not finite are left out; a
    bucket without any other becomes a gap (NaN).
    """
    if len(steps) <= 2 * ENVELOPE_BUCKETS:
        return steps, np.where(np.isfinite(values), values, np.nan)
    selected: list[int] = []
    for bucket in np.array_split(np.arange(len(steps)), ENVELOPE_BUCKETS):
        finite = bucket[np.isfinite(values[bucket])]
        if len(finite) == 0:
            selected.append(int(bucket[0]))
        else:
            least = int(finite[values[finite].argmin()])
            greatest = int(finite[values[finite].argmax()])
            # A set: a bucket of one value is one point.
            selected += sorted({least, greatest})
    index = np.array(selected)
    return steps[index], np.where(np.isfinite(values[index]), values[index], np.nan)


def bucket_means(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Points:
    """Return the mean of each of MEAN_BUCKETS buckets over its finite values, NaN without any.

    Curves of at most 2 * MEAN_BUCKETS points are returned as they are, with NaN for infinite
    values.
    """
    if len(steps) <= 2 * MEAN_BUCKETS:
        return steps, np.where(np.isfinite(values), values, np.nan)
    buckets = np.array_split(np.arange(len(steps)), MEAN_BUCKETS)
    finite = [values[bucket][np.isfinite(values[bucket])] for bucket in buckets]
    mean_steps = np.array([steps[bucket].mean() for bucket in buckets])
    mean_values = np.array([part.mean() if len(part) else np.nan for part in finite])
    return mean_steps, mean_values
