"""What other programs take of this machine, which speeds measured beside them suffer from."""

import os
from contextlib import suppress
from time import perf_counter

import psutil
import torch

SECONDS = 0.5
"""That a look takes: the kernel counts in hundredths."""


def other_programs_load(device: torch.device) -> float:
    """Share of the processors that this process may use, and that programs which are not of its
    own tree keep busy while it waits; 0 where the device is no CPU."""
    if device.type != "cpu":
        return 0.0
    ours, began = _spent(), perf_counter()
    shares = psutil.cpu_percent(SECONDS, percpu=True)
    seconds, ours = perf_counter() - began, _spent() - ours  # the tracking's writer may be at work
    if hasattr(os, "sched_getaffinity"):  # Linux
        shares = [share for n, share in enumerate(shares) if n in os.sched_getaffinity(0)]
    taken = sum(shares) / 100 - ours / seconds
    return min(1.0, max(0.0, taken / max(len(shares), 1)))


def _spent() -> float:
    """Seconds on processors so far, of this process and those below it."""
    here, spent = psutil.Process(), 0.0
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.Error):  # ended meanwhile
            times = process.cpu_times()
            spent += times.user + times.system
    return spent
