"""Loss scales at which float16 would hold the gradients that were measured."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from runner.diagnostics.numerics.results import (
    KINDS,
    NEGLIGIBLE,
    NOISE,
    VANISHED,
    Numerics,
    TensorStats,
)
from runner.precision.emulation.formats import FLOAT16

FIRST = 2.0**16
"""The scale that 16-mixed and torch's GradScaler begin with."""
OTHERS = tuple(kind for kind in KINDS if kind != "gradients")
_POWERS = range(-32, 97)
"""Of the scales that are tried."""
_LOWEST = FLOAT16.exponent - FLOAT16.mantissa
"""Exponent of the least subnormal value. Values under half of it become zero."""
_BIN_ENERGY = 7 / 3
"""Mean of x**2 over [1, 2): energy of a value in units of 4**exponent."""


class LossScaleRange(NamedTuple):
    """The least and the greatest power of two that would do."""

    least: float
    greatest: float


def loss_scales(numerics: Numerics) -> LossScaleRange | None:
    """Return the loss scales at which no gradient of any look would overflow float16 and no
    module's gradients lack its range, None where there is none.

    The run's own scale is divided out. Values are taken for evenly spread between powers of two.
    """
    modules: dict[str, list[tuple[TensorStats, float]]] = defaultdict(list)
    for look in numerics.looks:
        for m in look.measured:
            if m.kind == "gradients":
                modules[m.module].append((m, look.loss_scale or 1.0))
    fits = [k for k in _POWERS if all(_fits(found, k) for found in modules.values())]
    return LossScaleRange(2.0 ** fits[0], 2.0 ** fits[-1]) if fits else None


def suitable_range(numerics: Numerics) -> LossScaleRange | None:
    """Return the loss scales with which float16 would do where it lacks range in gradients alone,
    None where it lacks nothing, or something else, too."""
    if numerics.sensitivity("float16", ["gradients"]) != "range":
        return None
    if numerics.sensitivity("float16", OTHERS) == "range":
        return None
    return loss_scales(numerics)


def _fits(found: Sequence[tuple[TensorStats, float]], power: int) -> bool:
    """Whether float16 holds one module's gradients times 2**power, in the mean over its looks."""
    vanishing, noise = 0.0, 0.0
    for m, scale in found:
        factor = 2.0**power / scale
        if m.not_finite or (m.largest or 0.0) * factor >= FLOAT16.overflow:
            return False
        shift = round(math.log2(factor))
        gone, lost = _below(m.exponents, shift)
        vanishing, noise = vanishing + gone / len(found), noise + lost / len(found)
    return vanishing < VANISHED and noise < NOISE


def _below(exponents: Mapping[int, int], shift: int) -> tuple[float, float]:
    """Return the share of values that become zero and are not negligible, and the energy that
    values under the least normal one lose, over that of all. Exponents are moved by `shift`."""
    values = sum(exponents.values())
    if not values:
        return 0.0, 0.0
    floor = max(exponents) - NEGLIGIBLE
    zero = _LOWEST - 1 - shift
    gone = sum(n for e, n in exponents.items() if floor <= e < zero)
    energy = sum(n * _BIN_ENERGY * 4.0**e for e, n in exponents.items())
    spacing = 4.0 ** (_LOWEST - shift) / 12  # of an error evenly spread over a step
    small = {e: n for e, n in exponents.items() if e < FLOAT16.exponent - shift}
    lost = sum(n * min(_BIN_ENERGY * 4.0**e, spacing) for e, n in small.items())
    return gone / values, lost / energy
