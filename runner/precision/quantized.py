"""int4, int8 and nvfp4: packed weights in the linear layers, for evaluation.

Plain weights are packed when the model is converted (post-training quantisation). The precisions
qat-* train weights for it.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import nn

from runner.core import Unavailable, refuse, tensor_facts
from runner.precision import devices, options
from runner.precision.base import ConvertingPrecision
from runner.precision.emulation.formats import EIGHT_BITS_ROUNDOFF, FOUR_BITS_ROUNDOFF
from runner.precision.layers.conv1d import layer_widths
from runner.precision.layers.quantized_linear import (
    FORMAT_NAMES,
    QuantizedLinear,
    WeightFormat,
    weight_format,
)

COMPUTE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, eq=False)
class WeightFormatPrecision(ConvertingPrecision):
    """A precision of int4, int8 and nvfp4 weights; a subclass packs them, or rounds them.

    Args beside those of ConvertingPrecision:
        format: int4 (weights only), int8 or nvfp4 (weights and inputs).
        group_size: int4's weights that share a scale.
        compute_dtype: float32, or bfloat16 by autocast; of the rest of the model, and of products
            of floating numbers.
        float32_matmul: precision of float32 products.

    Attributes:
        prefix: of the built-in names, before the format.

    Raises:
        ConfigError: a value that is not allowed.
    """

    format: str
    group_size: int = 32
    compute_dtype: str = "float32"
    float32_matmul: str = "highest"
    weight_format: WeightFormat = field(init=False)
    prefix: ClassVar[str] = ""
    # After the FP8 precisions and bitsandbytes', 8 bits before 4.
    sort_key = (-0.5, 1)  # type: ignore[assignment]
    wider_precision = "32-true"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        built_in = {each: f"{self.prefix}{each}" for each in FORMAT_NAMES}
        problems = options.choice_problems("format", self.format, FORMAT_NAMES)
        problems += options.name_problems(self.name, "format", self.format, built_in)
        size = self.group_size
        # By its type, because a bool is an int to isinstance.
        if type(size) is not int or size < 2 or size % 2:
            problems.append(f"precision.group_size={size} must be an even number from 2.")
        problems += options.choice_problems("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        refuse(problems + self._product_problems())
        compute = options.DTYPES[self.compute_dtype]
        bits = EIGHT_BITS_ROUNDOFF if self.format == "int8" else FOUR_BITS_ROUNDOFF
        self._derive(
            weight_format=weight_format(self.format, self.group_size),
            compute=compute,
            operand_roundoffs=(bits, tensor_facts.unit_roundoff(compute)),
            emulated=self.format == "nvfp4",
        )
        if self.format == "int8":
            self._derive(sort_key=(-1, 3))

    def require(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise Unavailable(
                f"precision={self.name} needs a CPU or an NVIDIA GPU; this run is on "
                f"{device.type}.",
                "Type accelerator=cpu, or precision=bf16-true.",
            )
        if self.format != "nvfp4":
            devices.require_torchao(self.name)
        if self.compute is torch.bfloat16:
            setting = f"{self.name} precision.compute_dtype=bfloat16"
            devices.require_bfloat16(setting, device, "Type precision.compute_dtype=float32.")

    def find_obstacle(self, module: nn.Module) -> str:
        into, _ = layer_widths(module)
        # torch 2.11's int8 product is wrong for one input.
        if into == 1:
            return "has one input only"
        if into % self.weight_format.multiple:
            return f"its input width {into} is not a multiple of {self.weight_format.group}"
        return ""

    @property
    def rounded_operands(self) -> str:
        """Return what of a layer's product is in the format, as a phrase."""
        return "weights" if self.format == "int4" else "weights and inputs"


@final
@dataclass(frozen=True, eq=False)
class QuantizedPrecision(WeightFormatPrecision):
    """Packed weights in every nn.Linear and Conv1D; the rest keeps its dtype.

    The products of int8 are of integers; int4 and nvfp4 weights are unpacked for each product. Args
    are those of WeightFormatPrecision.
    """

    freezes = True
    keeps_dtypes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._derive(layout=self.weight_format.label, trained_in=f"qat-{self.format}")
        if self.format == "int8":
            self._derive(layers_compute_in="int8")

    def find_obstacle(self, module: nn.Module) -> str:
        weight: Any = module.weight
        if not weight.is_meta and not weight.isfinite().all():
            return "its weight is not finite"
        return super().find_obstacle(module)

    def convert_layer(self, module: nn.Module, device: torch.device) -> None:
        module.to(device)
        QuantizedLinear.convert_in_place(module, format=self.weight_format)

    @property
    def storage_format(self) -> str:
        return f"{self.format} linear weights; the rest as built"

    @property
    def compute_format(self) -> str:
        base = super().compute_format
        if self.format == "int8":
            return base
        return f"{base}, in linear layers on {self.format} {self.rounded_operands}"
