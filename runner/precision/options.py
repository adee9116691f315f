"""Check options, optimizers and devices for several precisions; select how products are computed.

Every check raises before the first step, with the value that was given and what to type.
"""

import math
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from torch import nn

from runner.precision.casting import grouped_casts
from runner.precision.emulation.cpu_kernels import (
    KernelChoice,
    choose_kernels,
    float32_accumulate,
    tf32_products,
)
from runner.precision.emulation.cuda_autocast import cuda_casts
from runner.utils.errors import ConfigError, Unavailable
from runner.utils.reproducibility import saved_float32_switches, set_float32_switches

if TYPE_CHECKING:
    from runner.precision.contract import Precision

# Attributes of torch.backends.cuda.matmul.
_SWITCHES = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
MATMUL_PRECISIONS = ("highest", "high", "medium")  # of torch.set_float32_matmul_precision
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def product_problems(precision: "Precision") -> list[str]:
    """Return a sentence for each value that is not allowed, of the keys that say how products are
    computed; see Precision."""
    # torch itself only warns of an unknown value.
    problems = choice_problems("float32_matmul", precision.float32_matmul, MATMUL_PRECISIONS)
    problems += choice_problems("cpu_float16", precision.cpu_float16, get_args(KernelChoice))
    return problems + switch_problems(
        emulate=precision.emulates_products,
        reduced_precision_reduction=precision.reduced_precision_reduction,
    )


class Switches(NamedTuple):
    """What a session switches in its process.

    Attributes:
        float32_matmul: one of MATMUL_PRECISIONS.
        reduced_sums: see Precision.reduced_precision_reduction.
        replacements: keys of emulation.cpu_kernels.replace_kernels.
        concerning: keys of all replacements that would compute for the precision.
        kernels: name of the kernels that half precision takes on a CPU; empty without a choice.
    """

    float32_matmul: str
    reduced_sums: bool
    replacements: set[Hashable]
    concerning: set[Hashable]
    kernels: str


def wanted_switches(precision: "Precision", model: nn.Module, device: torch.device) -> Switches:
    """Return how a precision computes products: its keys are those of product_problems."""
    kernels = ""
    matmul = precision.float32_matmul
    emulates = precision.emulates_products
    replaced = set[Hashable]()
    if device.type == "cpu" and getattr(precision, "emulate", False):
        replaced.add("cuda_casts")
    if precision.compute is not precision.storage:
        replaced.add("grouped_casts")
    # In evaluation torch.nn's encoders and attention have kernels that read their parts' weights,
    # and know no autocast on a CPU. torch leaves them out under CUDA's, and where a part has a
    # hook (converted and adapted layers have one, and those of keep_fp32); but of padded inputs an
    # encoder makes nested tensors, with which no part can compute.
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    parts = [part for encoder in encoders for part in encoder.modules()]
    if replaced or any(part._forward_pre_hooks or part._forward_hooks for part in parts):
        replaced.add("calls_parts")
    if emulates and precision.compute is torch.float32:
        # torch's own switch is off: the emulation rounds the operands, and sums are float32.
        matmul = "highest"
        replaced.add("tf32")
    elif device.type == "cpu" and (precision.compute is torch.float16 or emulates):
        # Tensor cores sum in float32, which native kernels of a CPU need not do.
        choice = "float32_accumulate" if emulates else precision.cpu_float16
        kernels = choose_kernels(choice, model)
        if kernels == "float32_accumulate":
            replaced.add(precision.compute)
    concerning: set[Hashable] = {"tf32", precision.storage, precision.compute}
    if precision.compute is not precision.storage:
        concerning |= {"cuda_casts", "grouped_casts"}  # without autocast they change nothing
    return Switches(matmul, precision.reduced_precision_reduction, replaced, concerning, kernels)


@contextmanager
def switched(switches: Switches, model: nn.Module) -> Iterator[None]:
    """Return the context in which switches are set."""
    with ExitStack() as stack:
        stack.enter_context(float32_matmul(switches.float32_matmul))
        stack.enter_context(reduced_precision_sums(switches.reduced_sums))
        for key in switches.replacements:
            if isinstance(key, torch.dtype):
                stack.enter_context(float32_accumulate(key))
            elif key == "tf32":
                stack.enter_context(tf32_products(model))
            elif key == "calls_parts":
                fuses = torch.backends.mha.get_fastpath_enabled()
                stack.callback(torch.backends.mha.set_fastpath_enabled, fuses)
                torch.backends.mha.set_fastpath_enabled(False)
            else:
                stack.enter_context(cuda_casts() if key == "cuda_casts" else grouped_casts())
        yield


def require_emulated_products(
    precision: "Precision", device: torch.device, float16_name: str
) -> None:
    """Raise Unavailable where a device lacks bfloat16 units, or products cannot be emulated.

    Args:
        precision: whose products have half precision, or are emulated.
        device: that the run computes on.
        float16_name: the precision to type where bfloat16 is missing.
    """
    if precision.compute is torch.bfloat16 and lacks_bfloat16(device):
        if not precision.emulates_products:
            remedy = (
                f"Type precision={float16_name}, or precision.emulate=true for bfloat16's numbers "
                "without its speed."
            )
            require_bfloat16(precision.name, device, remedy)
    elif precision.emulates_products and device.type != "cpu":
        raise Unavailable(
            f"precision={precision.name} precision.emulate=true runs on a CPU; this run is on "
            f"{device.type}.",
            "Type accelerator=cpu, or leave precision.emulate out.",
        )


def refuse(problems: Sequence[str]) -> None:
    """Raise ConfigError where there are problems, with all of them."""
    if problems:
        raise ConfigError(*problems)


def choice_problems(key: str, value: object, allowed: Collection[str]) -> list[str]:
    """Return a sentence for a key under precision whose value is none of the allowed ones, in a
    list that is empty where it is one."""
    if value in allowed:
        return []
    return [f"precision.{key}={value} is not known. Allowed: {', '.join(allowed)}."]


def name_problems(name: str, key: str, value: object, built_in: Mapping[str, str]) -> list[str]:
    """Return a sentence for a value under the name of a built-in precision that has another one.

    A built-in name labels results, so it may not stand for another value.

    Args:
        name: of the precision.
        key: under precision.
        value: of the key.
        built_in: the name of the built-in precision of each value.
    """
    correct = built_in.get(value, name) if isinstance(value, str) else name
    if correct == name or name not in built_in.values():
        return []
    return [f"precision.{key}={value} is not what {name} is. Type precision={correct}."]


def switch_problems(**switches: object) -> list[str]:
    """Return a sentence for each key under precision that must be true or false and is neither."""
    return [
        f"precision.{key}={value} is not known. Allowed: true, false."
        for key, value in switches.items()
        if not isinstance(value, bool)
    ]


# How far one step may move a weight, as an absolute number, before check_eps warns and before it
# refuses: 0.2 hurts, and 1 destroys any initialisation.
MAX_SAFE_STEP = 0.2
MAX_ALLOWED_STEP = 1.0


def check_eps(name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse, or warn of, an eps that is too small for squared gradients in float16.

    Args:
        name: of the precision, for messages.
        optimizers: an attribute `wide_state` marks one whose state is wider than float16.

    Raises:
        ConfigError: eps is 0 in float16, or a single step can move a weight by more than
            MAX_ALLOWED_STEP.
    """
    for optimizer in optimizers:
        # Groups of parameters may have an eps of their own; the smallest one underflows first.
        groups = [group.get("eps") for group in optimizer.param_groups]
        eps = min((e for e in groups if isinstance(e, float)), default=None)
        # The state has the weights' dtype, float16, unless the optimizer says otherwise.
        if getattr(optimizer, "wide_state", False) or not isinstance(eps, float) or eps <= 0:
            continue
        key = "optimizer.eps" if len(optimizers) == 1 else "optimizer.<name>.eps"
        setting = f"{key}={eps:g}: {type(optimizer).__name__} keeps its state in float16 "
        gradient, step_times_eps = _largest_underflow_step(optimizer)
        # The least power of ten that keeps a step below MAX_SAFE_STEP, from 1e-4. The 1e-9 keeps
        # an exact power of ten, whose logarithm may be rounded up.
        least_eps = max(1e-4, step_times_eps / MAX_SAFE_STEP)
        suggested = 10.0 ** math.ceil(math.log10(least_eps) - 1e-9)
        remedy = f"Type {key}={suggested:.0e}, or precision=16-mixed.".replace("e-0", "e-")
        # Such an eps adds nothing to a square that rounds to 0, so that the denominator is 0.
        if torch.tensor(eps).half().item() == 0.0:
            raise ConfigError(
                f"{setting}under precision={name}, where {eps:g} is 0 (the least above is 6e-08), "
                f"and divides by it at a step whose squared gradients underflow. {remedy}"
            )
        # A square that rounds to 0 leaves eps alone in the denominator, so that a gradient g moves
        # its weight by lr * g / eps.
        step = step_times_eps / eps
        if step <= MAX_SAFE_STEP:
            continue
        message = (
            f"{setting}under precision={name}, where the squares of gradients under {gradient:.2g} "
            f"round to 0, so that one step can move a weight by lr * {gradient:.2g} / eps = "
            f"{step:.2g}. {remedy}"
        )
        if step > MAX_ALLOWED_STEP:
            raise ConfigError(message)
        warnings.warn(message, stacklevel=2)


def _largest_underflow_step(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Return the gradient under which an optimizer's squares round to 0 in float16, and its product
    with the learning rate, of the parameter group where the product is largest; zeros for an
    optimizer that keeps no squares."""
    largest = (0.0, 0.0)
    for group in optimizer.param_groups:
        # The factor of a new squared gradient in the optimizer's state; 0 without squares.
        weight = 0.0
        if isinstance(optimizer, torch.optim.Adagrad):
            weight = 1.0
        elif isinstance(optimizer, torch.optim.RMSprop):
            weight = 1 - group["alpha"]
        # Adamax stores magnitudes, not squares.
        elif "betas" in group and not isinstance(optimizer, torch.optim.Adamax):
            weight = 1 - group["betas"][1]
        if weight > 0:
            # Half of float16's least number above 0, 2**-24, rounds to 0.
            gradient = math.sqrt(2**-25 / weight)
            step_times_eps = float(group["lr"]) * gradient
            largest = max(largest, (gradient, step_times_eps), key=lambda pair: pair[1])
    return largest


def emulation_remedy(nearest: str) -> str:
    """Return what to type for a precision that a device lacks and that can be emulated; nearest is
    the name of the nearest precision that the device has."""
    return (
        "Type precision.emulate=true for its numbers without its speed, or "
        f"precision={nearest}, the nearest that runs here."
    )


def require_capability(
    name: str,
    device: torch.device,
    minimum: tuple[int, int],
    remedy: str,
    limit: tuple[int, int] | None = None,
) -> None:
    """Raise Unavailable unless a device is an NVIDIA GPU of a compute capability.

    Args:
        name: of the precision.
        device: that the run computes on.
        minimum: the lowest compute capability on which the precision runs.
        remedy: what to type instead.
        limit: the lowest one on which it no longer runs; None for none.
    """
    limits = f"{dotted(minimum)} or higher"
    if limit is not None:
        limits += f", below {dotted(limit)}"
    wants = f"precision={name} needs an NVIDIA GPU of compute capability {limits}"
    if device.type != "cuda":
        raise Unavailable(f"{wants}; this run is on {device.type}.", remedy)
    capability = torch.cuda.get_device_capability(device)
    if capability < minimum or (limit is not None and capability >= limit):
        gpu = torch.cuda.get_device_name(device)
        raise Unavailable(f"{wants}; {device} ({gpu}) has {dotted(capability)}.", remedy)


def require_torchao(name: str) -> None:
    """Raise Unavailable where torchao is not installed."""
    if find_spec("torchao") is None:
        raise Unavailable(
            f"precision={name} needs the package torchao.", "Type pip install torchao."
        )


def dotted(version: Sequence[int]) -> str:
    """Return a version of two numbers as text, as "8.9"."""
    return ".".join(map(str, version))


def lacks_bfloat16(device: torch.device) -> bool:
    """Return whether a device is an NVIDIA GPU without bfloat16 units (before Ampere), on which
    torch emulates the dtype without saying so.

    Source: torch.cuda.is_bf16_supported(including_emulation=False), which asks about the current
    device only.
    """
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) < (8, 0)


def native_half_prefix(device: torch.device) -> str:
    """Return `bf16`, or `16` where a device computes float16 in hardware and bfloat16 not, for
    remedies such as `precision=bf16-mixed`."""
    return "16" if lacks_bfloat16(device) else "bf16"


def require_bfloat16(name: str, device: torch.device, remedy: str) -> None:
    """Raise Unavailable for an NVIDIA GPU without bfloat16 units.

    Args:
        name: label of the precision, with the key that makes it compute in bfloat16 if it has one.
        device: that the run computes on.
        remedy: what to type instead.
    """
    if lacks_bfloat16(device):
        capability = dotted(torch.cuda.get_device_capability(device))
        raise Unavailable(
            f"precision={name} needs bfloat16 units (compute capability 8.0 or higher); {device} "
            f"({torch.cuda.get_device_name(device)}) has {capability}, where bfloat16 is emulated.",
            remedy,
        )


@contextmanager
def reduced_precision_sums(allowed: bool) -> Iterator[None]:
    """Set whether float16 and bfloat16 products on CUDA may add their parts in half precision,
    and restore torch's switches after, also after an exception.

    torch's default allows it: cuBLAS may then split a long sum (split-K) and add the parts in the
    dtype of the result, which rounds each of them.

    Args:
        allowed: whether sums may be in half precision.

    Source: pytorch.org/docs/stable/notes/numerical_accuracy.html, reduced precision reduction.
    """
    matmul = torch.backends.cuda.matmul
    # With each switch whether sums may be split at all.
    previous = {s: (getattr(matmul, s), getattr(matmul, f"{s}_split_k")) for s in _SWITCHES}
    for switch, (_, split_k) in previous.items():
        # torch refuses reduced sums where sums may not be split at all.
        setattr(matmul, switch, (allowed, allowed or split_k))
    try:
        yield
    finally:
        for switch, before in previous.items():
            setattr(matmul, switch, before)


@contextmanager
def float32_matmul(precision: str) -> Iterator[None]:
    """Set PyTorch's TF32 switches for matmul and cuDNN, and restore them after.

    Args:
        precision: one of MATMUL_PRECISIONS.
    """
    restore = saved_float32_switches()
    set_float32_switches(precision)
    try:
        yield
    finally:
        restore()
