"""Linear layers whose three products torchao computes in MXFP8.

Each layer is a torch.nn.Linear or a Conv1D whose class was changed in place. This module imports
torchao.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import BLOCK_SIZE_DEFAULT
from torchao.quantization.quantize_.common import KernelPreference

from runner.precision.casting import autocast_input
from runner.precision.layers.backward_checks import forbid_second_derivative, pad_rows
from runner.precision.layers.conv1d import weight_matrix


@dataclass(frozen=True)
class Mxfp8Product:
    """torchao's product in MXFP8 of rows and a weight, with its gradients.

    Both operands of the forward and of both gradients are rounded anew to E4M3, with an E8M0 scale
    for each 32 numbers along the dimension that the product contracts over. A scale is the least
    power of two that is not below amax / 448 (torchao's RCEIL, and TransformerEngine's rounding;
    the OCP specification rounds down, FLOOR, so that the largest numbers saturate).

    Attributes:
        emulate: round, scale back and multiply in the rows' dtype, on any device.
        wgrad_with_hp: the weight gradient is a product in the rows' dtype.

    Source: torchao 0.18, torchao/prototype/moe_training/mxfp8_linear.py.
    """

    emulate: bool
    wgrad_with_hp: bool

    def __call__(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the product of any number of rows and a weight.

        Args:
            rows: bfloat16, or emulated float32, [..., in]; `in` is a multiple of 32.
            weight: any floating dtype, [out, in]; `out` is a multiple of 32. It is cast to the
                rows' dtype first, because torchao multiplies operands of one dtype only.

        Returns:
            [..., out] in the rows' dtype.
        """
        kernels = KernelPreference.EMULATED if self.emulate else KernelPreference.AUTO
        multiply = partial(
            _to_mxfp8_then_scaled_mm,
            weight_hp=weight.to(rows.dtype).contiguous(),
            kernel_preference=kernels,
            scale_calculation_mode=ScaleCalculationMode.RCEIL,
            wgrad_with_hp=self.wgrad_with_hp,
        )
        # The weight gradient contracts over the rows.
        return pad_rows(multiply, rows.contiguous(), BLOCK_SIZE_DEFAULT)


class Mxfp8Linear(nn.Linear):
    """A linear layer with products in MXFP8; its parameters stay the same objects.

    torchao's own tensor subclass for weights, which quantize_ makes, leaves biases out.
    """

    product: Mxfp8Product

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype, or autocast's, [..., out]."""
        rows = autocast_input(input)
        with torch.autocast(input.device.type, enabled=False):
            output = self.product(rows, weight_matrix(self))
            if self.bias is not None:
                output = output + self.bias.to(output.dtype)
            return forbid_second_derivative(output)
