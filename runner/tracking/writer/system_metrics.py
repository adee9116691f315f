"""What the machine does while a run trains, as MLflow's own monitors read it, under the names that
its page "System metrics" shows. Sampled in the writer's loop, without a thread."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

MONITORS = (
    ("cpu_monitor", "CPUMonitor"),
    ("disk_monitor", "DiskMonitor"),
    ("network_monitor", "NetworkMonitor"),
    ("gpu_monitor", "GPUMonitor"),
    ("rocm_monitor", "ROCMMonitor"),
)
PREFIX = "system/"


class SystemMetrics:
    """Samples of one machine at an interval. A monitor that is not available here, for want of a
    package (psutil, nvidia-ml-py, pyrsmi) or of a GPU, is left out; nothing here raises.

    Args:
        interval: seconds between samples; the first is due after one.
        process: id of a process whose own use is sampled too: the trainer's.
        now: what `due` will be asked with, at the start.

    Attributes:
        count: of samples so far, the step to log the next one at.
    """

    def __init__(self, interval: float, process: int | None = None, now: float = 0.0) -> None:
        self.interval, self.count = interval, 0
        self._next = now + interval
        self._readers: list[Callable[[], dict[str, float]]] = []
        for module, kind in MONITORS:
            self._add(lambda module=module, kind=kind: _monitor(module, kind))
        if process is not None:
            self._add(lambda: _process(process))

    def _add(self, make: Callable[[], Callable[[], dict[str, float]]]) -> None:
        with suppress(Exception):
            reader = make()
            reader()  # a share of the CPU's time is of the time since it was last asked
            self._readers.append(reader)

    def due(self, now: float) -> bool:
        """Whether it is time for a sample, in seconds of any one clock. After a pause there is one
        sample, not all that were missed."""
        if now < self._next or not self._readers:
            return False
        self._next = now + self.interval
        return True

    def sample(self) -> dict[str, float]:
        """Values by metric name: percentages, megabytes (10^6 bytes), watts. Empty where nothing
        can be read."""
        self.count += 1
        return {PREFIX + name: float(value) for name, value in self._read()}

    def _read(self) -> Iterator[tuple[str, float]]:
        for reader in self._readers:
            with suppress(Exception):  # a process that ended, a driver that hangs up
                yield from list(reader().items())


def _monitor(module: str, kind: str) -> Callable[[], dict[str, float]]:
    """Reads one of MLflow's monitors.

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


def _process(number: int) -> Callable[[], dict[str, float]]:
    """Reads one process: its share of one core's time, above 100 with several, and its resident
    set."""
    psutil = import_module("psutil")
    process = psutil.Process(number)

    def read() -> dict[str, float]:
        with process.oneshot():
            return {
                "process_cpu_percentage": process.cpu_percent(),
                "process_memory_megabytes": process.memory_info().rss / 1e6,
            }

    return read
