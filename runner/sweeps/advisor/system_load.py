"""Measure how busy other programs keep this machine: speeds measured meanwhile are unreliable."""

import os
from contextlib import suppress
from time import perf_counter

import psutil
import torch

MEASURED_SECONDS = 0.5
"""Time that a measurement takes: the kernel counts in hundredths of a second."""


def other_programs_load(device: torch.device) -> float:
    """Return the share of this process's processors that other programs keep busy, from 0 to 1.

    This process and its descendants do not count. The share is 0 for a device that is no CPU.

    Args:
        device: that trials run on.
    """
    # The processors' load changes a CPU's step times only.
    if device.type != "cpu":
        return 0.0
    own_before = _own_cpu_seconds()
    began = perf_counter()
    percents = psutil.cpu_percent(MEASURED_SECONDS, percpu=True)
    seconds = perf_counter() - began
    # This command's tracking writer may be at work meanwhile.
    own_seconds = _own_cpu_seconds() - own_before
    # Linux only: elsewhere a process may use every processor.
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
        percents = [percent for n, percent in enumerate(percents) if n in usable]
    busy = sum(percents) / 100 - own_seconds / seconds
    return min(1.0, max(0.0, busy / max(len(percents), 1)))


def _own_cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and its descendants."""
    process = psutil.Process()
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        # A child may end between the listing and the reading.
        with suppress(psutil.Error):
            times = member.cpu_times()
            total += times.user + times.system
    return total
