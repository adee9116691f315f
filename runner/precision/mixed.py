"""16-mixed and bf16-mixed: float32 weights, half-precision compute through torch.autocast.

float16 has a loss scale, because its range is smaller than float32's; bfloat16 needs none.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from runner.core import (
    ConfigError,
    LossScale,
    Precision,
    Unavailable,
    accelerators,
    fmt,
    refuse,
    tensor_facts,
)
from runner.precision import devices, options
from runner.precision.base import BasePrecision
from runner.precision.casting import find_kept_tensors
from runner.precision.dynamic_loss_scale import DynamicLossScale, check_loss_scale
from runner.precision.emulation.cpu_kernels import KernelChoice


@final
@dataclass(frozen=True, eq=False)
class MixedPrecision(BasePrecision):
    """An autocast forward over float32 parameters, with a loss scale for float16.

    Args:
        name: label of the run.
        dtype: float16 or bfloat16.
        loss_scale: keywords of DynamicLossScale, or null for none; float16 only.
        keep_fp32: patterns of modules that compute in float32.
        autocast_loss: compute the loss under autocast too, else outside it on float32 outputs.
        float32_matmul: precision of the float32 products that autocast leaves.
        cpu_float16: which kernels float16 takes on a CPU; see emulation.cpu_kernels.
        emulate: on a CPU, products as tensor cores compute them, with sums in float32, and casts
            as CUDA's autocast does them; bfloat16 on a GPU without its units, too. Its speed means
            nothing.
        allow_substitute: on a TPU, which has no float16, run as bf16-mixed and be recorded so.
        reduced_precision_reduction: products on CUDA may add their parts in half precision.

    Raises:
        ConfigError: a value that is not allowed.
    """

    name: str
    dtype: str
    loss_scale: Mapping[str, Any] | None = None
    keep_fp32: Sequence[str] = ()
    autocast_loss: bool = False
    float32_matmul: str = "highest"
    cpu_float16: KernelChoice = "auto"
    emulate: bool = False
    allow_substitute: bool = False
    reduced_precision_reduction: bool = False

    def __post_init__(self) -> None:
        self._derive(emulated=self.emulate, emulates_products=self.emulate)
        problems = options.choice_problems("dtype", self.dtype, ("float16", "bfloat16"))
        problems += self._product_problems()
        problems += options.switch_problems(allow_substitute=self.allow_substitute)
        refuse(problems)
        if self.loss_scale is not None:
            if self.dtype == "bfloat16":
                raise ConfigError(
                    f"precision.loss_scale={dict(self.loss_scale)}: precision={self.name} has "
                    "none, because bfloat16 has float32's range. Leave it out, or type "
                    "precision=16-mixed."
                )
            # Here, because the loss scale itself is made only when the run starts.
            check_loss_scale(dict(self.loss_scale))
        self._derive(compute=options.DTYPES[self.dtype])

    def substitute(self, device: torch.device) -> Precision:
        if not (
            self.allow_substitute and accelerators.is_tpu(device) and self.compute is torch.float16
        ):
            return self
        text = "runs as bf16-mixed, and is recorded so: a TPU has no float16."
        warnings.warn(f"precision={self.name} {text}", stacklevel=2)
        # With the name, so that results are recorded under the precision that ran.
        return replace(self, name="bf16-mixed", dtype="bfloat16", loss_scale=None)

    def require(self, device: torch.device) -> None:
        if (
            accelerators.is_tpu(device)
            and self.compute is torch.float16
            and not self.allow_substitute
        ):
            raise Unavailable(
                f"precision={self.name} cannot run on a TPU, whose half precision is bfloat16.",
                "Type precision=bf16-mixed, or precision.allow_substitute=true to have that run in "
                "its place.",
            )
        devices.require_emulated_products(self, device, "16-mixed")

    def _check_model(self, model: nn.Module) -> None:
        # Mixed precision means float32 weights. Half-precision gradients could not be unscaled,
        # either. What the model froze has none, and keeps its dtype.
        frozen, _ = find_kept_tensors(model, self.storage)
        half = [
            n for n, p in model.named_parameters() if tensor_facts.is_narrow(p) and n not in frozen
        ]
        if half:
            true_precision = "16-true" if self.compute is torch.float16 else "bf16-true"
            raise ConfigError(
                f"precision={self.name} trains float32 parameters, and the model holds half ones: "
                f"{fmt.first_names(half, 3)}. Build the model in float32, or type "
                f"precision={true_precision}."
            )

    def scale(self, device: torch.device) -> LossScale:
        if self.loss_scale is None:
            return LossScale()
        return DynamicLossScale(device, **self.loss_scale)
