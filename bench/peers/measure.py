"""Start the contenders, let them train in turn, and read their clocks."""

import json
import math
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from bench.peers.contenders import FOLDER
from bench.peers.jobs import Job
from bench.peers.worker import PROFILE, Order

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds that a contender may be silent
IDLE = 0.02  # CPU seconds in half a second of a process that has nothing to do
DTYPES = {"32-true": "float32", "bf16-mixed": "bfloat16", "16-mixed": "float16"}
CLOSE = {"cpu": 1e-5, "cuda": 1e-3}  # largest relative difference of the first losses


@dataclass(frozen=True)
class Row:
    """Measurements of one contender.

    Attributes:
        void: why the row is not compared; empty where it is.
        dtype: in which it computed.
        difference: largest relative difference of the first losses from raw's.
        cpu, wall: seconds per step of each segment.
        peak: greatest resident memory, in bytes; device_peak: allocated on the device.
        writer_cpu: CPU seconds per step of the processes that it started; writer_peak: bytes.
    """

    job: str
    precision: str
    contender: str
    dtype: str
    difference: float
    void: str = ""
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    peak: int = 0
    device_peak: int = 0
    writer_cpu: float = 0.0
    writer_peak: int = 0


class Worker:
    """A contender that runs."""

    def __init__(self, python: Path, order: Order, folder: Path, *options: str, **env: str) -> None:
        self.order, self.log = order, folder / f"{order.contender}.log"
        words = [python, *options, "-m", "bench.peers.worker", json.dumps(order._asdict())]
        own = {"PYTHONPATH": str(ROOT), FOLDER: str(folder), **env}
        self.began = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | own,
                cwd=folder,
            )

    def read(self) -> dict[str, Any]:
        """Return the next report.

        Raises:
            RuntimeError: there is none.
        """
        assert self.process.stdout is not None
        ready = select.select([self.process.stdout], [], [], LIMIT)[0]
        if not (line := self.process.stdout.readline() if ready else ""):
            self.process.kill()
            end = "\n".join(self.log.read_text().splitlines()[-15:])
            raise RuntimeError(f"{self.order} gave no report:\n{end}")
        return json.loads(line)

    def resume(self) -> None:
        """Let the contender train on from its gate."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End the contender at its gate, where it reads the end of its input."""
        with suppress(BrokenPipeError):
            self.process.communicate(timeout=LIMIT)

    def finish(self) -> None:
        """Let the training end by itself.

        Raises:
            RuntimeError: it does not end with success.
        """
        self.resume()
        self.close()
        if self.process.returncode:
            raise RuntimeError(f"{self.order} ended with {self.process.returncode}: {self.log}")

    def children_usage(self) -> tuple[float, int]:
        """Return CPU seconds and resident bytes of the processes that the contender started."""
        cpu, memory = 0.0, 0
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                cpu, memory = cpu + times.user + times.system, memory + child.memory_info().rss
        return cpu, memory

    def wait_for_idle_children(self) -> tuple[float, int]:
        """Wait until the processes that the contender started are idle; return their usage."""
        before, deadline = -1.0, time.monotonic() + LIMIT
        while (now := self.children_usage())[0] - before > IDLE and time.monotonic() < deadline:
            before = now[0]
            time.sleep(0.5)
        return now


@contextmanager
def running_workers(
    python: Path, orders: Sequence[Order], folder: Path
) -> Iterator[dict[str, Worker]]:
    """Run contenders at once; end those that still run."""
    started = {order.contender: Worker(python, order, folder) for order in orders}
    try:
        yield started
    finally:
        for worker in started.values():
            if worker.process.poll() is None:
                worker.close()


def measure_job(
    python: Path, job: Job, precision: str, names: Sequence[str], device: str, folder: Path
) -> list[Row]:
    """Measure the contenders of a job, a segment each in turn; who begins changes."""
    orders = [
        Order(name, job.name, precision, device, job.steps, job.steps, job.rounds) for name in names
    ]
    with running_workers(python, orders, folder) as running:
        first = {name: worker.read() for name, worker in running.items()}
        rows = {name: compare_losses(job, precision, name, first, device) for name in names}
        for name, row in rows.items():
            if row.void:
                running.pop(name).close()
        before = {name: worker.wait_for_idle_children()[0] for name, worker in running.items()}
        for turn in range(job.rounds):
            order = [*running][turn % len(running) :] + [*running][: turn % len(running)]
            for name in order:
                running[name].resume()
                report = running[name].read()
                rows[name].cpu.append(report["cpu"] / job.steps)
                rows[name].wall.append(report["wall"] / job.steps)
                first[name] = report
        for name, worker in running.items():
            cpu, memory = worker.wait_for_idle_children()
            rows[name] = replace(
                rows[name],
                peak=first[name]["peak"],
                writer_peak=memory,
                device_peak=first[name].get("device_peak", 0),
                writer_cpu=(cpu - before[name]) / (job.rounds * job.steps),
            )
            worker.finish()
    return list(rows.values())


def compare_losses(job: Job, precision: str, name: str, first: dict[str, Any], device: str) -> Row:
    """Return a row that says whether the first losses and the dtype are those asked for."""
    mine, raw = first[name], first["raw"]
    pairs = zip(mine["first"], raw["first"], strict=True)
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    difference = next((d for d in differences if math.isnan(d)), max(differences))
    void = ""
    if mine["dtype"] != DTYPES[precision]:
        void = f"computes in {mine['dtype']}"
    elif not difference <= CLOSE[device]:
        void = f"its first losses differ by {difference:.1e}"
    return Row(job.name, precision, name, mine["dtype"], difference, void)


def measure_start(
    python: Path, job: Job, names: Sequence[str], device: str, folder: Path, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Measure CPU and wall seconds from exec until the second step's loss.

    By then the first step is finished, with all that a contender does between two. Contenders run
    in turn, after a round that is not counted, which also creates the store.
    """
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names:
            worker = Worker(python, Order(name, job.name, "32-true", device, 1, 1, 1), folder)
            report = worker.read()
            _run_one_segment(worker)
            if turn:
                results[name].append((report["total_cpu"], report["now"] - worker.began))
    return results


def profile_steps(
    python: Path, job: Job, precision: str, device: str, folder: Path
) -> dict[str, Path]:
    """Return the files with cProfile's statistics of one segment of raw and of the runner."""
    results = {}
    for name in ("raw", "runner"):
        path = results[name] = folder / f"{name}.prof"
        order = Order(name, job.name, precision, device, job.steps, job.steps, 1)
        worker = Worker(python, order, folder, **{PROFILE: str(path)})
        worker.read()
        _run_one_segment(worker)
    return results


def _run_one_segment(worker: Worker) -> None:
    """Run the one segment of a worker, then end it."""
    worker.resume()
    worker.read()
    worker.finish()


def import_times(python: Path, job: Job, device: str, folder: Path) -> dict[str, dict[str, float]]:
    """Return the seconds that importing each package takes by itself, by contender."""
    results: dict[str, dict[str, float]] = {}
    for name in ("raw", "runner"):
        order = Order(name, job.name, "32-true", device, 1, 1, 1)
        worker = Worker(python, order, folder, "-X", "importtime")
        worker.read()
        _run_one_segment(worker)
        packages = results[name] = {}
        for line in worker.log.read_text().splitlines():
            if line.startswith("import time:") and "imported package" not in line:
                alone, _, module = line.removeprefix("import time:").split("|")
                package = module.strip().partition(".")[0]
                packages[package] = packages.get(package, 0.0) + int(alone) / 1e6
    return results


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is deleted after use."""
    return tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True)
