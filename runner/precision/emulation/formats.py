"""Round float32 tensors to the values of narrower formats.

Only float32 and int32 arithmetic is used, so it works on devices that lack the formats' dtypes, and
the results stay float32. Source of the formats: IEEE 754 (float16), OCP 8-bit Floating Point
Specification 1.0 (E4M3, E5M2), OCP Microscaling Formats Specification 1.0 (E2M1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
