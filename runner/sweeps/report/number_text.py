"""Format means, ratios and differences as every table and sentence of a report prints them."""

import math
from collections.abc import Iterable

from runner.sweeps.report.statistics import Ratio, Spread
from runner.utils.formatting import format_number

MAX_LISTED_NAMES = 3
"""Names in a sentence; the rest are counted."""
MAX_DECIMALS = 8
"""Smaller errors are written with an exponent."""
LARGEST_ERROR = 1e300
"""Keeps the logarithm of an infinite error finite."""


def format_mean_sd(spread: Spread | None) -> str:
    """Return mean ± standard deviation with two digits of the deviation; for one value the mean."""
    if spread is None:
        return ""
    if not spread.sd:
        mean = format_number(spread.mean)
        return f"{mean} ± 0" if spread.n > 1 else mean
    return format_interval(spread.mean, spread.sd)


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
    return f"{value:{sign}.{places}f} ± {error:.{places}f}"


def format_ratio(ratio: Ratio | None) -> str:
    """Return a ratio of speeds with two decimals, empty without one."""
    return f"{ratio.value:.2f}" if ratio else ""


def format_range(ratio: Ratio | None) -> str:
    """Return a ratio's range over seeds, empty with one seed."""
    if ratio is None or ratio.low == ratio.high:
        return ""
    return f"{ratio.low:.2f} to {ratio.high:.2f}"


def join_names(names: Iterable[str], limit: int = MAX_LISTED_NAMES) -> str:
    """Return the first names, and how many more there are."""
    every = list(names)
    listed = ", ".join(every[:limit])
    if len(every) > limit:
        return f"{listed} and {len(every) - limit} more"
    return listed
