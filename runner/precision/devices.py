"""Raise where a device lacks what a precision needs."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from runner.core import Unavailable
from runner.precision.base import BasePrecision


def require_emulated_products(
    precision: BasePrecision, device: torch.device, float16_name: str
) -> None:
    """Raise Unavailable where a device lacks bfloat16 units, or products cannot be emulated.

    Args:
        precision: whose products have half precision, or are emulated.
        device: that the run computes on.
        float16_name: the precision to type where bfloat16 is missing.
    """
    is_bfloat16 = precision.compute is torch.bfloat16
    if precision.emulates_products:
        if device.type != "cpu" and not (is_bfloat16 and lacks_bfloat16(device)):
            raise Unavailable(
                f"precision={precision.name} precision.emulate=true runs on a CPU; this run is on "
                f"{device.type}.",
                "Type accelerator=cpu, or leave precision.emulate out.",
            )
    elif is_bfloat16:
        remedy = (
            f"Type precision={float16_name}, or precision.emulate=true for bfloat16's numbers "
            "without its speed."
        )
        require_bfloat16(precision.name, device, remedy)


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
