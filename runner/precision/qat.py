"""qat-*: quantisation-aware training, for the weights that int4, int8 and nvfp4 pack.

Linear layers round their weights (and, but for int4, their inputs) in every forward to the values
that the packed layers compute with. Weights are stored and trained in float32.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from runner.precision.conversion import change_class
from runner.precision.emulation.formats import FOUR_BITS_ROUNDOFF
from runner.precision.layers.quantized_linear import FakeQuantizedLinear
from runner.precision.quantized import WeightFormatPrecision


@final
@dataclass(frozen=True, eq=False)
class QatPrecision(WeightFormatPrecision):
    """Fake quantisation in every nn.Linear and Conv1D that `quantized` would pack.

    The precision named like the format packs the weights. Args are those of WeightFormatPrecision.

    Source: Jacob et al., arXiv:1712.05877; torchao.quantization.qat.
    """

    prefix = "qat-"
    # Packed layers cannot share a weight, so what would not be packed is not rounded.
    skips_shared = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._derive(trains_for=self.format)
        if self.format != "int8":
            self._derive(operand_roundoffs=(FOUR_BITS_ROUNDOFF, FOUR_BITS_ROUNDOFF))

    def convert_layer(self, module: nn.Module, device: torch.device) -> None:
        self.weight_format.load_library()
        change_class(module, FakeQuantizedLinear, format=self.weight_format)

    @property
    def compute_format(self) -> str:
        base = super().compute_format
        return f"{base}, in linear layers on {self.rounded_operands} rounded to {self.format}"
