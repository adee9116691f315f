"""The device of a run, what it is called, and how much memory the run took on it."""

import ctypes
import gc
import os
import platform
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from runner.utils import tpu
from runner.utils.errors import ConfigError, Unavailable
from runner.utils.tensors import MIB

KINDS = ("auto", "cpu", "cuda", "mps", "tpu")
_COUNTED = ("cuda", "tpu")  # whose allocator keeps a peak


def available_kinds() -> list[str]:
    """Kinds of accelerators that this machine has, best first."""
    kinds = []
    if torch.cuda.is_available():
        kinds.append("cuda")
    if torch.backends.mps.is_available():
        kinds.append("mps")
    if tpu.is_available():
        kinds.append("tpu")
    return [*kinds, "cpu"]


_runs = count()


@dataclass(frozen=True)
class Accelerator:
    """A device and its questions."""

    device: torch.device

    @property
    def kind(self) -> str:
        """What `accelerator=` calls it."""
        return tpu.accelerator_kind(self.device)

    @property
    def name(self) -> str:
        """The device's own name, for example `NVIDIA H200` or the processor's model."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        if tpu.is_tpu(self.device):
            return tpu.device_name(self.device)
        return cpu_name() if self.device.type == "cpu" else "Apple GPU"

    def synchronize(self) -> None:
        """Wait for the device's queue; at a run's borders, never in a step."""
        if self.device.type == "xla":
            tpu.launch_operations(self.device, wait=True)
        elif self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def reset_peak_memory(self) -> None:
        """Forget what earlier runs of the process took, so that each run reports its own."""
        if next(_runs):  # the first has nothing to forget, and a collection takes 0.2 s
            gc.collect()
        if self.device.type in _COUNTED:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(self.device)
        elif self.device.type == "cpu" and sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")

    def peak_memory_mib(self) -> float:
        """Peak since the reset, in MiB: allocated device memory, or on a CPU the resident set of
        the whole process, libraries included. torch_xla's is that since the process began."""
        if self.device.type in _COUNTED:
            return torch.accelerator.max_memory_allocated(self.device) / MIB
        if self.device.type == "xla" and (peak := tpu.peak_bytes(self.device)) is not None:
            return peak / MIB
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory() / MIB
        return resident_peak_mib()


def resident_peak_mib() -> float:
    """The process's peak resident set in MiB."""
    if sys.platform == "linux":
        with open("/proc/self/status") as status:  # noqa: PTH123 - a third of Path's cost
            for line in status:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


def choose_accelerator(name: str = "auto", index: int = 0) -> Accelerator:
    """Return the accelerator of a kind.

    Args:
        name: one of KINDS; auto takes the best one of this machine.
        index: which device of that kind, from 0.

    Raises:
        ConfigError: the kind is not known.
        Unavailable: this machine lacks it.
    """
    if name not in KINDS:
        raise ConfigError(f"accelerator.name={name} is not known. Allowed: {', '.join(KINDS)}.")
    here = available_kinds()
    kind = here[0] if name == "auto" else name
    if kind == "tpu":
        tpu.import_package()
    elif kind not in here:
        raise Unavailable(
            f"accelerator={kind} is not on this machine (torch {torch.__version__} finds: "
            f"{', '.join(here)}).",
            f"Type accelerator={here[0]}.",
        )
    count = {"cuda": torch.cuda.device_count, "tpu": tpu.device_count}.get(kind, lambda: 1)()
    if not 0 <= index < count:
        raise Unavailable(
            f"accelerator.index={index}: this machine has {count} {kind} device(s).",
            "Count from 0.",
        )
    if kind == "tpu":
        return Accelerator(tpu.use_device(index))
    return Accelerator(torch.device(kind, index) if kind == "cuda" else torch.device(kind))


def rng_state(device: torch.device) -> Tensor | None:
    """The state of the device's own generator; None for a CPU, whose generator is torch's."""
    if tpu.is_tpu(device):
        return tpu.rng_state(device)
    if device.type == "mps":
        return torch.mps.get_rng_state()
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Take back what rng_state gave of a device of the same kind."""
    if tpu.is_tpu(device):
        tpu.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)
    elif device.type == "cuda":
        torch.cuda.set_rng_state(state, device)


def cpu_name() -> str:
    """The processor's model and the number of threads that PyTorch uses."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line for line in info.read_text().splitlines() if line.startswith("model name"))
        model = next(lines, f":{model}").split(":", 1)[1].strip()
    return f"{model} ({torch.get_num_threads()} of {os.cpu_count()} threads)"
