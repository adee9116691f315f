"""Choose the device of a run, name it, and measure the memory that a run takes on it.

`accelerator=` takes a kind (KINDS): one of torch's device types, or auto for the best one here.
"""

import ctypes
import gc
import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from runner.core.base.errors import ConfigError, Unavailable
from runner.core.base.tensor_facts import MIB

KINDS = ("auto", "cpu", "cuda", "mps", "tpu")
# Device types whose allocator records a peak that torch.accelerator can read and reset.
_TYPES_WITH_PEAK = ("cuda", "tpu")
_peak_resets = count()


@dataclass(frozen=True)
class Accelerator:
    """A device, with its kind, its name and its memory peak."""

    device: torch.device

    @property
    def kind(self) -> str:
        """Return the kind that `accelerator=` takes for this device."""
        return self.device.type

    @property
    def name(self) -> str:
        """Return the name of the hardware, for example `NVIDIA H200` or the processor's model."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        if is_tpu(self.device):
            return _tpu_name(self.device)
        return cpu_name() if self.device.type == "cpu" else "Apple GPU"

    def synchronize(self) -> None:
        """Wait for the device's queue. Call it where a run begins or ends, never in a step."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def reset_peak_memory(self) -> None:
        """Release cached memory and restart the peak, so that each run reports its own peak."""
        # The first run of a process leaves nothing to collect, and a collection takes 0.2 s.
        if next(_peak_resets):
            gc.collect()
        if self.device.type in _TYPES_WITH_PEAK:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(self.device)
        elif self.device.type == "cpu" and sys.platform == "linux":
            # Freed memory that malloc keeps would count as resident. 5 resets VmHWM (proc(5)).
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")

    def peak_memory_mib(self) -> float:
        """Return the peak in MiB since reset_peak_memory.

        On a CPU it is the resident set of the whole process, libraries included; on other devices
        it is the allocated memory. MPS records no peak: its present allocation is returned.
        """
        if self.device.type in _TYPES_WITH_PEAK:
            return torch.accelerator.max_memory_allocated(self.device) / MIB
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory() / MIB
        return resident_peak_mib()


def resident_peak_mib() -> float:
    """Return the process's peak resident set in MiB."""
    if sys.platform == "linux":
        # open() has a third of the cost of Path.open().
        with open("/proc/self/status") as status:  # noqa: PTH123
            for line in status:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


def choose_accelerator(name: str = "auto", index: int = 0) -> Accelerator:
    """Return the accelerator of a kind.

    Args:
        name: one of KINDS; auto takes the best kind of this machine.
        index: number of the device among those of its kind, from 0.

    Raises:
        ConfigError: the kind is not known.
        Unavailable: this machine has no such device.
    """
    if name not in KINDS:
        raise ConfigError(f"accelerator.name={name} is not known. Allowed: {', '.join(KINDS)}.")
    available = available_kinds()
    kind = available[0] if name == "auto" else name
    if kind == "tpu":
        _require_tpu()
    elif kind not in available:
        raise Unavailable(
            f"accelerator={kind} is not on this machine (torch {torch.__version__} finds: "
            f"{', '.join(available)}).",
            f"Type accelerator={available[0]}.",
        )
    device_count = torch.accelerator.device_count() if kind in ("cuda", "tpu") else 1
    if not 0 <= index < device_count:
        raise Unavailable(
            f"accelerator.index={index}: this machine has {device_count} {kind} device(s).",
            "Count from 0.",
        )
    # PyTorch has one MPS device and one CPU; an index would make `cpu:0`, which differs from `cpu`.
    has_index = kind in ("cuda", "tpu")
    return Accelerator(torch.device(kind, index) if has_index else torch.device(kind))


def device_rng_state(device: torch.device) -> Tensor | None:
    """Return the state (uint8) of the device's own generator; None for a CPU, which has torch's."""
    if is_tpu(device):
        return _tpu_generator(device).get_state()
    if device.type == "mps":
        return torch.mps.get_rng_state()
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_device_rng_state(state: Tensor, device: torch.device) -> None:
    """Set the generator of a device to a state that device_rng_state returned for its kind."""
    if is_tpu(device):
        _tpu_generator(device).set_state(state)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)
    elif device.type == "cuda":
        torch.cuda.set_rng_state(state, device)


def cpu_name() -> str:
    """Return the processor's model and the number of threads that PyTorch uses."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line for line in info.read_text().splitlines() if line.startswith("model name"))
        model = next(lines, f":{model}").split(":", 1)[1].strip()
    return f"{model} ({torch.get_num_threads()} of {os.cpu_count()} threads)"


def available_kinds() -> list[str]:
    """Return the kinds of accelerators that this machine has, best first; the last one is `cpu`."""
    kinds = []
    if torch.cuda.is_available():
        kinds.append("cuda")
    if torch.backends.mps.is_available():
        kinds.append("mps")
    if _has_tpu():
        kinds.append("tpu")
    return [*kinds, "cpu"]


def is_tpu(device: torch.device) -> bool:
    """Return whether a device is a TPU, which torch_tpu gives the device type `tpu`."""
    return device.type == "tpu"


def _has_tpu() -> bool:
    """Return whether torch_tpu is installed and finds a TPU."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return current is not None and is_tpu(current)


def _require_tpu() -> None:
    """Raise Unavailable where torch_tpu is not installed, or finds no device."""
    if _has_tpu():
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


def _tpu_name(device: torch.device) -> str:
    """Return a TPU's generation and its package, for example `TPU v6e (torch_tpu 0.2.0)`."""
    chip = torch.get_device_module(device).get_device_name(device)
    return f"{chip} (torch_tpu {version('torch_tpu')})"


def _tpu_generator(device: torch.device) -> torch.Generator:
    """Return torch_tpu's generator of a device."""
    # From torch 2.13 on, torch_tpu's get_rng_state() is private to PyTorch.
    return torch.get_device_module(device).default_generators[device.index or 0]
