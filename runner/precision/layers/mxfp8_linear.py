"""Linear layers whose three products torchao computes in MXFP8.

Each layer is a torch.nn.Linear or a Conv1D whose class was changed in place. This module imports
torchao.
"""

from functools import partial

from torch import Tensor
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import BLOCK_SIZE_DEFAULT
from torchao.quantization.quantize_.common import KernelPreference

from runner.precision.layers.backward_checks import forbid_second_derivative, pad_rows
from runner.precision.layers.conv1d import weight_matrix
from runner.precision.layers.quantized_linear import AutocastLinear


class Mxfp8Linear(AutocastLinear):
    """A linear layer with products in MXFP8; its parameters stay the same objects.

    Both operands of the forward and of both gradients are rounded anew to E4M3, with an E8M0 scale
    for each 32 numbers along the dimension that the product contracts over. A scale is the least
    power of two that is not below amax / 448 (torchao's RCEIL, and TransformerEngine's rounding;
    the OCP specification rounds down, FLOOR, so that the largest numbers saturate).

    torchao's own tensor subclass for weights, which quantize_ makes, leaves biases out.

    Attributes:
        kernels: EMULATED to round, scale back and multiply in the rows' dtype, on any device; or
            AUTO.
        wgrad_with_hp: the weight gradient is a product in the rows' dtype.

    Source: torchao 0.18, torchao/prototype/moe_training/mxfp8_linear.py.
    """

    kernels: KernelPreference
    wgrad_with_hp: bool

    def _product(self, rows: Tensor) -> Tensor:
        multiply = partial(
            _to_mxfp8_then_scaled_mm,
            # torchao multiplies operands of one dtype only.
            weight_hp=weight_matrix(self).to(rows.dtype).contiguous(),
            kernel_preference=self.kernels,
            scale_calculation_mode=ScaleCalculationMode.RCEIL,
            wgrad_with_hp=self.wgrad_with_hp,
        )
        # The weight gradient contracts over the rows.
        output = pad_rows(multiply, rows.contiguous(), BLOCK_SIZE_DEFAULT)
        return forbid_second_derivative(output)
