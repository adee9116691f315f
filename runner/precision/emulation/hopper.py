"""Add FP8 products as the tensor cores of NVIDIA's Hopper do: in 14 bits, truncated.

32 products are exact. They and the accumulator are shifted to the largest exponent among them, cut
off 13 bits below the leading one and added, and the sum is cut off to 13 bits of fraction. The
exponent of a product is the sum of its operands' exponents: that of 1.5 * 1.5 is 0.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.5.2, and Insights into DeepSeek-V3,
arXiv:2505.09343, section 3.1.1 (32 products, 13 bits of fraction, an accumulator of as many);
Khattak and Mikaitis, Accurate Models of NVIDIA Tensor Cores, arXiv:2512.07004 (the exponent of a
product). Bit by bit the results are those of an H100 and an H200 that are published with the last
paper, 5,000 for each of E4M3 and E5M2; all of them start from an accumulator of zero. That the
accumulator is shifted together with the products is measured on an L40S alone, which adds 16 at a
time.
"""

import torch
from torch import Tensor

GROUP = 32
"""Products that are added at once: the contracted elements of an FP8 instruction (wgmma)."""
FRACTION_BITS = 13
PROMOTION = 128
"""Elements after which partial sums are added to a float32 number where they are promoted."""
_FLOAT32_FRACTION_BITS = 23
_INFINITY_BITS = 0x7F800000
_MAX_PRODUCTS = 1 << 23  # of one temporary tensor: 32 MiB


def scaled_product(a: Tensor, b: Tensor, promotes: bool) -> Tensor:
    """Return the product of two scaled operands, a times b transposed, with Hopper's sums.

    Args:
        a: FP8 values and, in their places, the inverse scales, which are equal in each PROMOTION
            elements of a row: float32 [2, rows, contracted].
        b: float32 [2, columns, contracted], in the same form.
        promotes: whether every PROMOTION elements the sum is scaled and added to a float32 one.
            Without, the inverse scales have to be equal in a whole row.

    Returns:
        float32 [rows, columns].
    """
    rows, contracted = a.shape[1:]
    columns = b.shape[1]
    product = torch.zeros(rows, columns, dtype=torch.float32, device=a.device)
    interval = PROMOTION if promotes else max(contracted, 1)
    height = max(1, _MAX_PRODUCTS // max(1, columns * GROUP))
    for start in range(0, contracted, interval):
        part = slice(start, start + interval)
        inverse = b[1, :, start]
        for top in range(0, rows, height):
            band = slice(top, top + height)
            sums = _narrow_sums(a[0, band, part], b[0, :, part])
            product[band] += sums * a[1, band, start, None] * inverse
    return product


def _narrow_sums(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of FP8 products: float32 [rows, contracted], [columns, contracted] to
    float32 [rows, columns]."""
    sums = a.new_zeros(len(a), len(b))
    for first in range(0, a.shape[1], GROUP):
        left = a[:, None, first : first + GROUP]
        right = b[None, :, first : first + GROUP]
        largest = (_power_of_two(left) * _power_of_two(right)).amax(-1)
        largest = torch.maximum(largest, _power_of_two(sums))
        # Where all products are zero, any unit will do.
        unit = torch.where(largest > 0, largest * 2.0**-FRACTION_BITS, 1.0)
        # Whole numbers of fewer than 24 bits: float32 adds them exactly, in any order.
        units = (left * right / unit[..., None]).trunc_().sum(-1) + (sums / unit).trunc_()
        sums = _truncate(units * unit)
    return sums


def _power_of_two(x: Tensor) -> Tensor:
    """Return the power of two at or below each magnitude, 0 for 0: float32 of x's shape."""
    return (x.view(torch.int32) & _INFINITY_BITS).view(torch.float32)


def _truncate(x: Tensor) -> Tensor:
    """Return float32 values cut off to FRACTION_BITS bits of fraction."""
    dropped = _FLOAT32_FRACTION_BITS - FRACTION_BITS
    return (x.view(torch.int32) & -(1 << dropped)).view(torch.float32)
