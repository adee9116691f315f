"""The memory that a device or the process has, and how much of it is taken."""

import resource
from contextlib import suppress
from pathlib import Path

import psutil
import torch

USABLE_MEMORY_SHARE = 0.8
"""Share of the free memory that an estimate may use: allocators leave gaps, libraries load late."""
_CGROUPS = ("memory.max", "memory/memory.limit_in_bytes")  # of version 2 and of version 1


def memory_limit(device: torch.device) -> tuple[float, float]:
    """Return the bytes in use, this run's tensors included, and the tightest limit, in bytes."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        # Blocks that this process's allocator holds without a tensor in them can be used again.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return whole - free - unused, whole
    memory = psutil.Process().memory_info()
    # `ulimit -v` limits addresses, not pages that are in memory: it is compared with those.
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        return memory.vms, soft
    whole = psutil.virtual_memory().total
    for name in _CGROUPS:
        with suppress(OSError, ValueError):  # no such file, or "max" in it
            whole = min(whole, int(Path("/sys/fs/cgroup", name).read_text()))
    return memory.rss, whole


def free_memory(device: torch.device) -> float:
    """Return the bytes that a run may still take: the tighter of its limit and the machine's."""
    taken, whole = memory_limit(device)
    # The driver of a GPU reports what other processes take, too.
    if device.type == "cuda":
        return whole - taken
    return max(0, min(whole - taken, psutil.virtual_memory().available))
