"""Find the loss scales at which float16 would hold the gradients that were measured."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from runner.diagnostics.numerics.results import (
    KINDS,
    NEGLIGIBLE_EXPONENT_GAP,
    NOISE_SHARE_LIMIT,
    VANISHING_SHARE_LIMIT,
    Numerics,
    TensorStats,
)
from runner.precision.emulation.formats import FLOAT16

INITIAL_SCALE = 2.0**16
"""The scale that 16-mixed and torch's GradScaler begin with."""
KINDS_WITHOUT_GRADIENTS = tuple(kind for kind in KINDS if kind != "gradients")
_POWERS = range(-32, 97)
"""Exponents of the scales that are tried."""
_LOWEST = FLOAT16.exponent - FLOAT16.mantissa
"""Exponent of the least subnormal value. Values under half of it become zero."""
_BIN_ENERGY = 7 / 3
"""Mean of x**2 over [1, 2): energy of a value in units of 4**exponent."""


class LossScaleRange(NamedTuple):
    """The lowest and the highest power of two that would do."""

    least: float
    greatest: float


def loss_scales(numerics: Numerics) -> LossScaleRange | None:
    """Return the loss scales at which float16 would hold all measured gradients.

    At these no gradient of any snapshot overflows and no module's gradients lack range. The run's
    own scale is divided out.

    Returns:
        Their range; None where no scale would do.
    """
    modules: dict[str, list[tuple[TensorStats, float]]] = defaultdict(list)
    for snapshot in numerics.probes:
        for stats in snapshot.measured:
            if stats.kind == "gradients":
                modules[stats.module].append((stats, snapshot.loss_scale or 1.0))
    fits = [k for k in _POWERS if all(_fits(found, k) for found in modules.values())]
    if not fits:
        return None
    return LossScaleRange(2.0 ** fits[0], 2.0 ** fits[-1])


def suitable_range(numerics: Numerics) -> LossScaleRange | None:
    """Return the loss scales with which float16 would do, where gradients alone lack its range.

    None where gradients do not lack it, something else does, too, or no scale would do.
    """
    if numerics.sensitivity("float16", ["gradients"]) != "range":
        return None
    # A loss scale multiplies gradients only: it cannot help activations or weights.
    if numerics.sensitivity("float16", KINDS_WITHOUT_GRADIENTS) == "range":
        return None
    return loss_scales(numerics)


def _fits(measured: Sequence[tuple[TensorStats, float]], power: int) -> bool:
    """Return whether float16 holds one module's gradients times 2**power.

    Args:
        measured: the gradients at each snapshot, with the loss scale in force.
        power: exponent of the scale that is tried.
    """
    vanishing = 0.0
    noise = 0.0
    for stats, scale in measured:
        factor = 2.0**power / scale
        # A single overflow skips a step, so it is not averaged over the snapshots as the rest is.
        if stats.not_finite or (stats.largest or 0.0) * factor >= FLOAT16.overflow:
            return False
        # Scales are powers of two, but a run may begin with any number: the nearest power then.
        shift = round(math.log2(factor))
        vanished_share, noise_share = _losses_below_range(stats.exponents, shift)
        vanishing += vanished_share / len(measured)
        noise += noise_share / len(measured)
    return vanishing < VANISHING_SHARE_LIMIT and noise < NOISE_SHARE_LIMIT


def _losses_below_range(exponents: Mapping[int, int], shift: int) -> tuple[float, float]:
    """Return what float16 loses of values under its least normal one.

    Only counts by exponent are known: values are taken for evenly spread between powers of two.

    Args:
        exponents: count of values by exponent.
        shift: added to the exponents.

    Returns:
        The share of values that become zero and are not negligible, and the energy that is lost,
        over that of all values.
    """
    values = sum(exponents.values())
    if not values:
        return 0.0, 0.0
    floor = max(exponents) - NEGLIGIBLE_EXPONENT_GAP
    zero = _LOWEST - 1 - shift
    vanished = sum(n for e, n in exponents.items() if floor <= e < zero)
    energy = sum(n * _BIN_ENERGY * 4.0**e for e, n in exponents.items())
    # The variance of an error that is evenly spread over a step is the step squared, over 12.
    rounding_energy = 4.0 ** (_LOWEST - shift) / 12
    small = {e: n for e, n in exponents.items() if e < FLOAT16.exponent - shift}
    # A value that becomes zero loses its own energy and no more.
    lost = sum(n * min(_BIN_ENERGY * 4.0**e, rounding_energy) for e, n in small.items())
    return vanished / values, lost / energy
