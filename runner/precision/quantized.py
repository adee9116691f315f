"""int4, int8 and nvfp4: packed weights in the linear layers, for evaluation.

Plain weights are packed when the model is converted (post-training quantisation). The precisions
qat-* train weights for it.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import nn

from runner.precision.contract import ConversionReport
from runner.precision.conversion import ConversionRules, convert_linear
from runner.precision.converting import ConvertingPrecision
from runner.precision.emulation.formats import EIGHT_BITS_ROUNDOFF, FOUR_BITS_ROUNDOFF
from runner.precision.layers.conv1d import layer_widths
from runner.precision.layers.quantized_linear import QuantizedLinear
from runner.precision.layers.weight_formats import FORMAT_NAMES, WeightFormat, weight_format
from runner.precision.options import DTYPES, PrecisionOptions, require_bfloat16
from runner.utils.errors import ConfigError, Unavailable
from runner.utils.tensors import unit_roundoff

COMPUTE_DTYPES = ("float32", "bfloat16")


@final
class QuantizedPrecision(ConvertingPrecision):
    """Packed weights in every nn.Linear and Conv1D; the rest keeps its dtype.

    Args:
        name: label of the run.
        format: int4 (weights only), int8 (inputs, too: integer products) or nvfp4 (inputs, too).
        group_size: int4's weights that share a scale.
        compute_dtype: float32, or bfloat16 by autocast; of the rest of the model, and of the
            products of int4 and nvfp4, whose weights are unpacked for each.
        ignore_modules: patterns of modules that are not converted.
        keep_fp32: patterns of modules that compute in float32 (and are not converted).
        autocast_loss: compute the loss under autocast, too.
        float32_matmul: precision of float32 products.
        reduced_precision_reduction: products on CUDA may add their parts in half precision.

    Raises:
        ConfigError: a value that is not allowed.
    """

    freezes = True
    keeps_dtypes = True

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
        check_format_values("", name, format, group_size, compute_dtype)
        self.options = PrecisionOptions(
            float32_matmul, reduced_precision_reduction=reduced_precision_reduction
        )
        self.name = name
        self.format = weight_format(format, group_size)
        self.format_name = format
        self.compute = DTYPES[compute_dtype]
        self.ignore_modules = ignore_modules
        self.keep_fp32 = keep_fp32
        self.autocast_loss = autocast_loss
        self.emulated = format == "nvfp4"
        self.trained_in = f"qat-{format}"
        self.layout = self.format.label

    def require(self, device: torch.device) -> None:
        require_format(self.name, self.format_name, device, self.compute)

    def find_obstacle(self, module: nn.Module) -> str:
        return _packing_obstacle(module, self.format)

    def convert_layers(
        self, model: nn.Module, rules: ConversionRules, device: torch.device
    ) -> ConversionReport:
        def pack(module: nn.Module) -> None:
            module.to(device)
            QuantizedLinear.convert_in_place(module, self.format)

        return convert_linear(model, pack, rules)

    @property
    def storage_format(self) -> str:
        return f"{self.format_name} linear weights; the rest as built"

    @property
    def compute_format(self) -> str:
        base = super().compute_format
        if self.format_name == "int8":
            return f"int8 in linear layers, {base} elsewhere"
        rounded = "weights" if self.format_name == "int4" else "weights and inputs"
        return f"{base}, in linear layers on {self.format_name} {rounded}"

    @property
    def sort_key(self) -> tuple[float, ...]:
        return format_sort_key(self.format_name)

    @property
    def operand_roundoffs(self) -> tuple[float, float]:
        bits = EIGHT_BITS_ROUNDOFF if self.format_name == "int8" else FOUR_BITS_ROUNDOFF
        return bits, unit_roundoff(self.compute)

    @property
    def wider_precision(self) -> str:
        return "32-true"


def width_obstacle(module: nn.Module, fmt: WeightFormat) -> str:
    """Return why a format cannot hold a linear layer of these widths; empty where it can."""
    into, _ = layer_widths(module)
    # torch 2.11's int8 product is wrong for one input.
    if into == 1:
        return "has one input only"
    if into % fmt.multiple:
        return f"its input width {into} is not a multiple of {fmt.group}"
    return ""


def _packing_obstacle(module: Any, fmt: WeightFormat) -> str:
    """Return why a format cannot pack a linear layer's weight; empty where it can."""
    if not module.weight.is_meta and not module.weight.isfinite().all():
        return "its weight is not finite"
    return width_obstacle(module, fmt)


def format_sort_key(name: str) -> tuple[float, ...]:
    """Return Precision.sort_key: after the FP8 precisions and bitsandbytes', 8 bits before 4."""
    return (-1, 3) if name == "int8" else (-0.5, 1)


def require_format(name: str, format_name: str, device: torch.device, compute: torch.dtype) -> None:
    """Raise Unavailable where a format's layers cannot run on a device.

    Args:
        name: of the precision, for messages.
        format_name: one of FORMAT_NAMES.
        device: of the run.
        compute: dtype of the products.
    """
    if device.type not in ("cpu", "cuda"):
        raise Unavailable(
            f"precision={name} needs a CPU or an NVIDIA GPU; this run is on {device.type}.",
            "Type accelerator=cpu, or precision=bf16-true.",
        )
    if format_name != "nvfp4" and find_spec("torchao") is None:
        raise Unavailable(
            f"precision={name} needs the package torchao.", "Type pip install torchao."
        )
    if compute is torch.bfloat16:
        require_bfloat16(
            f"{name} precision.compute_dtype=bfloat16",
            device,
            "Type precision.compute_dtype=float32.",
        )


def check_format_values(
    prefix: str, name: str, format_name: str, group_size: object, compute_dtype: str
) -> None:
    """Raise ConfigError with every value that is not allowed.

    Args:
        prefix: of the built-in names, before the format.
        name: of the precision.
        format_name: value of precision.format.
        group_size: value of precision.group_size.
        compute_dtype: value of precision.compute_dtype.
    """
    problems = []
    if format_name not in FORMAT_NAMES:
        allowed = ", ".join(FORMAT_NAMES)
        problems.append(f"precision.format={format_name} is not known. Allowed: {allowed}.")
    # A built-in name labels results, so it may not stand for another format.
    elif name in [f"{prefix}{other}" for other in FORMAT_NAMES if other != format_name]:
        problems.append(
            f"precision.format={format_name} is not what {name} is. "
            f"Type precision={prefix}{format_name}."
        )
    # By its type, because a bool is an int to isinstance.
    if type(group_size) is not int or group_size < 2 or group_size % 2:
        problems.append(f"precision.group_size={group_size} must be an even number from 2.")
    if compute_dtype not in COMPUTE_DTYPES:
        allowed = ", ".join(COMPUTE_DTYPES)
        problems.append(
            f"precision.compute_dtype={compute_dtype} is not known. Allowed: {allowed}."
        )
    if problems:
        raise ConfigError(*problems)
