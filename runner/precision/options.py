"""Check the options that several precisions share, and set the kernels that they ask for."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, get_args

import torch
from torch import nn

from runner.precision.emulation.float16 import Choice, choose_kernels, float32_accumulate
from runner.precision.precision import ComputeFormat, Precision
from runner.utils.errors import ConfigError, Unavailable
from runner.utils.tpu import accelerator_kind

MATMUL = ("highest", "high", "medium")


DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# Operands are scaled to the format's range first. Output gradients are in e4m3 too in most recipes,
# and e5m2, which the others take, is wider.
FP8_LAYERS = ComputeFormat("float8_e4m3fn", ("activations", "weights", "gradients"))


def cpu_kernels(
    precision: Precision, choice: Choice, model: nn.Module, device: torch.device
) -> tuple[str, AbstractContextManager[Any]]:
    """Which kernels half precision takes on a CPU, and the context that puts them in place; empty
    where the question does not arise."""
    half = precision.compute
    if device.type != "cpu" or not (half is torch.float16 or precision.emulated):
        return "", nullcontext()
    kernels = choose_kernels("float32_accumulate" if precision.emulated else choice, model)
    return kernels, float32_accumulate(half) if kernels != "native" else nullcontext()


def check_line_search(name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ConfigError for LBFGS on float16 weights."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ConfigError(
            f"optimizer=lbfgs divides by products of gradients, which leave float16's range under "
            f"precision={name}. Type precision=32-true, or optimizer=adamw optimizer.eps=1e-4."
        )


LARGE_STEP = 0.2
DESTRUCTIVE_STEP = 1.0


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
            f"{accelerator_kind(device)}.",
            "Type accelerator=cpu, or leave precision.emulate out.",
        )


def require_tf32(name: str, device: torch.device) -> None:
    """Raise Unavailable unless the device has TF32 tensor cores (Ampere or newer)."""
    if device.type != "cuda":
        raise Unavailable(
            f"precision={name} needs an NVIDIA GPU of compute capability 8.0 or higher; "
            f"this run is on {accelerator_kind(device)}.",
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
