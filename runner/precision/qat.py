"""qat-*: quantisation-aware training, for the weights that int4, int8 and nvfp4 pack.

Linear layers round their weights (and, but for int4, their inputs) in every forward to the values
that the packed layers compute with. Weights are stored and trained in float32.
"""

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import nn

from runner.precision.contract import ConversionReport
from runner.precision.conversion import ConversionRules, convert_linear
from runner.precision.converting import ConvertingPrecision
from runner.precision.emulation.formats import EIGHT_BITS_ROUNDOFF, FOUR_BITS_ROUNDOFF
from runner.precision.layers.quantized_linear import FakeQuantizedLinear
from runner.precision.layers.weight_formats import weight_format
from runner.precision.options import DTYPES, PrecisionOptions
from runner.precision.quantized import (
    check_format_values,
    format_sort_key,
    require_format,
    width_obstacle,
)
from runner.utils.tensors import unit_roundoff


@final
class QatPrecision(ConvertingPrecision):
    """Fake quantisation in every nn.Linear and Conv1D that `quantized` would pack.

    Args:
        name: label of the run.
        format: int4 (weights only), int8 or nvfp4 (weights and inputs); the precision of the same
            name packs them.
        group_size: int4's weights that share a scale.
        compute_dtype: float32, or bfloat16 by autocast; of the products of the rounded values, and
            of the rest of the model.
        ignore_modules: patterns of modules that are not converted.
        keep_fp32: patterns of modules that compute in float32 (and are not converted).
        autocast_loss: compute the loss under autocast, too.
        float32_matmul: precision of float32 products.
        reduced_precision_reduction: products on CUDA may add their parts in half precision.

    Raises:
        ConfigError: a value that is not allowed.

    Source: Jacob et al., arXiv:1712.05877; torchao.quantization.qat.
    """

    # Packed layers cannot share a weight, so what would not be packed is not rounded.
    skips_shared = True

    def __init__(  # noqa: PLR0913 - its parameters are the keys of the yaml
        self,
        name: str,
        format: str,
        group_size: int = 32,
        compute_dtype: str = "float32",
        ignore_modules: Sequence[str] = (),
        keep_fp32: Sequence[str] = (),
        autocast_loss: bool = False,
        float32_matmul: str = "highest",
        reduced_precision_reduction: bool = False,
    ) -> None:
        check_format_values("qat-", name, format, group_size, compute_dtype)
        self.options = PrecisionOptions(
            float32_matmul, reduced_precision_reduction=reduced_precision_reduction
        )
        self.name = name
        self.trains_for = format
        self.format = weight_format(format, group_size)
        self.compute = DTYPES[compute_dtype]
        self.emulated = format == "nvfp4"
        self.ignore_modules = ignore_modules
        self.keep_fp32 = keep_fp32
        self.autocast_loss = autocast_loss

    def require(self, device: torch.device) -> None:
        require_format(self.name, self.trains_for, device, self.compute)

    def find_obstacle(self, module: nn.Module) -> str:
        return width_obstacle(module, self.format)

    def convert_layers(
        self, model: nn.Module, rules: ConversionRules, device: torch.device
    ) -> ConversionReport:
        convert_layer = partial(FakeQuantizedLinear.convert_in_place, fmt=self.format)
        return convert_linear(model, convert_layer, rules)

    @property
    def compute_format(self) -> str:
        rounded = "weights" if self.trains_for == "int4" else "weights and inputs"
        base = super().compute_format
        return f"{base}, in linear layers on {rounded} rounded to {self.trains_for}"

    @property
    def sort_key(self) -> tuple[float, ...]:
        return format_sort_key(self.trains_for)

    @property
    def operand_roundoffs(self) -> tuple[float, float]:
        if self.trains_for == "int8":
            return EIGHT_BITS_ROUNDOFF, unit_roundoff(self.compute)
        return FOUR_BITS_ROUNDOFF, FOUR_BITS_ROUNDOFF

    @property
    def wider_precision(self) -> str:
        return "32-true"
