"""Measuring many tensors at once: samples of them side by side in blocks, on their device, and one
transfer of what was counted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.diagnostics.numerics.results import NEGLIGIBLE, QuantizationLoss
from runner.precision.emulation.formats import (
    BFLOAT16,
    E4M3,
    E5M2,
    FLOAT16,
    Format,
    round_to_format,
)

SAMPLE = 2**14
"""Elements of a tensor that are measured at most."""
BLOCK = 2**8
CHUNK = 2**10
"""Blocks that are measured together: 1 MiB."""
EXPONENTS = 255
"""float32's, from -127."""
READINGS: tuple[tuple[str, Format, bool], ...] = (
    ("float16", FLOAT16, False),
    ("bfloat16", BFLOAT16, False),
    ("float8_e4m3fn", E4M3, True),
    ("float8_e5m2", E5M2, True),
    ("float8_e4m3fn_unscaled", E4M3, False),
    ("float8_e5m2_unscaled", E5M2, False),
)
"""(name, format, whether values are scaled to its largest first)."""
STORED = (FLOAT16, BFLOAT16)
_LEADING = ("zeros", "not_finite", "top", "signal")
_PER_READING = ("underflow", "subnormal", "overflow", "noise", "underflow_noise")
_READ = len(READINGS) * len(_PER_READING)
_COLUMNS = len(_LEADING) + _READ + 1 + len(STORED)
_TOP = _LEADING.index("top")
_ENERGIES = ("signal", "noise", "underflow_noise")
_ENERGY_COLUMNS = [
    i for i, what in enumerate((*_LEADING, *(_PER_READING * len(READINGS)))) if what in _ENERGIES
]
_TINY = 2.0**-126


class Sample(NamedTuple):
    """Evenly spaced elements of a tensor.

    Attributes:
        values: of the tensor's own dtype, its real parts and imaginary ones, [at most SAMPLE].
        largest: magnitude in the whole tensor, float32; not finite where an element is not.
            Entries of a mask do not count, see `sample`.
        elements: of the whole.
        stride: from one to the next.
    """

    values: Tensor
    largest: Tensor
    elements: int
    stride: int


@dataclass(frozen=True)
class SampledTensor:
    """A tensor to be measured. Of updates also the weights `before` them, float32, and which of
    these had a gradient: what weight decay alone moves is no update that anybody misses."""

    sample: Sample
    before: Tensor | None = None
    pulled: Tensor | None = None


@dataclass(frozen=True)
class ExponentCounts:
    """What was found of a tensor, as estimates for all of it."""

    elements: int
    zeros: float
    not_finite: float
    largest: float
    exponents: NDArray[np.float64]
    sums: NDArray[np.float64]
    """Of the columns. Energies are sums of squares in the tensor's own unit, so that those of
    several tensors add up."""


def is_measurable(tensor: Tensor) -> bool:
    """Whether there is something to measure: dense floating or complex numbers of 16 bits or more,
    in no wrapper of a library's."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    dense = tensor.layout is torch.strided and not tensor.is_nested
    if not (numbers and dense) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.numel() > 0 and tensor.itemsize > 1


@torch.no_grad()
def take_sample(tensor: Tensor, masked: bool = False) -> Sample:
    """Copy some of a tensor's elements. The stride has no factor in common with their number, so
    that it falls on every channel.

    Args:
        tensor: of which `takes` is true.
        masked: minus infinity and the lowest finite value of the dtype are entries of an attention
            mask, which every format can hold: they are counted as zeros.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.reshape(-1)
    stride = -(-flat.numel() // SAMPLE)
    while math.gcd(stride, flat.numel()) > 1:
        stride += 1
    low, high = flat.aminmax()
    largest, values = torch.maximum(-low, high).float(), flat[::stride].clone()
    if masked:
        lowest = torch.finfo(flat.dtype).min
        values = values.masked_fill(values <= lowest, 0.0)
        # What is no mask is then known of the sample alone, and at the upper end.
        without = torch.maximum(values.abs().amax(), high).float()
        largest = torch.where(low <= lowest, without, largest)
    return Sample(values, largest, flat.numel(), stride)


def to_float32(values: Tensor) -> Tensor:
    """Of a sample, in float32."""
    return values.to(torch.float32)


@torch.no_grad()
def count_exponents(rows: Sequence[SampledTensor]) -> list[ExponentCounts]:
    """Measure tensors of one device; they come over in one transfer."""
    if not rows:
        return []
    device = rows[0].sample.values.device
    lengths = [-(-len(row.sample.values) // BLOCK) for row in rows]
    ids = torch.tensor(np.repeat(np.arange(len(rows)), lengths), device=device)
    x = _blocks([to_float32(row.sample.values) for row in rows])
    largest = torch.stack([row.sample.largest for row in rows])
    scaled_to = _finite_largest(x, lengths, largest)
    parts = []
    histogram = torch.zeros(len(rows) * EXPONENTS, dtype=torch.int64, device=device)
    one = torch.ones((), dtype=torch.int64, device=device)
    for i in range(0, len(x), CHUNK):
        part, where = x[i : i + CHUNK], ids[i : i + CHUNK]
        columns, exponents = _measure(part, scaled_to[where])
        parts.append(columns)
        places = (exponents + (where * EXPONENTS).unsqueeze(1)).flatten()
        histogram.index_add_(0, places, one.expand_as(places))  # bincount would ask the device
    swallowed = _swallowed(rows, lengths, device)
    table = torch.cat([torch.cat(parts, 1), swallowed])
    packed = torch.cat([table.flatten(), largest, histogram.float()]).cpu().double().numpy()
    return _unpacked(rows, lengths, packed)


def _blocks(values: Sequence[Tensor]) -> Tensor:
    """[blocks, BLOCK], each tensor's filled up with zeros, which nothing counts."""
    return torch.cat([F.pad(v, (0, -len(v) % BLOCK)) for v in values]).view(-1, BLOCK)


def _finite_largest(x: Tensor, lengths: Sequence[int], largest: Tensor) -> Tensor:
    """Return each tensor's largest magnitude, that of its finite sample where it has others."""
    tops = torch.where(x.isfinite(), x, 0.0).abs().amax(1)
    sampled = torch.stack([blocks.amax() for blocks in tops.split(list(lengths))])
    return torch.where(largest.isfinite(), largest, sampled)


def _measure(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Columns [_COLUMNS without those of updates, blocks] and the biased exponents of x. Energies
    are in units of the square of the block's `top`: float32 cannot hold squares of all values."""
    finite = x.isfinite()
    magnitude = torch.where(finite, x, 0.0).abs()
    top = magnitude.amax(1, keepdim=True).clamp(min=_TINY)
    zeros = (magnitude == 0).sum(1)
    signal = (magnitude / top).square().sum(1)
    columns = [zeros.float(), (~finite).sum(1).float(), top.squeeze(1), signal]
    for _, fmt, scaled in READINGS:
        scale = fmt.largest / largest.clamp(min=_TINY).unsqueeze(1) if scaled else None
        columns += _reading(magnitude, top, zeros, fmt, scale)
    return torch.stack(columns), magnitude.view(torch.int32) >> 23


def _reading(
    magnitude: Tensor, top: Tensor, zeros: Tensor, fmt: Format, scale: Tensor | None
) -> list[Tensor]:
    """Of each block what is lost in a format: _PER_READING."""
    if scale is not None:
        scale = scale.clamp(max=2.0**127)
        magnitude, top = magnitude * scale, (top * scale).clamp(min=_TINY)
    near = round_to_format(magnitude, fmt).clamp(max=fmt.largest)
    tiny = near < fmt.normal
    gone, small = (near == 0).sum(1), tiny.sum(1)
    error = ((magnitude - near) / top).square()
    over = (magnitude >= fmt.overflow).sum(1)
    lost_below = torch.where(tiny, error, 0.0).sum(1)
    counts = [(gone - zeros).float(), (small - gone).float(), over.float()]
    return [*counts, error.sum(1), lost_below]


def _swallowed(
    rows: Sequence[SampledTensor], lengths: Sequence[int], device: torch.device
) -> Tensor:
    """[1 + len(STORED), blocks]: weights that had a gradient, and those of them that each format
    keeps where they were; zeros where a row is of no updates."""
    found = torch.zeros(1 + len(STORED), sum(lengths), dtype=torch.float32, device=device)
    asked = [i for i, row in enumerate(rows) if row.before is not None]
    if not asked:
        return found
    before = _blocks([rows[i].before for i in asked])  # type: ignore[misc]
    update = _blocks([to_float32(rows[i].sample.values) for i in asked])
    pulled = _blocks([rows[i].pulled.float() for i in asked]) != 0  # type: ignore[union-attr]
    columns = [pulled.sum(1)]
    for fmt in STORED:
        held = round_to_format(before, fmt)
        columns.append(((round_to_format(held + update, fmt) == held) & pulled).sum(1))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    where = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in asked])
    found[:, torch.tensor(where, device=device)] = torch.stack(columns).float()
    return found


def _unpacked(
    rows: Sequence[SampledTensor], lengths: Sequence[int], packed: NDArray[np.float64]
) -> list[ExponentCounts]:
    blocks = sum(lengths)
    table = packed[: _COLUMNS * blocks].reshape(_COLUMNS, blocks)
    largest = packed[_COLUMNS * blocks :][: len(rows)]
    exponents = packed[-EXPONENTS * len(rows) :].reshape(len(rows), EXPONENTS)
    starts = np.cumsum([0, *lengths[:-1]])
    table[_ENERGY_COLUMNS] *= table[_TOP] ** 2
    sums = np.add.reduceat(table, starts, axis=1)
    found = []
    for i, row in enumerate(rows):
        taken, share = len(row.sample.values), row.sample.elements / len(row.sample.values)
        padding = lengths[i] * BLOCK - taken
        zeros = sums[0, i] - padding - sums[1, i]
        exponents[i, 0] -= sums[0, i]
        not_finite = sums[1, i] * share
        if not np.isfinite(largest[i]):
            not_finite = max(not_finite, 1.0)  # the sample may have missed it
        found.append(
            ExponentCounts(
                row.sample.elements,
                zeros * share,
                not_finite,
                largest[i],
                exponents[i] * share,
                sums[:, i] * share,
            )
        )
    return found


def quantization_losses(counted: Sequence[ExponentCounts]) -> dict[str, QuantizationLoss]:
    """Return what the formats lose of a module's tensors of one kind, by name of the reading.

    SQNR is 10 log10(sum x**2 / sum (x - q(x))**2) dB over all of their finite values x together: a
    tensor weighs by its energy, so that one of rounding errors alone (the gradient of a bias of
    attention keys, zero in exact arithmetic) weighs nothing beside the weight of the same module.
    """
    sums = np.sum([c.sums for c in counted], axis=0)
    values = sum(c.exponents.sum() for c in counted)
    signal, pulled = sums[_LEADING.index("signal")], sums[-1 - len(STORED)]
    below = _negligible(counted)
    found = {}
    for i, (name, fmt, scaled) in enumerate(READINGS):
        start = len(_LEADING) + i * len(_PER_READING)
        underflow, subnormal, overflow, noise, small = sums[start : start + len(_PER_READING)]
        # Negligible values and those that become zero are both the smallest of their tensor.
        vanish = np.array([c.sums[start] for c in counted])
        negligible = float(np.minimum(vanish, below).sum())
        if not scaled:
            overflow = max(overflow, _overflows(counted, fmt))
        stays = None
        if pulled and fmt in STORED and not scaled:
            stays = float(sums[STORED.index(fmt) - len(STORED)] / pulled)
        shares = [underflow, subnormal, overflow, negligible]
        shares = [float(n / values) if values else 0.0 for n in shares]
        found[name] = QuantizationLoss(
            *shares[:3],
            sqnr_db=10 * math.log10(signal / noise) if noise else None,
            swallowed=stays,
            negligible=shares[3],
            underflow_noise=float(small / signal) if signal else 0.0,
        )
    return found


def _negligible(counted: Sequence[ExponentCounts]) -> NDArray[np.float64]:
    """Count each tensor's values that are more than NEGLIGIBLE powers of two below the largest of
    all of them."""
    used = np.flatnonzero(np.sum([c.exponents for c in counted], axis=0))
    largest = [c.largest for c in counted if np.isfinite(c.largest) and c.largest]
    exponents = [math.frexp(value)[1] + 126 for value in largest]  # 0.5 <= mantissa < 1
    highest = max([0, *used[-1:].tolist(), *exponents])
    below = max(0, highest - NEGLIGIBLE)
    return np.array([c.exponents[:below].sum() for c in counted])


def _overflows(counted: Sequence[ExponentCounts], fmt: Format) -> int:
    """Count the tensors whose largest value overflows, which a sample may have missed."""
    return sum(bool(np.isfinite(c.largest)) and c.largest >= fmt.overflow for c in counted)
