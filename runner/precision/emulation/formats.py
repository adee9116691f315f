"""Rounding float32 tensors to narrower formats by float32 and int32 arithmetic alone, so that it
works on devices that lack the formats' dtypes."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_INFINITE = 0x7F800000  # the bits of float32's infinity


@dataclass(frozen=True)
class Format:
    """A binary floating format with subnormals.

    Attributes:
        name: of its dtype in torch.
        dtype: torch's; of E2M1 the one that holds two of its values.
        mantissa: stored bits of the significand.
        exponent: of the least normal value, a power of two.
        largest: finite value.
        overflow: the least float32 value that is rounded to none of its finite values.
        saturates: what overflows becomes the largest value, as in a format without infinity.
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
        """The least normal value."""
        return 2.0**self.exponent


FLOAT16: Final = Format("float16", torch.float16, 10, -14, 65504.0, 65520.0)
BFLOAT16: Final = Format(
    "bfloat16", torch.bfloat16, 7, -126, 2.0**127 * (2 - 2.0**-7), 2.0**127 * (2 - 2.0**-8)
)
E4M3: Final = Format(
    "float8_e4m3fn", torch.float8_e4m3fn, 3, -6, 448.0, 464.0 + 2.0**-15, saturates=True
)
E5M2: Final = Format("float8_e5m2", torch.float8_e5m2, 2, -14, 57344.0, 61440.0)
E2M1: Final = Format("float4_e2m1fn", torch.float4_e2m1fn_x2, 1, 0, 6.0, 7.0, saturates=True)
FORMATS: Final = {f.name: f for f in (FLOAT16, BFLOAT16, E4M3, E5M2)}


def round_to_format(x: Tensor, fmt: Format) -> Tensor:
    """The nearest values of a format, ties to even, as torch's casts on a CPU round.

    Args:
        x: float32.
        fmt: rounded to. Where it has no infinity, larger values and infinity become its largest
            value, as in torch 2.15 (earlier ones made NaN of them).

    Returns:
        float32, with signed zeros, infinities and NaN.
    """
    assert x.dtype is torch.float32, x.dtype
    magnitude = x.abs()
    bits = magnitude.view(torch.int32)
    shift = 23 - fmt.mantissa
    even = (bits >> shift) & 1
    normal = ((bits + (even + ((1 << (shift - 1)) - 1))) & -(1 << shift)).view(torch.float32)
    # Adding a power of two whose last place is the subnormals' spacing rounds to it.
    coarse = 2.0 ** (fmt.exponent - fmt.mantissa + 23)
    nearest = torch.where(magnitude < fmt.normal, (magnitude + coarse) - coarse, normal)
    past = fmt.largest if fmt.saturates else torch.inf
    nearest = torch.where(magnitude >= fmt.overflow, past, nearest)
    return torch.where(bits > _INFINITE, x, nearest.copysign(x))


def round_within_range(x: Tensor, fmt: Format) -> Tensor:
    """Round to the nearest values of a format, ties to even, within its finite range; bit by bit
    as `rounded` of the clamped tensor, in a tenth of its time.

    Args:
        x: float32. Larger magnitudes and infinity become the format's largest value.
        fmt: of 8 bits or fewer: with wider ones the sum below overflows.

    Returns:
        float32, with signed zeros and NaN.
    """
    assert fmt.dtype.itemsize == 1, fmt.name
    x = x.clamp(-fmt.largest, fmt.largest)
    # Adding 1.5 times the power of two whose last place is the format's spacing at a value rounds
    # to that spacing, for either sign.
    coarse = power_of_two(x, fmt).mul_(1.5 * 2.0 ** (23 - fmt.mantissa))
    return x.add(coarse).sub_(coarse).copysign_(x)


def power_of_two(x: Tensor, fmt: Format) -> Tensor:
    """Return the power of two at or below each magnitude (float32), at least that of a format's
    least normal value, below which its spacing stays the same."""
    return (x.view(torch.int32) & _INFINITE).view(torch.float32).clamp_(min=fmt.normal)


def as_tf32(x: Tensor) -> Tensor:
    """The nearest values with 10 bits of mantissa, ties away from zero, as CUDA's conversion
    `cvt.rna.tf32.f32` rounds.

    Args:
        x: float32.

    Returns:
        float32, with infinities and NaN.
    """
    bits = x.view(torch.int32)
    nearest = ((bits + (1 << 12)) & -(1 << 13)).view(torch.float32)
    return torch.where(x.isfinite(), nearest, x)
