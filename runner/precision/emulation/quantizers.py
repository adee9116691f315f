"""What FP8 and FP4 recipes make of an operand of a product: scaled, rounded and scaled back, in
float32.

Source: the rules of scaling are those of TransformerEngine 2.20 (the reference implementations in
transformer_engine/pytorch/custom_recipes and common/recipe) and of arXiv:2509.25149 for NVFP4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.precision.emulation.formats import E2M1, E4M3, Format, power_of_two, round_within_range

Rule = Callable[[Tensor, Format], Tensor]
"""From the largest magnitudes (float32), the factors that bring them to a format's range."""

Quantizer = Callable[[Tensor], Tensor]
"""From an operand [rows, contracted] in float32, the values that the product sees, in float32."""

_MOST: Final = torch.finfo(torch.float32).max
_SIXTH: Final = torch.tensor(6.0).reciprocal().item()


def amax_scale(amax: Tensor, fmt: Format) -> Tensor:
    """The largest magnitude becomes the format's largest value; 1 where that cannot be."""
    # A number over a tensor would be the tensor's reciprocal times it: rounded twice.
    scale = (torch.full_like(amax, fmt.largest) / amax).clamp(max=_MOST)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def power_of_two_scale(amax: Tensor, fmt: Format) -> Tensor:
    """The same, rounded down to a power of two."""
    exponent = amax_scale(amax, fmt).view(torch.int32) & 0x7F800000
    return exponent.view(torch.float32)


def exponent_scale(amax: Tensor, fmt: Format) -> Tensor:
    """The inverse of the least power of two that E8M0 holds and that is not below the largest
    magnitude over the format's largest value."""
    inverse = torch.full_like(amax, fmt.largest).reciprocal()
    bits = (amax * inverse).view(torch.int32)
    above = (bits + 0x7FFFFF) & 0x7F800000  # the least power of two that is not below
    scale = (0x7F000000 - above).view(torch.float32)  # its inverse: exponents are biased by 127
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


@dataclass(frozen=True)
class BlockQuantizer:
    """Each block of an operand scaled by its own largest magnitude.

    Attributes:
        fmt: rounded to.
        rule: how it scales.
        shape: of a block, rows by contracted columns; None for the whole operand.
    """

    fmt: Format
    rule: Rule
    shape: tuple[int, int] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        blocks = to_tiles(x, self.shape or (*x.shape,))
        scale = self.rule(_largest(blocks), self.fmt)
        values = round_within_range(blocks * scale, self.fmt).mul_(scale.reciprocal())
        return from_tiles(values, x.shape)


@dataclass(frozen=True)
class Nvfp4Quantizer:
    """E2M1 in blocks whose scales are E4M3, below one scale of the whole in float32.

    Attributes:
        shape: of a block.
        rotates: a Hadamard transform with fixed signs first, along what is contracted. It is for
            both operands of a product, in which it cancels.
        stochastic: rounds up or down at random, by the distance.
    """

    shape: tuple[int, int] = (1, 16)
    rotates: bool = False
    stochastic: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.rotates:
            x = F.pad(x, (0, -x.shape[1] % 16))
            # One product, not one per row: for that the rows lie one after another.
            x = (x.contiguous().unflatten(1, (-1, 16)) @ hadamard_rotation(x.device)).flatten(1)
        blocks = to_tiles(x, self.shape)
        amax = x.abs().amax()
        whole = torch.full_like(amax, E2M1.largest * E4M3.largest) / amax
        whole = torch.where(whole.isfinite() & (whole > 0), whole, 1.0)
        scale = round_within_range(_largest(blocks) * (whole * _SIXTH), E4M3) * whole.reciprocal()
        inverse = scale.reciprocal().clamp(max=_MOST)
        values = blocks * inverse
        if self.stochastic:
            nearest = _either(values.clamp_(-E2M1.largest, E2M1.largest))
        else:
            nearest = round_within_range(values, E2M1)
        return from_tiles(nearest.mul_(scale), x.shape)


def to_tiles(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A matrix as [blocks down, rows, blocks across, columns], padded with zeros."""
    rows, columns = shape
    missing = -x.shape[0] % rows, -x.shape[1] % columns
    if any(missing):  # torch copies where nothing is missing, too
        x = F.pad(x, (0, missing[1], 0, missing[0]))
    return x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def from_tiles(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The matrix again, without the padding."""
    return blocks.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]


@cache
def hadamard_rotation(device: torch.device) -> Tensor:
    """[16, 16] orthogonal: the signs that the library keeps, before Hadamard's matrix."""
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while len(matrix) < 16:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    return (signs[:, None] * matrix / 4).to(device)


def _largest(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block: [blocks down, 1, blocks across, 1]."""
    values = blocks.abs()
    if values.shape[1] > 1:
        values = values.amax(1, keepdim=True)
    # torch's own reduction of few or of strided numbers takes five times as long as halving.
    while values.shape[3] % 2 == 0 and (values.stride(3) != 1 or values.shape[3] <= 16):
        half = values.shape[3] // 2
        values = torch.maximum(values[..., :half], values[..., half:])
    return values.amax(3, keepdim=True)


def _either(x: Tensor) -> Tensor:
    """One of the two values of E2M1 around, the nearer the likelier."""
    magnitude = x.abs()
    spacing = power_of_two(x, E2M1).mul_(0.5)
    places = magnitude.div_(spacing)
    below = places.floor()
    up = torch.rand_like(x).lt_(places.sub_(below))
    return below.add_(up).mul_(spacing).copysign_(x)
