"""Curves of many steps as few points, without losing what matters in them."""

import numpy as np
from numpy.typing import NDArray

from runner.tracking.history import Curve

Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps and values, of one length."""
BUCKETS = 750
"""Each becomes two points, its least and its greatest value: a chart has fewer pixels."""
MEANS = 200


def downsample(curve: Curve) -> Points:
    """Steps and values in order of steps; of a step that was repeated after a resume, the last."""
    steps, first = np.unique(curve[0][::-1], return_index=True)
    return steps, curve[2][::-1][first]


def envelope(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Points:
    """At most 2 * BUCKETS points that keep each bucket's least and greatest value, in their order,
    so that no dip of a single step is lost. Values that are not finite are left out, except that a
    bucket without any other becomes a gap (NaN)."""
    if len(steps) <= 2 * BUCKETS:
        return steps, np.where(np.isfinite(values), values, np.nan)
    kept: list[int] = []
    for part in np.array_split(np.arange(len(steps)), BUCKETS):
        good = part[np.isfinite(values[part])]
        if len(good) == 0:
            kept.append(int(part[0]))
        else:
            ends = (int(good[values[good].argmin()]), int(good[values[good].argmax()]))
            kept += sorted(set(ends))
    index = np.array(kept)
    return steps[index], np.where(np.isfinite(values[index]), values[index], np.nan)


def means(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Points:
    """Mean of each of MEANS buckets over what is finite in it, NaN where nothing is; few points as
    they are."""
    if len(steps) <= 2 * MEANS:
        return steps, np.where(np.isfinite(values), values, np.nan)
    parts = np.array_split(np.arange(len(steps)), MEANS)
    good = [values[p][np.isfinite(values[p])] for p in parts]
    return (
        np.array([steps[p].mean() for p in parts]),
        np.array([g.mean() if len(g) else np.nan for g in good]),
    )
