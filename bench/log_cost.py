"""What does logging seven values per step cost the training loop?

    python -m bench.log_cost [--steps 10000] [--rounds 5]

Compares, in turn (A B C A B C ...), a loop of small steps that keeps its records in a list with
the same loop logging to a SQLite store of MLflow: through the journal and the writer process,
through a thread of the same interpreter that sends the same batches, and by synchronous calls.
Writes bench/results/log_cost.md.
"""

import argparse
import os
import platform
import queue
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from runner.tracking.mlflow import MlflowTracker
from runner.tracking.tracker import RunInfo
from runner.tracking.writer.store import MAX_POINTS, Store
from runner.tracking.writer_process import shared_writer

KEYS = [f"train/metric_{number}" for number in range(7)]
BLOCK = 20
RESULT = Path(__file__).parent / "results" / "log_cost.md"
Log = Callable[[int, int, dict[str, float]], None]


@dataclass
class Cost:
    """Milliseconds per step in the loop, by the clock and of this process's CPU; seconds to
    close; milliseconds per step of the writer process's CPU, until all is stored."""

    wall: float
    cpu: float
    close: float
    writer: float = 0.0


def measure(steps: int, log: Log, close: Callable[[], None]) -> Cost:
    """Runs the loop: each step multiplies small matrices (0.3 ms of CPU), then logs."""
    left, right = torch.randn(160, 160), torch.randn(160, 160)
    wall, cpu = time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        for _ in range(3):
            left = torch.mm(left, right).tanh_()
        value = 1 / step
        log(step, time.time_ns() // 1_000_000, {key: value + len(key) for key in KEYS})
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    start = time.perf_counter()
    close()
    return Cost(wall / steps * 1e3, cpu / steps * 1e3, time.perf_counter() - start)


def in_list(steps: int, folder: Path) -> Cost:
    kept: list[object] = []
    return measure(steps, lambda *record: kept.append(record), lambda: None)


def with_process(steps: int, folder: Path, block: int) -> Cost:
    """Record as the runner does. `block`: steps between hand-overs, as with train.log_every."""
    tracker = MlflowTracker(uri=f"sqlite:///{folder}/mlflow.db")
    tracker.open(RunInfo(Path(tempfile.mkdtemp(dir=folder))))
    while tracker.run_id is None:  # the start of the writer is measured apart
        tracker.check()
        time.sleep(0.05)
    kept: list[tuple[int, int, dict[str, float]]] = []

    def log(*record) -> None:
        kept.append(record)
        if len(kept) == block:
            tracker.metrics_many(kept)
            kept.clear()

    def close() -> None:
        tracker.metrics_many(kept)
        tracker.close("FINISHED")

    before = writer_cpu()
    cost = measure(steps, log, close)
    return replace(cost, writer=(writer_cpu() - before) / steps * 1e3)


def writer_cpu() -> float:
    """Seconds of CPU that the writer process has used."""
    process = shared_writer().process
    assert process is not None
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def with_thread(steps: int, folder: Path) -> Cost:
    """Send batches from a queue by a thread of this interpreter."""
    store = Store(f"sqlite:///{folder}/mlflow.db")
    run_id = store.create_run(store.experiment("precision-runner"), None, 0, {})
    records: queue.SimpleQueue = queue.SimpleQueue()

    def send() -> None:
        points, record = [], records.get()
        while record is not None:
            step, time_ms, values = record
            points += [(key, value, time_ms, step) for key, value in values.items()]
            if len(points) > MAX_POINTS - len(KEYS):
                store.log_points(run_id, points)
                points = []
            record = records.get()
        store.log_points(run_id, points)
        store.end_run(run_id, "FINISHED", time.time_ns() // 1_000_000)

    thread = threading.Thread(target=send)
    thread.start()

    def close() -> None:
        records.put(None)
        thread.join()

    return measure(steps, lambda *record: records.put(record), close)


def synchronous(steps: int, folder: Path) -> Cost:
    """mlflow.log_metrics in every step; only 200 steps, it is slow."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.start_run()
    return measure(200, lambda step, _, values: mlflow.log_metrics(values, step), mlflow.end_run)


WAYS: dict[str, Callable[[int, Path], Cost]] = {
    "list": in_list,
    "journal + process, a write each step": lambda steps, folder: with_process(steps, folder, 1),
    f"journal + process, a write every {BLOCK} steps": lambda steps, folder: with_process(
        steps, folder, BLOCK
    ),
    "batches from a thread": with_thread,
    "mlflow.log_metrics, synchronous": synchronous,
}


def table(costs: dict[str, list[Cost]]) -> str:
    """One row per way: medians over the rounds of the difference from the same round's list."""
    rows = ["| way | loop ms/step | over the list (range) | own CPU | writer's CPU | close s |"]
    rows.append("|---|---|---|---|---|---|")
    for way, found in costs.items():
        pairs = list(zip(found, costs["list"], strict=True))
        extra = [cost.wall - base.wall for cost, base in pairs]
        cpu = statistics.median(cost.cpu - base.cpu for cost, base in pairs)
        wall = statistics.median(cost.wall for cost in found)
        close = statistics.median(cost.close for cost in found)
        writer = statistics.median(cost.writer for cost in found)
        rows.append(
            f"| {way} | {wall:.3f} | {statistics.median(extra):+.3f} "
            f"({min(extra):+.3f} … {max(extra):+.3f}) | {cpu:+.3f} | {writer:.3f} | {close:.2f} |"
        )
    return "\n".join(rows)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "mlflow"))
    load = f"load average {os.getloadavg()[0]:.1f}"
    python = f"Python {platform.python_version()}"
    return f"{names[0]}, {os.cpu_count()} cores, {load}; {python}, {packages}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
    for number in range(args.rounds + 1):
        for way, run in WAYS.items():
            cost = run(args.steps if number else 200, folder)
            if number:  # the first round, a short one, warms up
                costs[way].append(cost)
    shutil.rmtree(folder)
    text = (
        "# What logging seven values per step costs the loop\n\n"
        f"`python -m bench.log_cost --steps {args.steps} --rounds {args.rounds}` · {machine()}\n\n"
        f"{table(costs)}\n\n"
        "Medians over interleaved rounds, in ms per step; SQLite store; one thread for torch. "
        "\"Own CPU\" is the training process's, over the list. The writer's CPU is spent on "
        "another core where one is idle; where none is, the loop waits for its share of it. The "
        "synchronous way runs 200 steps a round. Close waits until what is left of "
        f"{7 * args.steps:,} points is stored.\n"
    )
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
