"""Round float32 tensors to the values of narrower formats, and quantize the operands of products as
FP8 and FP4 recipes do: scale, round, and scale back.

Only float32 and int32 arithmetic is used, so it works on devices that lack the formats' dtypes, and
the results stay float32 ("fake quantization"): a product of two quantized operands sees what the
hardware's product sees. Scales multiply: quantized = round(x * scale) / scale.

Source of the formats: IEEE 754 (float16), OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2),
OCP Microscaling Formats Specification 1.0 (E2M1). The scaling rules are those of TransformerEngine
2.20 (the reference implementations in transformer_engine/pytorch/custom_recipes and common/recipe)
and of arXiv:2509.25149 for NVFP4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

INFINITY_BITS = 0x7F800000  # of float32; also the mask of its exponent


@dataclass(frozen=True)
class Format:
    """A binary floating format with subnormals.

    Attributes:
        name: torch's name of the dtype, without "torch.".
        dtype: torch's; for E2M1 the one that packs two values into a byte.
        mantissa: number of stored bits of the significand.
        exponent: of the least normal value, 2 ** exponent.
        largest: finite value.
        overflow: the least float32 magnitude that does not round to a finite value.
        saturates: whether magnitudes that overflow become the largest value, as in a format without
            infinity.
    """

    name: str
    dtype: torch.dtype
    mantissa: int
    exponent: int
    largest: float
    overflow: float
    saturates: bool = False

    @property
    def normal(self) -> float:
        """Return the least normal value; below it the spacing of values stays the same."""
        return 2.0**self.exponent


FLOAT16 = Format("float16", torch.float16, 10, -14, 65504.0, 65520.0)
BFLOAT16 = Format(
    "bfloat16", torch.bfloat16, 7, -126, 2.0**127 * (2 - 2.0**-7), 2.0**127 * (2 - 2.0**-8)
)
E4M3 = Format("float8_e4m3fn", torch.float8_e4m3fn, 3, -6, 448.0, 464.0 + 2.0**-15, saturates=True)
E5M2 = Format("float8_e5m2", torch.float8_e5m2, 2, -14, 57344.0, 61440.0)
E2M1 = Format("float4_e2m1fn", torch.float4_e2m1fn_x2, 1, 0, 6.0, 7.0, saturates=True)
FP8_ROUNDOFFS = (2.0 ** -(E4M3.mantissa + 1), 2.0 ** -(E5M2.mantissa + 1))
"""Unit roundoffs of the operands of FP8 layers: of weights and activations, and of gradients."""
FOUR_BITS_ROUNDOFF = 2.0**-2
"""Unit roundoff that stands for formats of 4 bits with a scale for each block, whose error of
normal weights is near 0.1 in norm (Dettmers et al., arXiv:2305.14314)."""
EIGHT_BITS_ROUNDOFF = 2.0**-6
"""Unit roundoff that stands for integers of 8 bits with a scale for each row."""
FORMATS = {f.name: f for f in (FLOAT16, BFLOAT16, E4M3, E5M2)}


def round_to_format(x: Tensor, fmt: Format) -> Tensor:
    """Return the nearest values of a format, ties to even, as torch's casts on a CPU round.

    Args:
        x: float32, any shape.
        fmt: the format. Where it has no infinity, larger values and infinity become its largest
            value, as in torch 2.15 (earlier versions return NaN).

    Returns:
        float32 of x's shape; signed zeros, NaN and, where the format has them, infinities are kept.
    """
    assert x.dtype is torch.float32, x.dtype
    magnitude = x.abs()
    bits = magnitude.view(torch.int32)
    # Bits of float32's 23 of significand that the format lacks.
    shift = 23 - fmt.mantissa
    # Integer addition of half a unit in the last place, less one bit where the last kept bit
    # is 0, then truncation: rounds to nearest, ties to even, and carries into the exponent.
    last_bit = (bits >> shift) & 1
    normal = ((bits + (last_bit + ((1 << (shift - 1)) - 1))) & -(1 << shift)).view(torch.float32)
    # Adding a power of two whose last place is the subnormals' spacing rounds to it.
    coarse = 2.0 ** (fmt.exponent - fmt.mantissa + 23)
    nearest = torch.where(magnitude < fmt.normal, (magnitude + coarse) - coarse, normal)
    overflowed = fmt.largest if fmt.saturates else torch.inf
    nearest = torch.where(magnitude >= fmt.overflow, overflowed, nearest)
    # Above infinity's bits are those of NaN, which keeps its own.
    return torch.where(bits > INFINITY_BITS, x, nearest.copysign(x))


def round_within_range(x: Tensor, fmt: Format) -> Tensor:
    """Return the nearest values of a format, ties to even, within its finite range.

    Bit by bit the same as round_to_format of the clamped tensor, in a tenth of its time.

    Args:
        x: float32, any shape. Larger magnitudes and infinity become the format's largest value.
        fmt: of 8 bits or fewer: with wider ones the sum below overflows.

    Returns:
        float32 of x's shape; signed zeros and NaN are kept.
    """
    assert fmt.dtype.itemsize == 1, fmt.name
    x = x.clamp(-fmt.largest, fmt.largest)
    # Adding 1.5 times the power of two whose last place is the format's spacing at a value rounds
    # to that spacing, for either sign.
    coarse = power_of_two(x).clamp_(min=fmt.normal).mul_(1.5 * 2.0 ** (23 - fmt.mantissa))
    return x.add(coarse).sub_(coarse).copysign_(x)


def power_of_two(x: Tensor) -> Tensor:
    """Return the power of two at or below each magnitude, 0 for 0: float32 of x's shape.

    Within a format's normal range the spacing of its values is proportional to it.
    """
    return (x.view(torch.int32) & INFINITY_BITS).view(torch.float32)


def round_to_tf32(x: Tensor) -> Tensor:
    """Return the nearest values with 10 bits of mantissa (TF32), ties away from zero.

    Source: the conversion `cvt.rna.tf32.f32` of CUDA's PTX instruction set.

    Args:
        x: float32, any shape.

    Returns:
        float32 of x's shape; infinities and NaN are kept.
    """
    bits = x.view(torch.int32)
    # TF32 lacks 13 of float32's 23 bits: half a unit in its last place is 1 << 12.
    nearest = ((bits + (1 << 12)) & -(1 << 13)).view(torch.float32)
    return torch.where(x.isfinite(), nearest, x)


ScaleRule = Callable[[Tensor, Format], Tensor]
"""Returns the scales, float32, that bring the largest magnitudes (amax, float32) into a format's
range."""

Quantizer = Callable[[Tensor], Tensor]
"""Returns the values, float32, that a product sees of an operand [rows, contracted], float32."""

_FLOAT32_MAX = torch.finfo(torch.float32).max
# The library multiplies by it, which rounds otherwise than a division by E2M1's largest value.
_ONE_SIXTH = torch.tensor(6.0).reciprocal().item()


def amax_scale(amax: Tensor, fmt: Format) -> Tensor:
    """Return the scale that maps amax to the format's maximum, or 1 if amax is zero or not finite.

    Args:
        amax: largest magnitudes, float32, any shape.
        fmt: of the quantized values.

    Returns:
        float32 of amax's shape, at most float32's largest value.
    """
    # A number over a tensor would be the tensor's reciprocal times it: rounded twice.
    scale = (torch.full_like(amax, fmt.largest) / amax).clamp(max=_FLOAT32_MAX)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def power_of_two_scale(amax: Tensor, fmt: Format) -> Tensor:
    """Return amax_scale rounded down to a power of two: float32 of amax's shape."""
    return power_of_two(amax_scale(amax, fmt))


def exponent_scale(amax: Tensor, fmt: Format) -> Tensor:
    """Return MXFP8's scale: the inverse of the least power of two >= amax / the format's maximum.

    The power of two is one that E8M0 can store. The scale is 1 if amax is zero or not finite.
    Source: the rounding is TransformerEngine's, up instead of OCP's down, so that nothing
    saturates.

    Args:
        amax: largest magnitudes, float32, any shape.
        fmt: of the quantized values.

    Returns:
        float32 of amax's shape.
    """
    inverse = torch.full_like(amax, fmt.largest).reciprocal()
    bits = (amax * inverse).view(torch.int32)
    above = (bits + 0x7FFFFF) & 0x7F800000  # the least power of two that is not below
    scale = (0x7F000000 - above).view(torch.float32)  # its inverse: exponents are biased by 127
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def join_scale(codes: Tensor, inverse: Tensor, keeps_scales: bool) -> Tensor:
    """Return quantized values that are scaled back or, to sum them first, with their scales.

    Args:
        codes: values of the format, float32, any shape; may be changed.
        inverse: of the scales, float32, broadcastable to codes.
        keeps_scales: whether values and inverse scales are returned apart.

    Returns:
        codes * inverse or, apart, both in the codes' shape: float32 [2, *shape].
    """
    if keeps_scales:
        return torch.stack((codes, inverse.expand_as(codes)))
    return codes.mul_(inverse)


@dataclass(frozen=True)
class BlockQuantizer:
    """A quantizer that scales each block of an operand by the block's largest magnitude.

    Attributes:
        fmt: of the quantized values.
        rule: returns a block's scale.
        shape: of a block, rows by contracted columns; None for the whole operand.
        keeps_scales: whether values and inverse scales are returned apart.
    """

    fmt: Format
    rule: ScaleRule
    shape: tuple[int, int] | None = None
    keeps_scales: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Return the quantized values: float32 [rows, contracted] to the same shape, or to
        [2, rows, contracted] as join_scale returns it."""
        blocks = to_tiles(x, self.shape or (*x.shape,))
        scale = self.rule(_block_amax(blocks), self.fmt)
        codes = round_within_range(blocks * scale, self.fmt)
        return from_tiles(join_scale(codes, scale.reciprocal(), self.keeps_scales), x.shape)


@dataclass(frozen=True)
class Nvfp4Quantizer:
    """A quantizer to E2M1 in blocks with E4M3 scales, and one float32 scale for the whole operand.

    Source: NVFP4, arXiv:2509.25149.

    Attributes:
        shape: of a block, rows by contracted columns.
        rotates: whether a Hadamard transform with fixed signs is applied first, along the
            contracted dimension. Both operands of a product need it: it cancels in the product.
        stochastic: whether values are rounded up or down at random, with the distances as
            probabilities.
    """

    shape: tuple[int, int] = (1, 16)
    rotates: bool = False
    stochastic: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Return the quantized values: float32 [rows, contracted] to the same shape.

        With `rotates` the contracted dimension is padded to a multiple of 16.
        """
        if self.rotates:
            x = F.pad(x, (0, -x.shape[1] % 16))
            # Contiguous, so that this is one product and not one for each row.
            x = (x.contiguous().unflatten(1, (-1, 16)) @ hadamard_rotation(x.device)).flatten(1)
        rounded, stored, tensor_scale = self._rounded_blocks(x)
        return from_tiles(rounded.mul_(stored * tensor_scale), x.shape)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what NVFP4 stores of a tensor, whose product is the quantized values bit by bit.

        Args:
            x: float32 [rows, contracted], a multiple of the block's shape.

        Returns:
            E2M1 values, float32 of x's shape; the blocks' E4M3 scales, float32 [rows, blocks]; the
            scale of the whole, a float32 scalar.
        """
        assert not self.rotates
        rounded, stored, tensor_scale = self._rounded_blocks(x)
        return from_tiles(rounded, x.shape), stored[:, 0, :, 0], tensor_scale

    def _rounded_blocks(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the E2M1 values in tiles, the tiles' E4M3 scales and the scale of the whole, all
        float32."""
        blocks = to_tiles(x, self.shape)
        amax = x.abs().amax()
        # The scale of the whole operand brings the blocks' scales into E4M3's range.
        operand_scale = torch.full_like(amax, E2M1.largest * E4M3.largest) / amax
        is_usable = operand_scale.isfinite() & (operand_scale > 0)
        operand_scale = torch.where(is_usable, operand_scale, 1.0)
        stored = round_within_range(_block_amax(blocks) * (operand_scale * _ONE_SIXTH), E4M3)
        tensor_scale = operand_scale.reciprocal()
        # A block of zeros has a scale of 0, whose inverse would be infinite and give NaN.
        inverse = (stored * tensor_scale).reciprocal().clamp(max=_FLOAT32_MAX)
        values = blocks * inverse
        if self.stochastic:
            rounded = _round_stochastically(values.clamp_(-E2M1.largest, E2M1.largest))
        else:
            rounded = round_within_range(values, E2M1)
        return rounded, stored, tensor_scale


def to_tiles(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a matrix in tiles: [tiles down, rows, tiles across, columns], padded with zeros.

    Args:
        x: [matrix rows, matrix columns], any dtype.
        shape: rows and columns of a tile.
    """
    rows, columns = shape
    missing_rows = -x.shape[0] % rows
    missing_columns = -x.shape[1] % columns
    if missing_rows or missing_columns:  # F.pad copies even where it adds nothing
        x = F.pad(x, (0, missing_columns, 0, missing_rows))
    return x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def from_tiles(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Return the matrix of this shape that to_tiles has split, without the padding; with a first
    dimension of its own several."""
    return blocks.flatten(-2, -1).flatten(-3, -2)[..., : shape[0], : shape[1]]


@cache
def hadamard_rotation(device: torch.device) -> Tensor:
    """Return TransformerEngine's random Hadamard transform: float32 [16, 16], orthogonal.

    It is a diagonal of fixed signs, those of the library, times Hadamard's matrix / 4.
    """
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32)
    square = torch.kron(pair, pair)
    matrix = torch.kron(square, square)
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    return (signs[:, None] * matrix / 4).to(device)


def _block_amax(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block: [blocks down, 1, blocks across, 1]."""
    values = blocks.abs()
    if values.shape[1] > 1:
        values = values.amax(1, keepdim=True)
    # torch's own reduction of few or of strided numbers takes five times as long as halving.
    while values.shape[3] % 2 == 0 and (values.stride(3) != 1 or values.shape[3] <= 16):
        half = values.shape[3] // 2
        values = torch.maximum(values[..., :half], values[..., half:])
    return values.amax(3, keepdim=True)


def _round_stochastically(x: Tensor) -> Tensor:
    """Return one of the two values of E2M1 around each value, each with a probability by its
    distance; float32, within E2M1's range."""
    magnitude = x.abs()
    spacing = power_of_two(x).clamp_(min=E2M1.normal).mul_(0.5)
    steps = magnitude.div_(spacing)
    below = steps.floor()
    up = torch.rand_like(x).lt_(steps.sub_(below))
    return below.add_(up).mul_(spacing).copysign_(x)
