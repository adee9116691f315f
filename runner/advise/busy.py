"""What other programs take of this machine, which speeds measured beside them suffer from."""

import os
from statistics import fmean

import psutil
import torch

SECONDS = 0.5
"""That a look takes: the kernel counts in hundredths."""


def busy(device: torch.device) -> float:
    """Share of the processors that this process may use, and that are busy while it waits; 0 where
    the device is no CPU."""
    if device.type != "cpu":
        return 0.0
    shares = psutil.cpu_percent(SECONDS, percpu=True)
    if hasattr(os, "sched_getaffinity"):  # Linux
        shares = [share for n, share in enumerate(shares) if n in os.sched_getaffinity(0)]
    return fmean(shares) / 100 if shares else 0.0
