"""Count what narrower formats lose of many tensors at once.

Samples of the tensors are laid out in blocks of one matrix on their device, measured there, and the
counts are copied to the host in one transfer: a transfer for each tensor would wait for the device
each time.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.core import tensor_facts
from runner.diagnostics.numerics.results import NEGLIGIBLE_EXPONENT_GAP, QuantizationLoss
from runner.precision.emulation.formats import (
    BFLOAT16,
    E4M3,
    E5M2,
    FLOAT16,
    Format,
    round_to_format,
)
from runner.precision.layers.expert_weight import ExpertWeight

MAX_SAMPLE_ELEMENTS = 2**14
"""Elements of a tensor that are measured at most."""
BLOCK_ELEMENTS = 2**8
"""Elements of a block; each holds values of one tensor only."""
CHUNK_BLOCKS = 2**10
"""Blocks that are measured together: 1 MiB in float32."""
EXPONENT_BINS = 255
"""float32's biased exponents of finite values: from -127 (zeros and subnormals) to 127."""
READINGS: tuple[tuple[str, Format, bool], ...] = (
    ("float16", FLOAT16, False),
    ("bfloat16", BFLOAT16, False),
    ("float8_e4m3fn", E4M3, True),
    ("float8_e5m2", E5M2, True),
    ("float8_e4m3fn_unscaled", E4M3, False),
    ("float8_e5m2_unscaled", E5M2, False),
)
"""(name, format, whether values are scaled to its largest first)."""
STORAGE_FORMATS = {"float16": FLOAT16, "bfloat16": BFLOAT16}
"""Formats that weights may be stored in: an update is asked what these would swallow of it."""

_LEAST_NORMAL = 2.0**-126
"""Of float32: divisors are clamped to it, for a block may hold zeros alone."""


class Sample(NamedTuple):
    """Evenly spaced elements of a tensor.

    Attributes:
        values: [at most MAX_SAMPLE_ELEMENTS], in the tensor's own dtype; of a complex tensor its
            real and its imaginary parts.
        largest: magnitude in the whole tensor, float32; not finite where an element is not.
            Entries of a mask do not count, see `take_sample`.
        elements: number in the whole tensor.
    """

    values: Tensor
    largest: Tensor
    elements: int


@dataclass(frozen=True)
class SampledTensor:
    """A tensor to be measured.

    Attributes:
        sample: of the tensor.
        weights_before: of updates only: the weights before the step, float32, [as the sample].
        has_gradient: of updates only: which of the weights had a gradient, bool, [as the sample].
    """

    sample: Sample
    weights_before: Tensor | None = None
    # A weight that weight decay alone moves has no update that a format could be blamed for.
    has_gradient: Tensor | None = None


@dataclass(frozen=True)
class ExponentCounts:
    """The counts of a tensor, estimated for all of it from a sample.

    Attributes:
        elements: number of them, zeros included.
        zeros, not_finite: how many.
        largest: magnitude.
        exponents: count of values by float32's biased exponent, [EXPONENT_BINS].
        sums: of the table's columns, by name. Energies are sums of squares in the tensor's own
            unit, so that those of several tensors add up.
    """

    elements: int
    zeros: float
    not_finite: float
    largest: float
    exponents: NDArray[np.float64]
    sums: Mapping[str, float]


def is_measurable(tensor: Tensor) -> bool:
    """Return whether a tensor is dense, has floating or complex numbers of 16 bits or more, and is
    in no wrapper of a library's."""
    if isinstance(tensor, ExpertWeight):  # without numbers
        return False
    numbers = tensor.is_floating_point() or tensor.is_complex()
    dense = tensor.layout is torch.strided and not tensor.is_nested
    if not (numbers and dense) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.numel() > 0 and tensor.itemsize > 1


@torch.no_grad()
def take_sample(tensor: Tensor, masked: bool = False, most: int = MAX_SAMPLE_ELEMENTS) -> Sample:
    """Copy some of a tensor's elements.

    Args:
        tensor: one for which `is_measurable` is true.
        masked: minus infinity and the lowest finite value of the dtype are entries of an attention
            mask, which every format can hold: they are counted as zeros.
        most: elements that are copied at most.
    """
    flat = tensor_facts.real_view(tensor.detach()).reshape(-1)
    stride = -(-flat.numel() // most)
    # Without a common factor with the number of elements, so that it falls on every channel.
    while math.gcd(stride, flat.numel()) > 1:
        stride += 1
    # The largest is of all elements: one value that overflows must not be missed.
    low, high = flat.aminmax()
    largest = torch.maximum(-low, high).float()
    # A copy: the step may write to the tensor before it is measured.
    values = flat[::stride].clone()
    if masked:
        lowest = torch.finfo(flat.dtype).min
        values = values.masked_fill(values <= lowest, 0.0)
        # What is no mask is then known of the sample alone, and at the upper end.
        without = torch.maximum(values.abs().amax(), high).float()
        largest = torch.where(low <= lowest, without, largest)
    return Sample(values, largest, flat.numel())


@torch.no_grad()
def count_exponents(rows: Sequence[SampledTensor]) -> list[ExponentCounts]:
    """Measure tensors of one device, with one transfer to the host.

    Args:
        rows: the tensors, all on one device.

    Returns:
        The counts of each tensor, in the order given.
    """
    if not rows:
        return []
    device = rows[0].sample.values.device
    lengths = [-(-len(row.sample.values) // BLOCK_ELEMENTS) for row in rows]
    # The index of the tensor of each block.
    ids = torch.tensor(np.repeat(np.arange(len(rows)), lengths), device=device)
    x = _blocks([row.sample.values.float() for row in rows])
    largest = torch.stack([row.sample.largest for row in rows])
    # One scale for the whole tensor, as a recipe has it, not one for each block; that of its finite
    # sample where it has other elements.
    tops = torch.where(x.isfinite(), x, 0.0).abs().amax(1)
    sampled = torch.stack([blocks.amax() for blocks in tops.split(lengths)])
    scaled_to = torch.where(largest.isfinite(), largest, sampled)
    columns: dict[str, list[Tensor]] = defaultdict(list)
    histogram = torch.zeros(len(rows) * EXPONENT_BINS, dtype=torch.int64, device=device)
    one = torch.ones((), dtype=torch.int64, device=device)
    # In chunks: each reading makes several temporaries of the size of its input.
    for i in range(0, len(x), CHUNK_BLOCKS):
        part = x[i : i + CHUNK_BLOCKS]
        tensor_ids = ids[i : i + CHUNK_BLOCKS]
        losses, exponents = _measure(part, scaled_to[tensor_ids])
        for name, column in losses.items():
            columns[name].append(column)
        first_bins = (tensor_ids * EXPONENT_BINS).unsqueeze(1)
        places = (exponents + first_bins).flatten()
        histogram.index_add_(0, places, one.expand_as(places))  # bincount would ask the device
    table = {name: torch.cat(parts) for name, parts in columns.items()}
    table |= _swallowed(rows, lengths, device)
    packed = torch.cat([*table.values(), largest, histogram.float()])
    return _unpack(rows, lengths, [*table], packed.cpu().double().numpy())


def _blocks(values: Sequence[Tensor]) -> Tensor:
    """Return values in blocks, [blocks, BLOCK_ELEMENTS], each tensor's last one padded with zeros.

    Zeros of the padding are subtracted from the counts in the end.
    """
    padded = [F.pad(v, (0, -len(v) % BLOCK_ELEMENTS)) for v in values]
    return torch.cat(padded).view(-1, BLOCK_ELEMENTS)


def _measure(x: Tensor, largest: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return what is counted of blocks, and the biased exponents of their values.

    Args:
        x: float32, [blocks, BLOCK_ELEMENTS].
        largest: magnitude in the tensor of each block, [blocks].

    Returns:
        The table without the columns of updates, each [blocks], and the exponents, as x.
    """
    finite = x.isfinite()
    magnitude = torch.where(finite, x, 0.0).abs()
    # Energies are in units of the square of the block's top: float32 cannot hold the squares of
    # all its values. They are multiplied by it in float64, on the host.
    top = magnitude.amax(1, keepdim=True).clamp(min=_LEAST_NORMAL)
    zeros = (magnitude == 0).sum(1)
    columns = {
        "zeros": zeros,
        "not_finite": (~finite).sum(1),
        "top": top.squeeze(1),
        "signal": (magnitude / top).square().sum(1),
    }
    for name, fmt, scaled in READINGS:
        scale = fmt.largest / largest.clamp(min=_LEAST_NORMAL).unsqueeze(1) if scaled else None
        for loss, column in _reading(magnitude, top, zeros, fmt, scale).items():
            columns[f"{name} {loss}"] = column
    # The bits of a float32 without its sign, shifted past the 23 of its mantissa.
    exponents = magnitude.view(torch.int32) >> 23
    return {name: column.float() for name, column in columns.items()}, exponents


def _reading(
    magnitude: Tensor, top: Tensor, zeros: Tensor, fmt: Format, scale: Tensor | None
) -> dict[str, Tensor]:
    """Return what each block loses in a format, [blocks] each."""
    if scale is not None:
        # The scale of a tensor of tiny values would be infinite in float32.
        scale = scale.clamp(max=2.0**127)
        magnitude = magnitude * scale
        top = (top * scale).clamp(min=_LEAST_NORMAL)
    # Overflow counts in the noise as the largest value: a difference to infinity has no energy.
    rounded = round_to_format(magnitude, fmt).clamp(max=fmt.largest)
    tiny = rounded < fmt.normal
    becomes_zero = (rounded == 0).sum(1)
    error = ((magnitude - rounded) / top).square()
    return {
        # Values that are zero already lose nothing.
        "underflow": becomes_zero - zeros,
        "subnormal": tiny.sum(1) - becomes_zero,
        "overflow": (magnitude >= fmt.overflow).sum(1),
        "noise": error.sum(1),
        "underflow_noise": torch.where(tiny, error, 0.0).sum(1),
    }


def _swallowed(
    rows: Sequence[SampledTensor], lengths: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    """Return the columns of updates, [blocks] each.

    They count the weights that had a gradient, and those of them that each format would leave where
    they were; zeros where a row is of no updates.
    """
    names = ["with_gradient", *(f"{name} swallowed" for name in STORAGE_FORMATS)]
    columns = {name: torch.zeros(sum(lengths), device=device) for name in names}
    updates = [row for row in rows if row.weights_before is not None]
    if not updates:
        return columns
    before = _blocks([row.weights_before for row in updates])  # type: ignore[misc]
    update = _blocks([row.sample.values.float() for row in updates])
    has_gradient = _blocks([row.has_gradient.float() for row in updates]) != 0  # type: ignore[union-attr]
    are_updates = np.repeat([row.weights_before is not None for row in rows], lengths)
    blocks = torch.tensor(np.flatnonzero(are_updates), device=device)
    columns["with_gradient"][blocks] = has_gradient.sum(1).float()
    for name, fmt in STORAGE_FORMATS.items():
        held = round_to_format(before, fmt)
        unmoved = round_to_format(held + update, fmt) == held
        columns[f"{name} swallowed"][blocks] = (unmoved & has_gradient).sum(1).float()
    return columns


def _unpack(
    rows: Sequence[SampledTensor],
    lengths: Sequence[int],
    names: Sequence[str],
    packed: NDArray[np.float64],
) -> list[ExponentCounts]:
    """Return the counts of each tensor from the transferred numbers, scaled up to all of it."""
    size = len(names) * sum(lengths)
    table = dict(zip(names, packed[:size].reshape(len(names), -1), strict=True))
    largest = packed[size:][: len(rows)]
    exponents = packed[-EXPONENT_BINS * len(rows) :].reshape(len(rows), EXPONENT_BINS)
    starts = np.cumsum([0, *lengths[:-1]])
    sums = {}
    for name, column in table.items():
        is_energy = name.endswith(("signal", "noise"))
        sums[name] = np.add.reduceat(column * table["top"] ** 2 if is_energy else column, starts)
    counts = []
    for i, row in enumerate(rows):
        taken = len(row.sample.values)
        share = row.sample.elements / taken
        padding = lengths[i] * BLOCK_ELEMENTS - taken
        # Values that are not finite were measured as zeros.
        zeros = sums["zeros"][i] - padding - sums["not_finite"][i]
        exponents[i, 0] -= sums["zeros"][i]
        not_finite = sums["not_finite"][i] * share
        if not np.isfinite(largest[i]):
            not_finite = max(not_finite, 1.0)  # the sample may have missed it
        own = {name: column[i] * share for name, column in sums.items()}
        counts.append(
            ExponentCounts(
                row.sample.elements,
                zeros * share,
                not_finite,
                largest[i],
                exponents[i] * share,
                own,
            )
        )
    return counts


def quantization_losses(counted: Sequence[ExponentCounts]) -> dict[str, QuantizationLoss]:
    """Return what the formats lose of a module's tensors of one kind, by name of the reading.

    SQNR is 10 log10(sum x**2 / sum (x - q(x))**2) dB over all of their finite values x together: a
    tensor weighs by its energy, so that one of rounding errors alone (the gradient of a bias of
    attention keys, zero in exact arithmetic) weighs nothing next to the weight of the same module.
    """
    sums = {name: sum(c.sums[name] for c in counted) for name in counted[0].sums}
    values = sum(c.exponents.sum() for c in counted)
    signal = sums["signal"]
    # The negligible values of each tensor: more than NEGLIGIBLE_EXPONENT_GAP powers of two below
    # the largest of all tensors.
    used = np.flatnonzero(np.sum([c.exponents for c in counted], axis=0))
    largest = [c.largest for c in counted if np.isfinite(c.largest)]
    # frexp's mantissa is from 0.5 to 1, IEEE's from 1 to 2: a bias of 126, not of 127.
    exponents = [math.frexp(value)[1] + 126 for value in largest if value]
    highest = max([0, *used[-1:].tolist(), *exponents])
    limit = max(0, highest - NEGLIGIBLE_EXPONENT_GAP)
    below = np.array([c.exponents[:limit].sum() for c in counted])

    def share(count: float) -> float:
        return float(count / values) if values else 0.0

    losses = {}
    for name, fmt, scaled in READINGS:
        # Negligible values and those that become zero are both the smallest of their tensor, so
        # the fewer of the two are those that are both.
        vanish = np.array([c.sums[f"{name} underflow"] for c in counted])
        overflow, noise = sums[f"{name} overflow"], sums[f"{name} noise"]
        if not scaled:
            # The largest value is known of the whole tensor, the count of the sample alone.
            overflow = max(overflow, sum(top >= fmt.overflow for top in largest))
        swallowed = None
        if f"{name} swallowed" in sums and sums["with_gradient"]:
            swallowed = float(sums[f"{name} swallowed"] / sums["with_gradient"])
        losses[name] = QuantizationLoss(
            share(vanish.sum()),
            share(sums[f"{name} subnormal"]),
            share(overflow),
            sqnr_db=10 * math.log10(signal / noise) if noise else None,
            swallowed=swallowed,
            negligible=share(np.minimum(vanish, below).sum()),
            underflow_noise=float(sums[f"{name} underflow_noise"] / signal) if signal else 0.0,
        )
    return losses
