"""Use TPUs through torch_tpu, whose device type is `tpu`."""

from importlib.metadata import version
from importlib.util import find_spec

import torch

from runner.core.base.errors import Unavailable


def is_tpu(device: torch.device) -> bool:
    """Return whether a device is a TPU."""
    return device.type == "tpu"


def is_available() -> bool:
    """Return whether torch_tpu is installed and finds a TPU."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return current is not None and is_tpu(current)


def require_tpu() -> None:
    """Raise Unavailable where torch_tpu is not installed, or finds no device."""
    if is_available():
        return
    if find_spec("torch_tpu"):
        raise Unavailable(
            f"accelerator=tpu is not on this machine: torch_tpu {version('torch_tpu')} finds no "
            "TPU.",
            "Type accelerator=cpu.",
        )
    raise Unavailable(
        "accelerator=tpu needs torch_tpu, which is not installed.",
        "Type pip install torch_tpu on a machine with a TPU, or accelerator=cpu.",
    )


def device_name(device: torch.device) -> str:
    """Return a TPU's generation and its package, for example `TPU v6e (torch_tpu 0.2.0)`."""
    chip = torch.get_device_module(device).get_device_name(device)
    return f"{chip} (torch_tpu {version('torch_tpu')})"


def tpu_generator(device: torch.device) -> torch.Generator:
    """Return torch_tpu's generator of a device."""
    # From torch 2.13 on, torch_tpu's get_rng_state() is private to PyTorch.
    return torch.get_device_module(device).default_generators[device.index or 0]
