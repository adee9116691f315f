"""Use TPUs through torch_tpu, whose device type is `tpu`, or the older torch_xla, with type `xla`.

torch_tpu computes eagerly. torch_xla records operations and computes them when a value is read or
launch_operations is called; every difference between the two is hidden in this module.
"""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from runner.utils.errors import Unavailable
from runner.utils.import_warnings import suppress_import_warnings


def accelerator_kind(device: torch.device) -> str:
    """Return the kind that `accelerator=` takes for a device: its type, or `tpu` for type `xla`."""
    return "tpu" if device.type == "xla" else device.type


def is_tpu(device: torch.device) -> bool:
    """Return whether a device is a TPU, or the device that torch_xla uses in place of one."""
    return accelerator_kind(device) == "tpu"


def import_package() -> str:
    """Import a package that finds a TPU and return its name: `torch_tpu`, else `torch_xla`.

    torch_xla computes on the device that the variable PJRT_DEVICE names, if it is set: with
    PJRT_DEVICE=CPU the code for torch_xla can be tried without a TPU.

    Raises:
        Unavailable: neither package is installed, or neither finds a device.
    """
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is not None and current.type == "tpu":
        return "torch_tpu"
    problems = []
    if find_spec("torch_tpu"):
        problems.append(f"torch_tpu {version('torch_tpu')} finds no TPU")
    if find_spec("torch_xla"):
        problem = _xla_problem()
        if not problem:
            return "torch_xla"
        problems.append(f"torch_xla {version('torch_xla')} {problem}")
    if not problems:
        raise Unavailable(
            "accelerator=tpu needs torch_tpu (or the older torch_xla), and neither is installed.",
            "Type pip install torch_tpu on a machine with a TPU, or accelerator=cpu.",
        )
    raise Unavailable(
        f"accelerator=tpu is not on this machine: {', and '.join(problems)}.",
        "Type accelerator=cpu.",
    )


def _xla(module: str = "") -> Any:
    return import_module(f"torch_xla{module}")


def _xla_problem() -> str:
    """Return why torch_xla has no device; empty if it has one."""
    is_chosen = "PJRT_DEVICE" in os.environ
    try:
        if _xla(".runtime").device_type() == "TPU" or is_chosen:
            _xla().device()
            return ""
    except (ImportError, OSError, RuntimeError) as error:
        return f"does not start: {str(error).strip().partition(chr(10))[0]}"
    if not is_chosen:
        # torch_xla has set its own guess, which must not be read as the user's choice later.
        os.environ.pop("PJRT_DEVICE", None)
    return "finds no TPU"


def device_count() -> int:
    """Return the number of TPUs that this process can use. Raises Unavailable if there is none."""
    if import_package() == "torch_tpu":
        return torch.accelerator.device_count()
    return _xla().device_count()


def use_device(index: int) -> torch.device:
    """Return the TPU of a number, and have torch_xla compute float32 products in float32.

    torch_xla's default on a TPU is bfloat16 products; torch_tpu follows PyTorch's own setting.
    """
    if import_package() == "torch_tpu":
        return torch.device("tpu", index)
    # torch_xla warns about a second setting, and its own default counts as the first.
    with suppress_import_warnings():
        _xla(".backends").set_mat_mul_precision("highest")
    return _xla().device(index)


def device_name(device: torch.device) -> str:
    """Return a TPU's generation and its package, for example `TPU v6e (torch_tpu 0.2.0)`."""
    if device.type == "tpu":
        chip = torch.get_device_module(device).get_device_name(device)
        return f"{chip} (torch_tpu {version('torch_tpu')})"
    hardware = _xla(".core.xla_model").xla_device_hw(device)
    chip = hardware if hardware == "TPU" else f"{hardware}, not a TPU"
    return f"{chip} (torch_xla {version('torch_xla')})"


def launch_operations(device: torch.device, wait: bool = False) -> None:
    """Have torch_xla compute the operations that it has recorded; do nothing on other devices."""
    if device.type == "xla":
        _xla().sync(wait=wait)


def peak_bytes(device: torch.device) -> int | None:
    """Return torch_xla's memory peak since the process began; None if the device has no count."""
    try:
        return _xla(".core.xla_model").get_memory_info(device)["peak_bytes_used"]
    except (KeyError, RuntimeError):  # PJRT's CPU: "GetAllocatorStats is not supported"
        return None


def seed(value: int) -> None:
    """Seed torch_xla's generator if torch_xla is in use; torch.manual_seed does not reach it."""
    if "torch_xla" in sys.modules and "PJRT_DEVICE" in os.environ:
        _xla().manual_seed(value)


def tpu_rng_state(device: torch.device) -> Tensor:
    """Return the state (uint8) of a TPU's generator."""
    if device.type == "tpu":
        return _generator(device).get_state()
    # torch_xla's state changes with every launch, even if nothing was drawn: launch before reading.
    launch_operations(device)
    state: int = _xla(".core.xla_model").get_rng_state(str(device))
    return torch.tensor(list(state.to_bytes(8, "little")), dtype=torch.uint8)


def set_tpu_rng_state(state: Tensor, device: torch.device) -> None:
    """Set the generator of a TPU to a state that tpu_rng_state returned."""
    if device.type == "tpu":
        _generator(device).set_state(state)
        return
    value = int.from_bytes(bytes(state.tolist()), "little")
    _xla(".core.xla_model").set_rng_state(value, str(device))


def _generator(device: torch.device) -> torch.Generator:
    """Return torch_tpu's generator of a device."""
    # From torch 2.13 on, torch_tpu's get_rng_state() is private to PyTorch.
    return torch.get_device_module(device).default_generators[device.index or 0]
