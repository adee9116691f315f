"""Choose how the operands of TransformerEngine's linear products are quantized, and sum FP8
products as the tensor cores of NVIDIA's Hopper do: in 14 bits, truncated.

Source: TransformerEngine 2.20; see quantizers for the scaling rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runner.precision.emulation.formats import E4M3, E5M2, INFINITY_BITS, Format
from runner.precision.emulation.quantizers import (
    BlockQuantizer,
    Nvfp4Quantizer,
    Quantizer,
    amax_scale,
    exponent_scale,
    power_of_two_scale,
)
from runner.precision.te_recipes import Accumulation, complete_recipe

GROUP = 32
"""Products that are added at once: the contracted elements of an FP8 instruction (wgmma)."""
FRACTION_BITS = 13
PROMOTION = 128
"""Elements after which partial sums are added to a float32 number where they are promoted."""
_FLOAT32_FRACTION_BITS = 23
_MAX_PRODUCTS = 1 << 23  # of one temporary tensor: 32 MiB


@dataclass(frozen=True)
class Operand:
    """The quantizers of a tensor [rows, columns] for its two products.

    Attributes:
        along_columns: for the product that contracts the columns.
        along_rows: for the product that contracts the rows, applied to the transposed tensor; None
            where that product takes the same quantized values.
    """

    along_columns: Quantizer
    along_rows: Quantizer | None = None

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values for each product, both float32 [rows, columns].

        Quantizers that keep the scales give both a first dimension of two.
        """
        for_columns = self.along_columns(x)
        if self.along_rows is None:
            return for_columns, for_columns
        return for_columns, self.along_rows(x.t()).mT


@dataclass(frozen=True)
class Operands:
    """The quantizers of a layer's products.

    Attributes:
        input: of [rows, in].
        weight: of [out, in].
        grad: of the output's gradient, [rows, out].
        backward: the recipe's key backward_override: None quantizes the backward's operands,
            "high_precision" takes the unquantized ones, "dequantized" those of the forward.
        narrow: whether products are summed as on Hopper; the quantizers then keep the scales.
        promotes_forward: whether a narrow forward promotes its sums, as the backward does.
    """

    input: Operand
    weight: Operand
    grad: Operand
    backward: str | None = None
    narrow: bool = False
    promotes_forward: bool = False

    def forward_product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a times b transposed, of quantized operands: float32 [rows, columns]."""
        return scaled_product(a, b, self.promotes_forward) if self.narrow else a @ b.mT

    def backward_product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a times b transposed, of the backward's operands: float32 [rows, columns]."""
        is_narrow = self.narrow and not self.backward
        return scaled_product(a, b, promotes=True) if is_narrow else a @ b.mT

    def values(self, operand: Tensor) -> Tensor:
        """Return the values of a quantized operand: float32 [rows, columns]."""
        return operand.prod(0) if self.narrow else operand


def quantizers_of_recipe(
    recipe: Mapping[str, Any], accumulate: Accumulation = "float32"
) -> Operands:
    """Return the quantizers of a recipe whose scales depend on the current tensors alone.

    Args:
        recipe: its kind (any but delayed) and its keys; omitted keys have their defaults.
        accumulate: how products are summed; "hopper" for the kinds current and block.
    """
    keys = complete_recipe(recipe)
    kind = keys["kind"]
    narrow = accumulate == "hopper"
    if kind == "nvfp4":
        quantizers = _nvfp4_operands(keys)
    elif kind == "current":
        # One scale for each tensor.
        rule = power_of_two_scale if keys["use_power_2_scales"] else amax_scale
        forward = Operand(BlockQuantizer(E4M3, rule, keeps_scales=narrow))
        grad = Operand(BlockQuantizer(grad_format(keys), rule, keeps_scales=narrow))
        quantizers = Operands(forward, forward, grad)
    elif kind == "mxfp8":
        quantizers = _mxfp8_operands(keys)
    else:
        quantizers = _block_operands(keys, narrow)
    return replace(quantizers, backward=keys["backward_override"], narrow=narrow)


def grad_format(keys: Mapping[str, Any]) -> Format:
    """Return a recipe's format of gradients: E5M2 has the range that they need, E4M3 the
    precision."""
    return E5M2 if keys.get("format") == "HYBRID" else E4M3


def _mxfp8_operands(keys: Mapping[str, Any]) -> Operands:
    """Return MXFP8: blocks of 32 values, or weights in blocks of 32 x 32."""
    line = BlockQuantizer(E4M3, exponent_scale, (1, 32))
    return Operands(
        _block_operand(line, 1),
        _block_operand(line, 2 if keys["enable_2d_quantization"] else 1),
        _block_operand(replace(line, fmt=grad_format(keys)), 1),
    )


def _block_operands(keys: Mapping[str, Any], narrow: bool) -> Operands:
    """Return block scaling: blocks of 128 values or of 128 x 128.

    Each block has its own scale, so that narrow sums are promoted after every block.
    """
    rule = amax_scale if keys["use_f32_scales"] else power_of_two_scale
    line = BlockQuantizer(E4M3, rule, (1, 128), narrow)
    grad = replace(line, fmt=grad_format(keys))
    return Operands(
        _block_operand(line, keys["x_block_scaling_dim"]),
        _block_operand(line, keys["w_block_scaling_dim"]),
        _block_operand(grad, keys["grad_block_scaling_dim"]),
        promotes_forward=True,
    )


def _block_operand(line: BlockQuantizer, dimensions: int) -> Operand:
    """Return the quantizers of a tensor in lines along what is contracted, or in square blocks."""
    assert line.shape is not None
    edge = line.shape[1]
    if dimensions == 2:
        return Operand(replace(line, shape=(edge, edge)))
    return Operand(line, line)


def _nvfp4_operands(keys: Mapping[str, Any]) -> Operands:
    """Return NVFP4: lines of 16 values, or weights in blocks of 16 x 16.

    The Hadamard transform is for the weight's gradient, whose product contracts the rows of the
    input and of the output's gradient; only gradients are rounded stochastically.
    """
    rotates = not keys["disable_rht"]
    line = Nvfp4Quantizer()
    if keys["disable_2d_quantization"]:
        weight = Operand(line, line)
    else:
        weight = Operand(Nvfp4Quantizer((16, 16)))
    grad = Nvfp4Quantizer(stochastic=not keys["disable_stochastic_rounding"])
    return Operands(
        Operand(line, replace(line, rotates=rotates)),
        weight,
        Operand(grad, replace(grad, rotates=rotates)),
    )


def scaled_product(a: Tensor, b: Tensor, promotes: bool) -> Tensor:
    """Return the product of two scaled operands, a times b transposed, with Hopper's sums.

    32 products are exact. They and the accumulator are shifted to the largest exponent among
    them, cut off 13 bits below the leading one and added, and the sum is cut off to 13 bits of
    fraction. The exponent of a product is the sum of its operands' exponents: that of 1.5 * 1.5
    is 0.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.5.2, and Insights into DeepSeek-V3,
    arXiv:2505.09343, section 3.1.1 (32 products, 13 bits of fraction, an accumulator of as
    many); Khattak and Mikaitis, Accurate Models of NVIDIA Tensor Cores, arXiv:2512.07004 (the
    exponent of a product). Bit by bit the results are those of an H100 and an H200 that are
    published with the last paper, 5,000 for each of E4M3 and E5M2; all of them start from an
    accumulator of zero. That the accumulator is shifted together with the products is measured
    on an L40S alone, which adds 16 at a time.

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
    return (x.view(torch.int32) & INFINITY_BITS).view(torch.float32)


def _truncate(x: Tensor) -> Tensor:
    """Return float32 values cut off to FRACTION_BITS bits of fraction."""
    dropped = _FLOAT32_FRACTION_BITS - FRACTION_BITS
    return (x.view(torch.int32) & -(1 << dropped)).view(torch.float32)
