"""Ask whether a CUDA device has bfloat16 units, and set how it adds half-precision products.

Both matter because torch is silent about them: it emulates bfloat16 on older GPUs, and it lets
products be summed in half precision by default.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runner.utils.errors import Unavailable

# Attributes of torch.backends.cuda.matmul.
_SWITCHES = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


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
    if not lacks_bfloat16(device):
        return
    major, minor = torch.cuda.get_device_capability(device)
    raise Unavailable(
        f"precision={name} needs bfloat16 units (compute capability 8.0 or higher); {device} "
        f"({torch.cuda.get_device_name(device)}) has {major}.{minor}, where bfloat16 is emulated.",
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
    previous = {switch: _read_switch(switch) for switch in _SWITCHES}
    for switch, (_, split_k) in previous.items():
        # torch refuses reduced sums where sums may not be split at all; a bool alone allows both.
        _write_switch(switch, allowed, None if allowed else split_k)
    try:
        yield
    finally:
        for switch, (was_allowed, split_k) in previous.items():
            _write_switch(switch, was_allowed, split_k)


def _read_switch(switch: str) -> tuple[bool, bool | None]:
    """Return a switch, and whether sums may be split at all: None where torch does not have that
    switch."""
    matmul = torch.backends.cuda.matmul
    return getattr(matmul, switch), getattr(matmul, f"{switch}_split_k", None)


def _write_switch(switch: str, allowed: bool, split_k: bool | None) -> None:
    # A bool alone turns the second switch on, and an older torch takes nothing else.
    value = allowed if split_k is None else (allowed, split_k)
    setattr(torch.backends.cuda.matmul, switch, value)
