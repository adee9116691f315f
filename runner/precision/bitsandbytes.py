"""bnb-*: bitsandbytes' 4-bit and 8-bit weights in the linear layers; the rest is not converted.

Packed weights are frozen, so they need an adapter to train; `bnb-int8-training` has float32 weights
that train, and products of int8 copies.
"""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, final

import torch
from torch import nn

from runner.precision.contract import ConversionReport
from runner.precision.conversion import ConversionRules, convert_linear
from runner.precision.converting import ConvertingPrecision
from runner.precision.emulation.float16 import KernelChoice
from runner.precision.emulation.formats import EIGHT_BITS_ROUNDOFF, FOUR_BITS_ROUNDOFF
from runner.precision.layers.conv1d import layer_widths
from runner.precision.options import (
    DTYPES,
    PrecisionOptions,
    native_half_prefix,
    require_bfloat16,
)
from runner.utils.errors import ConfigError, Unavailable
from runner.utils.tensors import unit_roundoff

MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@final
class BitsandbytesPrecision(ConvertingPrecision):
    """Quantised weights in every nn.Linear and Conv1D; the rest keeps its dtype, under autocast.

    Args:
        name: label of the run.
        mode: nf4, fp4 (4 bits, frozen), nf4-dq, fp4-dq (their scales in 8 bits, too), int8
            (frozen), int8-training (float32 weights that train, products on int8 copies).
        compute_dtype: bfloat16, float16 or float32; of the products. float64 is refused: the
            CPU's 4-bit kernels return garbage for it.
        ignore_modules: patterns of modules that are not converted.
        keep_fp32: patterns of modules that compute in float32 (and are not converted).
        threshold: int8 modes: columns of the inputs with a larger magnitude are
            multiplied in compute_dtype; 0 for none. LLM.int8() uses 6.
        autocast_loss: compute the loss under autocast, too.
        float32_matmul: precision of the float32 products that remain.
        cpu_float16: which kernels float16 takes on a CPU; see runner.precision.emulation.float16.
        reduced_precision_reduction: products on CUDA may add their parts in half precision.

    Raises:
        ConfigError: a value that is not allowed.
    """

    keeps_dtypes = True

    def __init__(  # noqa: PLR0913 - its parameters are the keys of the yaml
        self,
        name: str,
        mode: str,
        compute_dtype: str = "bfloat16",
        ignore_modules: Sequence[str] = (),
        keep_fp32: Sequence[str] = (),
        threshold: float = 0.0,
        autocast_loss: bool = False,
        float32_matmul: str = "highest",
        cpu_float16: KernelChoice = "auto",
        reduced_precision_reduction: bool = False,
    ) -> None:
        _check_values(name, mode, compute_dtype, threshold)
        self.options = PrecisionOptions(
            float32_matmul, cpu_float16, False, reduced_precision_reduction
        )
        self.name = name
        self.mode = mode
        self.threshold = threshold
        self.compute = DTYPES[compute_dtype]
        self.autocast_loss = autocast_loss
        self.ignore_modules = ignore_modules
        self.keep_fp32 = keep_fp32
        # In every other mode the packed weights are all that is stored.
        if mode != "int8-training":
            self.freezes = True
            self.layout = f"bnb-{mode}"

    def require(self, device: torch.device) -> None:
        # Compute capabilities of the library's kernels: Turing for int8, Pascal for 4 bits.
        min_capability = (7, 5) if self._is_int8 else (6, 0)
        wanted = ".".join(map(str, min_capability))
        if device.type not in ("cpu", "cuda"):
            raise Unavailable(
                f"precision={self.name} needs a CPU or an NVIDIA GPU of compute capability "
                f"{wanted} or higher; this run is on {device.type}.",
                "Type accelerator=cpu, or precision=bf16-true.",
            )
        try:
            library = import_module("runner.precision.layers.bnb_library")
        except ImportError as error:
            raise Unavailable(
                f"precision={self.name} needs bitsandbytes, which does not import: {error}.",
                'Type pip install "bitsandbytes>=0.50".',
            ) from error
        if not library.has_kernels():
            raise Unavailable(
                f"precision={self.name} needs bitsandbytes' own kernels, and its library for "
                f"{device.type} (CUDA {torch.version.cuda}) does not load.",
                "Type python -m bitsandbytes to see why, or precision=bf16-true.",
            )
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < min_capability:
            actual = ".".join(map(str, torch.cuda.get_device_capability(device)))
            raise Unavailable(
                f"precision={self.name} needs compute capability {wanted} or higher; "
                f"{device} ({torch.cuda.get_device_name(device)}) has {actual}.",
                f"Nearest that runs here: precision={native_half_prefix(device)}-true.",
            )
        if self.compute is torch.bfloat16:
            require_bfloat16(
                f"{self.name} precision.compute_dtype=bfloat16",
                device,
                "Type precision.compute_dtype=float16, or precision.compute_dtype=float32.",
            )

    def find_obstacle(self, module: nn.Module) -> str:
        return bnb_obstacle(module, int8=self._is_int8, frozen=self.freezes)

    def convert_layers(
        self, model: nn.Module, rules: ConversionRules, device: torch.device
    ) -> ConversionReport:
        return convert_linear(model, partial(self._convert_layer, device=device), rules)

    def _convert_layer(self, module: nn.Module, device: torch.device) -> None:
        # Imported here, because both modules import bitsandbytes, which may not be installed.
        from runner.precision.layers.linear_4bit import Linear4bit
        from runner.precision.layers.linear_8bit import Linear8bit, Linear8bitTrained

        module.to(device)
        if self.mode == "int8-training":
            Linear8bitTrained.convert_in_place(module, self.compute, self.threshold)
        elif self.mode == "int8":
            Linear8bit.convert_in_place(module, self.compute, self.threshold)
        else:
            quant_type, _, nested = self.mode.partition("-")
            Linear4bit.convert_in_place(module, quant_type, bool(nested), self.compute)

    @property
    def storage_format(self) -> str:
        if not self.freezes:
            return super().storage_format
        bits = "8" if self.mode == "int8" else "4"
        scales = ", 8-bit scales" if self.mode.endswith("-dq") else ""
        return f"{bits}-bit linear weights{scales}; the rest as built"

    @property
    def compute_format(self) -> str:
        if self._is_int8:
            return f"int8 in linear layers, {super().compute_format} elsewhere"
        return super().compute_format

    @property
    def sort_key(self) -> tuple[float, ...]:
        # After the FP8 precisions, 8 bits before 4.
        return (-1, 2) if self._is_int8 else (-0.5,)

    @property
    def operand_roundoffs(self) -> tuple[float, float]:
        if not self.freezes:
            return super().operand_roundoffs
        bits = EIGHT_BITS_ROUNDOFF if self._is_int8 else FOUR_BITS_ROUNDOFF
        return bits, unit_roundoff(self.compute)

    @property
    def _is_int8(self) -> bool:
        return self.mode.startswith("int8")


def bnb_obstacle(module: Any, int8: bool, frozen: bool) -> str:
    """Return why a linear layer cannot be packed; empty where it can."""
    # torch 2.11's int8 product is wrong for one input.
    if int8 and layer_widths(module)[0] == 1:
        return "has one input only"
    if module.weight.is_meta:
        return ""
    if not module.weight.isfinite().all():
        return "its weight is not finite"
    # torchvision's ViT initialises its head with zeros.
    if frozen and not module.weight.any():
        return "its weight is all zero, and frozen it would pass no gradient"
    return ""


def _check_values(name: str, mode: str, compute_dtype: str, threshold: float) -> None:
    """Raise ConfigError with every value that is not allowed."""
    problems = []
    if mode not in MODES:
        problems.append(f"precision.mode={mode} is not known. Allowed: {', '.join(MODES)}.")
    # A built-in name labels results, so it may not stand for another mode.
    elif name in [f"bnb-{other}" for other in MODES if other != mode]:
        problems.append(f"precision.mode={mode} is not what {name} is. Type precision=bnb-{mode}.")
    if compute_dtype not in COMPUTE_DTYPES:
        allowed = ", ".join(COMPUTE_DTYPES)
        problems.append(
            f"precision.compute_dtype={compute_dtype}: the kernels compute in {allowed} only. "
            "Type one of them."
        )
    if threshold < 0:
        problems.append(f"precision.threshold={threshold} is negative. Allowed: 0 (none) and up.")
    if threshold and not mode.startswith("int8"):
        problems.append(
            f"precision.threshold={threshold}: {mode} has none. Type precision=bnb-int8, or leave "
            "it out."
        )
    if problems:
        raise ConfigError(*problems)
