"""TPUs: the device `tpu` of the package torch_tpu, or `xla` of the older torch_xla, which notes
operations down and computes them when a value is read or `launch` is called."""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from runner.utils.errors import Unavailable
from runner.utils.quiet_import import quiet_imports


def accelerator_kind(device: torch.device) -> str:
    """What `accelerator=` calls a device."""
    return "tpu" if device.type == "xla" else device.type


def is_tpu(device: torch.device) -> bool:
    """Whether it is a TPU, or what torch_xla has in its place."""
    return accelerator_kind(device) == "tpu"


def import_package() -> str:
    """`torch_tpu`, or `torch_xla` where that alone finds a TPU. Where PJRT_DEVICE is set, torch_xla
    computes on what it names: PJRT_DEVICE=CPU tries the way without a TPU.

    Raises:
        Unavailable: neither is installed, or none finds a device.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is not None and here.type == "tpu":
        return "torch_tpu"
    problems = []
    if find_spec("torch_tpu"):
        problems.append(f"torch_tpu {version('torch_tpu')} finds no TPU")
    if find_spec("torch_xla"):
        if not (problem := _xla_problem()):
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
    """Why torch_xla has no device; empty where it has one."""
    typed = "PJRT_DEVICE" in os.environ
    try:
        if _xla(".runtime").device_type() == "TPU" or typed:
            _xla().device()
            return ""
    except (ImportError, OSError, RuntimeError) as error:
        return f"does not start: {str(error).strip().partition(chr(10))[0]}"
    if not typed:
        os.environ.pop("PJRT_DEVICE", None)  # its own guess, which is not the user's word
    return "finds no TPU"


def is_available() -> bool:
    """Whether there is a TPU."""
    try:
        import_package()
    except Unavailable:
        return False
    return True


def device_count() -> int:
    """TPUs that this process can use. Raises Unavailable for none."""
    return (
        torch.accelerator.device_count()
        if import_package() == "torch_tpu"
        else _xla().device_count()
    )


def use_device(index: int) -> torch.device:
    """The TPU of that number. All float32 products of torch_xla are in float32, and not in
    bfloat16, which is its default on a TPU; torch_tpu follows PyTorch's own switch."""
    if import_package() == "torch_tpu":
        return torch.device("tpu", index)
    with quiet_imports():  # it warns of a second setting, and counts its own default as the first
        _xla(".backends").set_mat_mul_precision("highest")
    return _xla().device(index)


def device_name(device: torch.device) -> str:
    """The generation and the package, for example `TPU v6e (torch_tpu 0.2.0)`."""
    if device.type == "tpu":
        chip = torch.get_device_module(device).get_device_name(device)
        return f"{chip} (torch_tpu {version('torch_tpu')})"
    hardware = _xla(".core.xla_model").xla_device_hw(device)
    chip = hardware if hardware == "TPU" else f"{hardware}, not a TPU"
    return f"{chip} (torch_xla {version('torch_xla')})"


def launch_operations(device: torch.device, wait: bool = False) -> None:
    """Have torch_xla compute what it has noted down; nothing on any other device."""
    if device.type == "xla":
        _xla().sync(wait=wait)


def peak_bytes(device: torch.device) -> int | None:
    """torch_xla's peak since the process began; None where the device does not tell."""
    try:
        return _xla(".core.xla_model").get_memory_info(device)["peak_bytes_used"]
    except (KeyError, RuntimeError):  # PJRT's CPU: "GetAllocatorStats is not supported"
        return None


def seed(value: int) -> None:
    """Seed torch_xla's generator, which torch.manual_seed does not reach, where it is in use."""
    if "torch_xla" in sys.modules and "PJRT_DEVICE" in os.environ:
        _xla().manual_seed(value)


def rng_state(device: torch.device) -> Tensor:
    """The state of the device's generator, uint8. Every launch moves torch_xla's on from where the
    last one left it, whatever was drawn between: hence one before it is read."""
    if device.type == "tpu":
        return _generator(device).get_state()
    launch_operations(device)
    state: int = _xla(".core.xla_model").get_rng_state(str(device))
    return torch.tensor(list(state.to_bytes(8, "little")), dtype=torch.uint8)


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Take back what rng_state gave."""
    if device.type == "tpu":
        _generator(device).set_state(state)
        return
    value = int.from_bytes(bytes(state.tolist()), "little")
    _xla(".core.xla_model").set_rng_state(value, str(device))


def _generator(device: torch.device) -> torch.Generator:
    """torch_tpu keeps get_rng_state() to PyTorch itself from torch 2.13 on."""
    return torch.get_device_module(device).default_generators[device.index or 0]
