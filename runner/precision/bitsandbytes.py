"""bnb-*: bitsandbytes' 4-bit and 8-bit weights in the linear layers; the rest is not converted.

Packed weights are frozen, so they need an adapter to train; `bnb-int8-training` has float32 weights
that train, and products of int8 copies.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

import torch
from torch import nn

from runner.core import Unavailable, refuse, tensor_facts
from runner.precision import devices, options
from runner.precision.base import ConvertingPrecision
from runner.precision.conversion import change_class
from runner.precision.emulation.cpu_kernels import KernelChoice
from runner.precision.emulation.formats import EIGHT_BITS_ROUNDOFF, FOUR_BITS_ROUNDOFF
from runner.precision.layers.conv1d import layer_widths

MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@final
@dataclass(frozen=True, eq=False)
class BitsandbytesPrecision(ConvertingPrecision):
    """Quantised weights in every nn.Linear and Conv1D; the rest keeps its dtype, under autocast.

    Args beside those of ConvertingPrecision:
        mode: nf4, fp4 (4 bits, frozen), nf4-dq, fp4-dq (their scales in 8 bits, too), int8
            (frozen), int8-training (float32 weights that train, products on int8 copies).
        compute_dtype: bfloat16, float16 or float32; of the products. float64 is refused: the
            CPU's 4-bit kernels return garbage for it.
        threshold: int8 modes: columns of the inputs with a larger magnitude are
            multiplied in compute_dtype; 0 for none. LLM.int8() uses 6.
        float32_matmul: precision of the float32 products that remain.
        cpu_float16: which kernels float16 takes on a CPU; see emulation.cpu_kernels.

    Raises:
        ConfigError: a value that is not allowed.
    """

    keeps_dtypes = True
    # After the FP8 precisions, 8 bits before 4.
    sort_key = (-0.5,)  # type: ignore[assignment]

    mode: str
    compute_dtype: str = "bfloat16"
    threshold: float = 0.0
    float32_matmul: str = "highest"
    cpu_float16: KernelChoice = "auto"

    def __post_init__(self) -> None:
        problems = options.choice_problems("mode", self.mode, MODES)
        built_in = {mode: f"bnb-{mode}" for mode in MODES}
        problems += options.name_problems(self.name, "mode", self.mode, built_in)
        problems += options.choice_problems("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        if self.threshold < 0:
            problems.append(
                f"precision.threshold={self.threshold} is negative. Allowed: 0 (none) and up."
            )
        if self.threshold and not self._is_int8:
            problems.append(
                f"precision.threshold={self.threshold}: {self.mode} has none. Type "
                "precision=bnb-int8, or leave it out."
            )
        refuse(problems + self._product_problems())
        self._derive(compute=options.DTYPES[self.compute_dtype])
        # In every other mode the packed weights are all that is stored.
        if self.mode != "int8-training":
            bits = EIGHT_BITS_ROUNDOFF if self._is_int8 else FOUR_BITS_ROUNDOFF
            roundoffs = (bits, tensor_facts.unit_roundoff(self.compute))
            self._derive(freezes=True, layout=f"bnb-{self.mode}", operand_roundoffs=roundoffs)
        if self._is_int8:
            self._derive(layers_compute_in="int8", sort_key=(-1, 2))

    def require(self, device: torch.device) -> None:
        # Compute capabilities of the library's kernels: Turing for int8, Pascal for 4 bits.
        min_capability = (7, 5) if self._is_int8 else (6, 0)
        if device.type not in ("cpu", "cuda"):
            raise Unavailable(
                f"precision={self.name} needs a CPU or an NVIDIA GPU of compute capability "
                f"{devices.dotted(min_capability)} or higher; this run is on {device.type}.",
                "Type accelerator=cpu, or precision=bf16-true.",
            )
        try:
            library = import_module("runner.precision.layers.bnb_linear").bnb.cextension.lib
        except ImportError as error:
            raise Unavailable(
                f"precision={self.name} needs bitsandbytes, which does not import: {error}.",
                'Type pip install "bitsandbytes>=0.50".',
            ) from error
        # Without its compiled part, every call of the library raises.
        if "Mock" in type(library).__name__:
            raise Unavailable(
                f"precision={self.name} needs bitsandbytes' own kernels, and its library for "
                f"{device.type} (CUDA {torch.version.cuda}) does not load.",
                "Type python -m bitsandbytes to see why, or precision=bf16-true.",
            )
        if device.type == "cuda":
            nearest = f"{devices.native_half_prefix(device)}-true"
            remedy = f"Nearest that runs here: precision={nearest}."
            devices.require_capability(self.name, device, min_capability, remedy)
        if self.compute is torch.bfloat16:
            setting = f"{self.name} precision.compute_dtype=bfloat16"
            remedy = "Type precision.compute_dtype=float16, or precision.compute_dtype=float32."
            devices.require_bfloat16(setting, device, remedy)

    def find_obstacle(self, module: nn.Module) -> str:
        # torch 2.11's int8 product is wrong for one input.
        if self._is_int8 and layer_widths(module)[0] == 1:
            return "has one input only"
        weight: Any = module.weight
        if weight.is_meta:
            return ""
        if not weight.isfinite().all():
            return "its weight is not finite"
        # torchvision's ViT initialises its head with zeros.
        if self.freezes and not weight.any():
            return "its weight is all zero, and frozen it would pass no gradient"
        return ""

    def convert_layer(self, module: nn.Module, device: torch.device) -> None:
        # Imported here, because it imports bitsandbytes, which may not be installed.
        from runner.precision.layers.bnb_linear import Linear4bit, Linear8bit, Linear8bitTrained

        module.to(device)
        attributes = {"compute_dtype": self.compute, "threshold": self.threshold}
        if self.mode == "int8-training":
            change_class(module, Linear8bitTrained, **attributes)
        elif self.mode == "int8":
            Linear8bit.convert_in_place(module, **attributes)
        else:
            quant_type, _, nested = self.mode.partition("-")
            Linear4bit.convert_in_place(module, (quant_type, bool(nested)), self.compute)

    @property
    def storage_format(self) -> str:
        if not self.freezes:
            return super().storage_format
        bits = "8" if self.mode == "int8" else "4"
        scales = ", 8-bit scales" if self.mode.endswith("-dq") else ""
        return f"{bits}-bit linear weights{scales}; the rest as built"

    @property
    def _is_int8(self) -> bool:
        return self.mode.startswith("int8")
