"""64-true, 32-true, tf32, 16-true, bf16-true: everything in one floating dtype.

tf32 stores float32 and differs from 32-true in its products, which have a 10-bit mantissa.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from runner.core import ConfigError, Unavailable, accelerators, refuse
from runner.precision import devices, options
from runner.precision.base import BasePrecision
from runner.precision.emulation.cpu_kernels import KernelChoice
from runner.precision.optimizer_eps import check_eps
from runner.precision.weight_updates import UpdateRule, check_update


@final
@dataclass(frozen=True, eq=False)
class TruePrecision(BasePrecision):
    """Parameters, gradients, optimizer state, inputs and compute in one dtype.

    Args:
        name: label of the run.
        dtype: float64, float32, float16 or bfloat16.
        float32_matmul: torch.set_float32_matmul_precision for the run; anything but `highest`
            lets float32 products run in TF32 (10-bit mantissa), convolutions too.
        keep_fp32: patterns of modules that stay in float32.
        autocast_loss: compute the loss in the dtype as well, else in float32 (64-true: float64).
        cpu_float16: which kernels float16 takes on a CPU; see emulation.cpu_kernels.
        emulate: on a CPU, products as tensor cores compute them: operands in half precision or
            TF32, sums in float32; bfloat16 on a GPU without its units, too. Its speed means
            nothing.
        reduced_precision_reduction: half-precision products on CUDA may add their parts in half
            precision.
        update: how a step is added to weights of 16 bits, see runner.precision.weight_updates.

    Raises:
        ConfigError: a value that is not allowed.
    """

    name: str
    dtype: str
    float32_matmul: str = "highest"
    keep_fp32: Sequence[str] = ()
    autocast_loss: bool = False
    cpu_float16: KernelChoice = "auto"
    emulate: bool = False
    reduced_precision_reduction: bool = False
    update: UpdateRule = "nearest"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._derive(emulated=self.emulate, emulates_products=self.emulate)
        problems = options.choice_problems("dtype", self.dtype, options.DTYPES)
        refuse(problems + self._product_problems())
        dtype = options.DTYPES[self.dtype]
        self._derive(storage=dtype, compute=dtype)
        check_update(self.name, self.update, dtype)
        if self.storage.itemsize > 2:
            if self.emulate and not self._is_tf32:
                raise ConfigError(
                    f"precision.emulate=true: precision={self.name} runs everywhere as it is."
                )
            if self.reduced_precision_reduction:
                raise ConfigError(
                    f"precision.reduced_precision_reduction=true: precision={self.name} has no "
                    "products in half precision. Leave it out."
                )

    def require(self, device: torch.device) -> None:
        if self.storage is torch.float64 and (device.type == "mps" or accelerators.is_tpu(device)):
            kind = "a TPU" if accelerators.is_tpu(device) else "an Apple GPU (mps)"
            raise Unavailable(
                f"precision={self.name} cannot run on {kind}, which has no float64 units.",
                "Type accelerator=cpu, or precision=32-true.",
            )
        if self.storage is torch.float16 and accelerators.is_tpu(device):
            raise Unavailable(
                f"precision={self.name} cannot run on a TPU, whose half precision is bfloat16.",
                "Type precision=bf16-true.",
            )
        devices.require_emulated_products(self, device, "16-true")
        if self._is_tf32 and not self.emulated:
            remedy = devices.emulation_remedy("32-true")
            # TF32 is emulated on a CPU only.
            if device.type == "cuda":
                remedy = "Nearest that runs here: precision=32-true."
            devices.require_capability(self.name, device, (8, 0), remedy)

    @property
    def _is_tf32(self) -> bool:
        """Return whether float32 products round their operands to TF32."""
        return self.storage is torch.float32 and self.float32_matmul != "highest"

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Optimizer state is in float16 too, whose range squares of gradients leave.
        if self.storage is torch.float16:
            if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
                raise ConfigError(
                    "optimizer=lbfgs divides by products of gradients, which leave float16's range "
                    f"under precision={self.name}. Type precision=32-true, or optimizer=adamw "
                    "optimizer.eps=1e-4."
                )
            check_eps(self.name, optimizers)
