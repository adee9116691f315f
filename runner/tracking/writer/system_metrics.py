"""Sample the machine's load while a run trains, for MLflow's page "System metrics".

MLflow's own monitors read it, under the names that the page shows. The writer's loop takes the
samples, without a thread.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

MLFLOW_MONITORS = (
    ("cpu_monitor", "CPUMonitor"),
    ("disk_monitor", "DiskMonitor"),
    ("network_monitor", "NetworkMonitor"),
    ("gpu_monitor", "GPUMonitor"),
    ("rocm_monitor", "ROCMMonitor"),
)
SYSTEM_PREFIX = "system/"


class SystemMetrics:
    """Samples of one machine at an interval.

    A monitor that is not available here, because a package (psutil, nvidia-ml-py, pyrsmi) or a GPU
    is missing, is left out. No method raises.

    Args:
        interval: seconds between samples; the first is due after one interval.
        process: id of a process whose own use is sampled, too: the trainer's.
        now: the present time, in seconds of the clock that `is_due` is called with.

    Attributes:
        count: number of samples so far, which is the step of the next one.
    """

    def __init__(self, interval: float, process: int, now: float) -> None:
        self.interval = interval
        self.count = 0
        self._next = now + interval
        self._readers: list[Callable[[], dict[str, float]]] = []
        makers = [partial(_monitor_reader, module, kind) for module, kind in MLFLOW_MONITORS]
        makers.append(partial(_process_reader, process))
        for make in makers:
            with suppress(Exception):
                reader = make()
                # CPU percentages are of the time since the last reading; the first one is 0.
                reader()
                self._readers.append(reader)

    def is_due(self, now: float) -> bool:
        """Return whether it is time for a sample, and if so schedule the next one.

        After a pause there is one sample, not all that were missed.
        """
        if now < self._next or not self._readers:
            return False
        self._next = now + self.interval
        return True

    def sample(self) -> dict[str, float]:
        """Return values by metric name: percentages, megabytes (10^6 bytes), watts.

        Empty if nothing can be read.
        """
        self.count += 1
        values: dict[str, float] = {}
        for reader in self._readers:
            with suppress(Exception):  # the process has ended, or a driver does not answer
                values |= {SYSTEM_PREFIX + name: float(value) for name, value in reader().items()}
        return values


def _monitor_reader(module: str, kind: str) -> Callable[[], dict[str, float]]:
    """Return a function that reads one of MLflow's monitors.

    Raises:
        Exception: it is not available; ImportError and RuntimeError in MLflow 3.17.
    """
    monitor: Any = getattr(import_module(f"mlflow.system_metrics.metrics.{module}"), kind)()

    def read() -> dict[str, float]:
        monitor.collect_metrics()
        values = monitor.aggregate_metrics()
        monitor.clear_metrics()
        return values

    return read


def _process_reader(number: int) -> Callable[[], dict[str, float]]:
    """Return a function that reads one process's CPU time and resident set.

    CPU time is in percent of one core, above 100 if several are used.
    """
    psutil = import_module("psutil")
    process = psutil.Process(number)

    def read() -> dict[str, float]:
        with process.oneshot():
            return {
                "process_cpu_percentage": process.cpu_percent(),
                "process_memory_megabytes": process.memory_info().rss / 1e6,
            }

    return read
