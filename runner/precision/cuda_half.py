"""Ask whether a CUDA device has bfloat16 units, and set how it adds half-precision products.

Both matter because torch is silent about them: it emulates bfloat16 on older GPUs, and it lets
products be summed in half precision unless told otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runner.utils.errors import Unavailable

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
    """Return the prefix (`bf16` or `16`) of the half precisions that run on a device in hardware,
    for remedies such as `precision=bf16-mixed`."""
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
def reduced_precision_sums(reduced: bool) -> Iterator[None]:
    """Set whether float16 and bfloat16 products on CUDA may add their parts in half precision,
    and restore torch's switches after, also after an exception.

    torch allows it unless told otherwise: cuBLAS may then split a long sum (split-K) and add the
    parts in the dtype of the result, which rounds each of them.

    Args:
        reduced: true allows it.

    Source: pytorch.org/docs/stable/notes/numerical_accuracy.html, reduced precision reduction.
    """
    previous = {switch: _read(switch) for switch in _SWITCHES}
    for switch, (_, *split_k) in previous.items():
        # torch refuses reduced sums where sums may not be split at all.
        _write(switch, (True,) if reduced else (False, *split_k))
    try:
        yield
    finally:
        for switch, values in previous.items():
            _write(switch, values)


def _read(switch: str) -> tuple[bool, ...]:
    """Return a switch and, in versions of torch that have it, whether sums may be split at all."""
    matmul = torch.backends.cuda.matmul
    values = (getattr(matmul, switch), getattr(matmul, f"{switch}_split_k", None))
    return tuple(value for value in values if value is not None)


def _write(switch: str, values: tuple[bool, ...]) -> None:
    # A bool alone would turn the second switch on, and an older torch takes nothing else.
    value, *rest = values
    setattr(torch.backends.cuda.matmul, switch, values if rest else value)
