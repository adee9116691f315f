"""Measure how busy other programs keep the processors, which changes a CPU's step times."""

import os
from contextlib import suppress
from time import perf_counter

import psutil

BUSY_SHARE = 0.25
"""Share of the processors used by other programs above which speeds are doubtful."""


class OtherPrograms:
    """The programs beside this process and its descendants, watched from now on."""

    def __init__(self) -> None:
        self._before = busy_seconds() - own_seconds()
        self._began = perf_counter()

    def share(self) -> float:
        """Return the share of this process's processors that they have kept busy, from 0 to 1."""
        busy = busy_seconds() - own_seconds() - self._before
        return min(1.0, max(0.0, busy / (perf_counter() - self._began) / len(_processors())))


def busy_sentence(share: float) -> str:
    """Return the reservation about speeds that a share gives reason for, empty for a small one."""
    if share <= BUSY_SHARE:
        return ""
    return (
        f"Other programs kept {share:.0%} of the processors busy, so that no difference in speed "
        "counts as measured: repeat it on a quiet machine."
    )


def busy_seconds() -> float:
    """Return the seconds so far in which this process's processors did anything."""
    times = psutil.cpu_times(percpu=True)
    # Linux counts the time of guests in user and nice, too.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return sum(
        sum(times[n]) - sum(getattr(times[n], field, 0.0) for field in idle) for n in _processors()
    )


def _processors() -> set[int]:
    # Linux only: elsewhere a process may use every processor.
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return {*range(psutil.cpu_count() or 1)}


def own_seconds() -> float:
    """Return the CPU seconds so far of this process and its descendants, ended ones included."""
    process = psutil.Process()
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        # A child may end between the listing and the reading.
        with suppress(psutil.Error):
            times = member.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
