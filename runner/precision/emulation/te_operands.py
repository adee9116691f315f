"""Choose how the operands of TransformerEngine's linear products are quantized and summed.

Source: TransformerEngine 2.20; see quantizers for the scaling rules, hopper for narrow sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from runner.precision.emulation.formats import E4M3, E5M2, Format
from runner.precision.emulation.hopper import scaled_product
from runner.precision.emulation.quantizers import (
    BlockQuantizer,
    Nvfp4Quantizer,
    Quantizer,
    amax_scale,
    exponent_scale,
    power_of_two_scale,
)
from runner.precision.te_recipes import Accumulation, complete_recipe


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
        quantizers = _tensor_operands(keys, narrow)
    elif kind == "mxfp8":
        quantizers = _mxfp8_operands(keys)
    else:
        quantizers = _block_operands(keys, narrow)
    return replace(quantizers, backward=keys["backward_override"], narrow=narrow)


def grad_format(keys: Mapping[str, Any]) -> Format:
    """Return a recipe's format of gradients: E5M2 has the range that they need, E4M3 the
    precision."""
    return E5M2 if keys.get("format") == "HYBRID" else E4M3


def _tensor_operands(keys: Mapping[str, Any], narrow: bool) -> Operands:
    """Return current scaling: one scale for each tensor."""
    rule = power_of_two_scale if keys["use_power_2_scales"] else amax_scale
    forward = Operand(BlockQuantizer(E4M3, rule, keeps_scales=narrow))
    grad = Operand(BlockQuantizer(grad_format(keys), rule, keeps_scales=narrow))
    return Operands(forward, forward, grad)


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
