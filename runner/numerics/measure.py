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

from runner.numerics.found import Lost
from runner.precision.rounding import BFLOAT16, E4M3, E5M2, FLOAT16, Format, rounded

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
_PER_READING = ("underflow", "subnormal", "overflow", "noise")
_COLUMNS = 3 + len(READINGS) * len(_PER_READING) + 1 + len(STORED)
_TINY = 2.0**-126


class Sample(NamedTuple):
    """Evenly spaced elements of a tensor.

    Attributes:
        values: of the tensor's own dtype, its real parts and imaginary ones, [at most SAMPLE].
        largest: magnitude in the whole tensor, float32; not finite where an element is not.
        elements: of the whole.
        stride: from one to the next.
    """

    values: Tensor
    largest: Tensor
    elements: int
    stride: int


@dataclass(frozen=True)
class Row:
    """A tensor to be measured. Of updates also the weights `before` them, float32, and which of
    these had a gradient: what weight decay alone moves is no update that anybody misses."""

    sample: Sample
    before: Tensor | None = None
    pulled: Tensor | None = None


@dataclass(frozen=True)
class Counted:
    """What was found of a tensor, as estimates for all of it."""

    elements: int
    zeros: float
    not_finite: float
    largest: float
    exponents: NDArray[np.float64]
    sums: NDArray[np.float64]
    """Of the columns."""


def takes(tensor: Tensor) -> bool:
    """Whether there is something to measure: dense floating or complex numbers of 16 bits or more,
    in no wrapper of a library's."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    dense = tensor.layout is torch.strided and not tensor.is_nested
    if not (numbers and dense) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.numel() > 0 and tensor.itemsize > 1


@torch.no_grad()
def sample(tensor: Tensor) -> Sample:
    """A copy of some of a tensor's elements. The stride has no factor in common with their number,
    so that it falls on every channel."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.reshape(-1)
    stride = -(-flat.numel() // SAMPLE)
    while math.gcd(stride, flat.numel()) > 1:
        stride += 1
    low, high = flat.aminmax()
    largest = torch.maximum(-low, high).float()
    return Sample(flat[::stride].clone(), largest, flat.numel(), stride)


def single(values: Tensor) -> Tensor:
    """Of a sample, in float32."""
    return values.to(torch.float32)


@torch.no_grad()
def count(rows: Sequence[Row]) -> list[Counted]:
    """Measure tensors of one device; they come over in one transfer."""
    if not rows:
        return []
    device = rows[0].sample.values.device
    lengths = [-(-len(row.sample.values) // BLOCK) for row in rows]
    ids = torch.tensor(np.repeat(np.arange(len(rows)), lengths), device=device)
    x = _blocks([single(row.sample.values) for row in rows])
    largest = torch.stack([row.sample.largest for row in rows])
    parts = []
    histogram = torch.zeros(len(rows) * EXPONENTS, dtype=torch.int64, device=device)
    one = torch.ones((), dtype=torch.int64, device=device)
    for i in range(0, len(x), CHUNK):
        part, where = x[i : i + CHUNK], ids[i : i + CHUNK]
        columns, exponents = _measure(part, largest[where])
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


def _measure(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Columns [_COLUMNS without those of updates, blocks] and the biased exponents of x."""
    finite = x.isfinite()
    magnitude = torch.where(finite, x, 0.0).abs()
    whole = torch.where(largest.isfinite(), largest, magnitude.amax(1))
    whole = whole.clamp(min=_TINY).unsqueeze(1)
    zeros = (magnitude == 0).sum(1)
    columns = [zeros.float(), (~finite).sum(1).float(), (magnitude / whole).square().sum(1)]
    for _, fmt, scaled in READINGS:
        scale = fmt.largest / whole if scaled else None
        columns += _reading(magnitude, whole, zeros, fmt, scale)
    return torch.stack(columns), magnitude.view(torch.int32) >> 23


def _reading(
    magnitude: Tensor, whole: Tensor, zeros: Tensor, fmt: Format, scale: Tensor | None
) -> list[Tensor]:
    """Of each block what is lost in a format: _PER_READING."""
    if scale is not None:
        scale = scale.clamp(max=2.0**127)
        magnitude, whole = magnitude * scale, whole * scale
    near = rounded(magnitude, fmt).clamp(max=fmt.largest)
    gone, small = (near == 0).sum(1), (near < fmt.normal).sum(1)
    noise = ((magnitude - near) / whole).square().sum(1)
    over = (magnitude >= fmt.overflow).sum(1)
    return [(gone - zeros).float(), (small - gone).float(), over.float(), noise]


def _swallowed(rows: Sequence[Row], lengths: Sequence[int], device: torch.device) -> Tensor:
    """[1 + len(STORED), blocks]: weights that had a gradient, and those of them that each format
    keeps where they were; zeros where a row is of no updates."""
    found = torch.zeros(1 + len(STORED), sum(lengths), dtype=torch.float32, device=device)
    asked = [i for i, row in enumerate(rows) if row.before is not None]
    if not asked:
        return found
    before = _blocks([rows[i].before for i in asked])  # type: ignore[misc]
    update = _blocks([single(rows[i].sample.values) for i in asked])
    pulled = _blocks([rows[i].pulled.float() for i in asked]) != 0  # type: ignore[union-attr]
    columns = [pulled.sum(1)]
    for fmt in STORED:
        held = rounded(before, fmt)
        columns.append(((rounded(held + update, fmt) == held) & pulled).sum(1))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    where = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in asked])
    found[:, torch.tensor(where, device=device)] = torch.stack(columns).float()
    return found


def _unpacked(
    rows: Sequence[Row], lengths: Sequence[int], packed: NDArray[np.float64]
) -> list[Counted]:
    blocks = sum(lengths)
    table = packed[: _COLUMNS * blocks].reshape(_COLUMNS, blocks)
    largest = packed[_COLUMNS * blocks :][: len(rows)]
    exponents = packed[-EXPONENTS * len(rows) :].reshape(len(rows), EXPONENTS)
    starts = np.cumsum([0, *lengths[:-1]])
    sums = np.add.reduceat(table, starts, axis=1)
    found = []
    for i, row in enumerate(rows):
        taken, share = len(row.sample.values), row.sample.elements / len(row.sample.values)
        padding = lengths[i] * BLOCK - taken
        zeros = sums[0, i] - padding - sums[1, i]
        exponents[i, 0] -= sums[0, i]
        found.append(Counted(row.sample.elements, zeros * share, sums[1, i] * share, largest[i],
                             exponents[i] * share, sums[:, i] * share))  # fmt: skip
    return found


def lost(counted: Sequence[Counted]) -> dict[str, Lost]:
    """What the formats lose of tensors together, by name of the reading."""
    sums = np.sum([c.sums for c in counted], axis=0)
    values = sum(c.exponents.sum() for c in counted)
    pulled = sums[-1 - len(STORED)]
    found = {}
    for i, (name, fmt, scaled) in enumerate(READINGS):
        underflow, subnormal, overflow, noise = sums[3 + 4 * i : 7 + 4 * i]
        stays = None
        if pulled and fmt in STORED and not scaled:
            stays = float(sums[STORED.index(fmt) - len(STORED)] / pulled)
        ratio = sums[2] / noise if noise else 0.0
        found[name] = Lost(
            *(float(n / values) if values else 0.0 for n in (underflow, subnormal, overflow)),
            sqnr_db=10 * math.log10(ratio) if ratio else None,
            swallowed=stays,
        )
    return found
