"""64-true, 32-true, tf32, 16-true, bf16-true: everything in one floating dtype."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final, get_args

import torch
from torch import nn

from runner.errors import ConfigError, Unavailable
from runner.precision.base import Precision
from runner.precision.cast import DefaultDtype, cast_nest
from runner.precision.cpu_float16 import Choice, float32_accumulate, resolve
from runner.precision.cpu_tf32 import tf32_products
from runner.precision.cuda_half import half_sums, lacks_bfloat16, require_bfloat16
from runner.tpu import is_tpu, kind

MATMUL = ("highest", "high", "medium")
EMULATE_BFLOAT16 = (
    "Type precision={}, or precision.emulate=true for bfloat16's numbers without its speed."
)
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@final
class TruePrecision(Precision):
    """Parameters, gradients, optimizer state, inputs and compute in one dtype.

    Args:
        name: label of the run.
        dtype: float64, float32, float16 or bfloat16.
        float32_matmul: torch.set_float32_matmul_precision for the run; anything but `highest`
            lets float32 products run in TF32 (10-bit mantissa), convolutions too.
        keep_fp32: patterns of modules that stay in float32.
        autocast_loss: compute the loss in the dtype as well, else in float32 (64-true: float64).
        cpu_float16: which kernels float16 takes on a CPU; see runner.precision.cpu_float16.
        emulate: on a CPU, products as tensor cores compute them: operands in half precision or
            TF32, sums in float32; bfloat16 on a GPU without its units, too. Its speed means
            nothing.
        reduced_precision_reduction: half-precision products on CUDA may add their parts in half
            precision.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(
        self,
        name: str,
        dtype: str,
        float32_matmul: str = "highest",
        keep_fp32: Sequence[str] = (),
        autocast_loss: bool = False,
        cpu_float16: Choice = "auto",
        emulate: bool = False,
        reduced_precision_reduction: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(
                f"precision.dtype={dtype} is not known. Allowed: {', '.join(DTYPES)}."
            )
        check_kernels(float32_matmul, cpu_float16, emulate, reduced_precision_reduction)
        self.name, self.keep_fp32, self.autocast_loss = name, keep_fp32, autocast_loss
        self.storage = self.compute = DTYPES[dtype]
        self.float32_matmul = float32_matmul
        self.cpu_float16: Choice = cpu_float16
        self.reduced_precision_reduction = reduced_precision_reduction
        self.emulated, self._kernels = emulate, ""
        if emulate and not self._is_tf32 and self.storage.itemsize > 2:
            raise ConfigError(f"precision.emulate=true: precision={name} runs everywhere as it is.")
        if reduced_precision_reduction and self.storage.itemsize > 2:
            raise ConfigError(
                f"precision.reduced_precision_reduction=true: precision={name} has no products in "
                "half precision. Leave it out."
            )
        # Tensors that a forward makes itself come out in the policy's dtype.
        plain = self.storage is torch.float32
        self._forward = nullcontext() if plain else DefaultDtype(self.storage)

    def require(self, device: torch.device) -> None:
        if device.type == "mps" and self.storage is torch.float64:
            raise Unavailable(
                "precision=64-true cannot run on mps: Apple's GPUs have no float64.",
                "Type accelerator=cpu, or precision=32-true.",
            )
        if is_tpu(device) and self.storage is torch.float64:
            raise Unavailable(
                "precision=64-true cannot run on a TPU, which has no float64 units.",
                "Type accelerator=cpu, or precision=32-true.",
            )
        if is_tpu(device) and self.storage is torch.float16:
            raise Unavailable(
                "precision=16-true cannot run on a TPU, whose half precision is bfloat16.",
                "Type precision=bf16-true.",
            )
        if self.storage is torch.bfloat16 and lacks_bfloat16(device):
            if not self.emulated:
                require_bfloat16(self.name, device, EMULATE_BFLOAT16.format("16-true"))
        elif self.emulated:
            require_cpu(self.name, device)
        elif self._is_tf32:
            require_tf32(self.name, device)

    @property
    def _is_tf32(self) -> bool:
        return self.storage is torch.float32 and self.float32_matmul != "highest"

    @contextmanager
    def session(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        if self.emulated and self._is_tf32:
            with float32_matmul("highest"), half_sums(False), tf32_products(model):
                yield
            return
        self._kernels, kernels = cpu_kernels(self, self.cpu_float16, model, device)
        sums = half_sums(self.reduced_precision_reduction)
        with float32_matmul(self.float32_matmul), sums, kernels:
            yield

    def kernels(self) -> str:
        return self._kernels

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self.storage is torch.float16:
            check_line_search(self.name, optimizers)
            check_eps(self.name, optimizers)

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return self._forward

    def backward(self, device: torch.device) -> AbstractContextManager[Any]:
        return self._forward

    def cast(self, inputs: Any) -> Any:
        return cast_nest(inputs, self.storage)


def cpu_kernels(
    precision: Precision, choice: Choice, model: nn.Module, device: torch.device
) -> tuple[str, AbstractContextManager[Any]]:
    """Which kernels half precision takes on a CPU, and the context that puts them in place; empty
    where the question does not arise."""
    half = precision.compute
    if device.type != "cpu" or not (half is torch.float16 or precision.emulated):
        return "", nullcontext()
    kernels = resolve("float32_accumulate" if precision.emulated else choice, model)
    return kernels, float32_accumulate(half) if kernels != "native" else nullcontext()


def check_line_search(name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ConfigError for LBFGS on float16 weights."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ConfigError(
            f"optimizer=lbfgs divides by products of gradients, which leave float16's range under "
            f"precision={name}. Type precision=32-true, or optimizer=adamw optimizer.eps=1e-4."
        )


def check_eps(name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse, or warn of, an eps that cannot stand in for squared gradients which vanish in
    float16, in which the state follows the weights (an optimizer that keeps a wider state of its
    own says so: `wide_state`).

    A square that rounds to 0 leaves eps alone under the fraction, so that a gradient g moves its
    weight by lr * g / eps. Above 1 that destroys any initialisation; above 0.2 it hurts.

    Raises:
        ConfigError: eps is 0 in float16, or a single step can move a weight by more than 1.
    """
    for optimizer in optimizers:
        eps = optimizer.defaults.get("eps")
        if getattr(optimizer, "wide_state", False) or not isinstance(eps, float) or eps <= 0:
            continue
        key = "optimizer.eps" if len(optimizers) == 1 else "optimizer.<name>.eps"
        says = f"{key}={eps:g}: {type(optimizer).__name__} keeps its state in float16 "
        vanishes, reach = _largest_blind_step(optimizer)
        works = 10.0 ** math.ceil(math.log10(max(1e-4, reach / LARGE_STEP)) - 1e-9)
        remedy = f"Type {key}={works:.0e}, or precision=16-mixed.".replace("e-0", "e-")
        if torch.tensor(eps).half().item() == 0.0:
            raise ConfigError(
                f"{says}under precision={name}, where {eps:g} is 0 (the least above is 6e-08), "
                f"and divides by it at a step whose squared gradients underflow. {remedy}"
            )
        step = reach / eps
        if step <= LARGE_STEP:
            continue
        message = (
            f"{says}under precision={name}, where the squares of gradients under {vanishes:.2g} "
            f"round to 0, so that one step can move a weight by lr * {vanishes:.2g} / eps = "
            f"{step:.2g}. {remedy}"
        )
        if step > DESTRUCTIVE_STEP:
            raise ConfigError(message)
        warnings.warn(message, stacklevel=2)


LARGE_STEP, DESTRUCTIVE_STEP = 0.2, 1.0


def _largest_blind_step(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """The gradient under which an optimizer's square rounds to 0 in float16 (half of the least
    number above 0, 2**-24), and the largest product of it and a learning rate; zeros for an
    optimizer that keeps no squares."""
    found = (0.0, 0.0)
    for group in optimizer.param_groups:
        weight = _weight_of_square(optimizer, group)
        if weight > 0:
            vanishes = math.sqrt(2**-25 / weight)
            found = max(found, (vanishes, float(group["lr"]) * vanishes), key=lambda pair: pair[1])
    return found


def _weight_of_square(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """What a new squared gradient is multiplied by when it enters the state; 0 for no squares."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return 1.0
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 - group["alpha"]
    if "betas" in group and not isinstance(optimizer, torch.optim.Adamax):  # it keeps magnitudes
        return 1 - group["betas"][1]
    return 0.0


def check_kernels(
    float32_matmul: str,
    cpu_float16: str,
    emulate: object = False,
    reduced_precision_reduction: object = False,
) -> None:
    """Raise ConfigError for values that are not known; torch only warns of the first."""
    allowed = {
        "float32_matmul": (float32_matmul, MATMUL),
        "cpu_float16": (cpu_float16, get_args(Choice)),
        "emulate": (emulate if isinstance(emulate, bool) else str(emulate), (True, False)),
        "reduced_precision_reduction": (
            reduced_precision_reduction
            if isinstance(reduced_precision_reduction, bool)
            else str(reduced_precision_reduction),
            (True, False),
        ),
    }
    problems = [
        f"precision.{key}={value} is not known. Allowed: {', '.join(map(str, known)).lower()}."
        for key, (value, known) in allowed.items()
        if value not in known
    ]
    if problems:
        raise ConfigError(*problems)


def require_cpu(name: str, device: torch.device) -> None:
    """Raise Unavailable for a precision that is emulated on a CPU only."""
    if device.type != "cpu":
        raise Unavailable(
            f"precision={name} precision.emulate=true runs on a CPU; this run is on "
            f"{kind(device)}.",
            "Type accelerator=cpu, or leave precision.emulate out.",
        )


def require_tf32(name: str, device: torch.device) -> None:
    """Raise Unavailable unless the device has TF32 tensor cores (Ampere or newer)."""
    if device.type != "cuda":
        raise Unavailable(
            f"precision={name} needs an NVIDIA GPU of compute capability 8.0 or higher; "
            f"this run is on {kind(device)}.",
            "Type precision.emulate=true for its numbers without its speed, or precision=32-true, "
            "the nearest that runs here.",
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise Unavailable(
            f"precision={name} needs compute capability 8.0 or higher; {device} "
            f"({torch.cuda.get_device_name(device)}) has {capability[0]}.{capability[1]}.",
            "Nearest that runs here: precision=32-true.",
        )


@contextmanager
def float32_matmul(precision: str) -> Iterator[None]:
    """PyTorch's TF32 switches for matmul and cuDNN, restored after. It leaves cuDNN's on by
    default. One family of switches only: mixing it with `fp32_precision` raises in PyTorch."""
    cudnn = torch.backends.cudnn
    previous = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous[0])
        cudnn.allow_tf32 = previous[1]
