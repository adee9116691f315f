"""What does recording every step cost the training loop, and does every point arrive?

    python -m bench.record [--steps 500] [--rounds 5] [--close 10000] [--long 100000]

1. A loop of 20 ms steps, in turn (A B C A B C ...): its records are appended to a list, recorded
   with the runner's own MetricLogger to MLflow on SQLite and over HTTP, sent by a thread of the
   same interpreter, and logged by synchronous calls of mlflow. Five metrics in every step: loss,
   learning rate, gradient norm, loss scale, overflow.
2. A run of --close steps of 1 ms: how long does it take to close, and is every point there?
3. A run of --long steps: does a step's time or the memory grow?

Writes bench/results/record.md.
"""

import math
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from bench.common import parse_options, run_in_turn, spread, table, versions, write
from bench.training import CPU
from runner.core.base.accelerators import Accelerator
from runner.core.base.layout import HISTORY
from runner.core.loop.callback import RunHandle
from runner.core.loop.step_records import StepRecord
from runner.core.loop.train_state import TrainState
from runner.core.record.tracker import RunInfo, RunOutput
from runner.output.console import plain_console
from runner.precision.registry import load_precision
from runner.tracking import history
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.writer.store import MAX_POINTS, Store
from runner.tracking.writer_process import shared_writer
from runner.training.callbacks.runner_callbacks import MetricLogger
from runner.training.tasks.regression import Regression

BLOCK = 20
METRICS = {
    "train/loss": "loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "loss_scale/value": "loss_scale",
    "loss_scale/overflow": "overflow",
}
SPECIAL_LOSSES = {7: math.nan, 11: math.inf, 13: -math.inf}
Block = tuple[StepRecord, ...]


class Recording(NamedTuple):
    """What takes blocks of records, and what ends it."""

    record: Callable[[Block], None]
    close: Callable[[], None]


def step_record(step: int) -> StepRecord:
    """Return made-up values of one step; each 500th overflows, so that the loss scale changes."""
    loss = SPECIAL_LOSSES.get(step, 1 / step)
    overflow = float(step % 500 == 0)
    now = time.time_ns() // 1_000_000
    scale = 2.0 ** (16 - step // 500 % 8)
    return StepRecord(step, now, 1, loss, 1e-3, 0.5 / step, 20.0, 64, scale, overflow, step // 500)


def run_loop(
    steps: int, work: Callable[[], None], record: Callable[[Block], None]
) -> Iterator[tuple[float, float]]:
    """Run steps in blocks; yield wall and CPU seconds of each block, with its recording."""
    block: list[StepRecord] = []
    wall, cpu = time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        work()
        block.append(step_record(step))
        if step % BLOCK == 0:
            record(tuple(block))
            block.clear()
            now = time.perf_counter(), time.process_time()
            yield now[0] - wall, now[1] - cpu
            wall, cpu = now


def matrix_products(milliseconds: float) -> Callable[[], None]:
    """Return work of about this long on one thread."""
    left, right = torch.randn(192, 192), torch.randn(192, 192)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right)

    products(100)
    start = time.perf_counter()
    products(200)
    each = (time.perf_counter() - start) / 200
    return partial(products, max(1, round(milliseconds / 1e3 / each)))


@contextmanager
def stores(folder: Path) -> Iterator[dict[str, str]]:
    """Provide the URIs of a SQLite store, and of a server with one worker on another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [
        "--host=127.0.0.1",
        f"--port={port}",
        "--workers=1",
        f"--backend-store-uri=sqlite:///{folder}/server.db",
        f"--artifacts-destination={folder}/artifacts",
    ]
    command = [sys.executable, "-m", "mlflow", "server", *options]
    log = (folder / "server.log").open("wb")
    server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield {"SQLite": f"sqlite:///{folder}/mlflow.db", "HTTP": f"http://127.0.0.1:{port}"}
    finally:
        os.killpg(server.pid, 9)
        server.wait()
        log.close()


def open_run(uri: str, folder: Path) -> tuple[MlflowTracker, Callable[[Block], None]]:
    """Return a run whose writer process is ready: its start is not measured here."""
    tracker = MlflowTracker(uri=uri)
    tracker.open(RunInfo(Path(tempfile.mkdtemp(dir=folder))))
    while tracker.run_id is None:
        tracker.check()
        time.sleep(0.05)
    precision = load_precision("32-true")
    state = TrainState(nn.Linear(2, 2), precision, Regression(), precision.scale(CPU), [], CPU)
    logger = MetricLogger(tracker, state, Accelerator(CPU))
    handle = RunHandle("", state, RunOutput(folder, plain_console(), tracker))
    return tracker, lambda records: logger.on_steps(records, handle)


def in_list() -> Recording:
    """Append the records to a list."""
    records: list[Block] = []
    return Recording(records.append, records.clear)


def in_runner(uri: str, folder: Path) -> Recording:
    """Record as the runner does: into the journal, which a writer process uploads."""
    tracker, log_steps = open_run(uri, folder)
    return Recording(log_steps, lambda: tracker.close("FINISHED"))


def in_thread(uri: str) -> Recording:
    """Send batches from a queue by a thread of this interpreter."""
    store = Store(uri)
    run_id = store.create_run(store.experiment("precision-runner"), None, 0, {})
    blocks: queue.SimpleQueue[Block | None] = queue.SimpleQueue()

    def send() -> None:
        points: list[tuple[str, float, int, int]] = []
        while (block := blocks.get()) is not None:
            for record in block:
                points += [(key, v, record.time_ms, record.step) for key, v in values(record)]
            if len(points) > MAX_POINTS - BLOCK * len(METRICS):
                store.log_points(run_id, points)
                points = []
        store.log_points(run_id, points)
        store.end_run(run_id, "FINISHED", time.time_ns() // 1_000_000)

    thread = threading.Thread(target=send)
    thread.start()

    def close() -> None:
        blocks.put(None)
        thread.join()

    return Recording(blocks.put, close)


def in_calls(uri: str) -> Recording:
    """Call mlflow.log_metrics for each step, and wait for the store."""
    import mlflow

    mlflow.set_tracking_uri(uri)
    mlflow.start_run()

    def record(block: Block) -> None:
        for one in block:
            mlflow.log_metrics(dict(values(one)), one.step)

    return Recording(record, mlflow.end_run)


def values(record: StepRecord) -> list[tuple[str, float]]:
    """Return the metrics of a step."""
    return [(key, getattr(record, name)) for key, name in METRICS.items()]


def overhead_table(uris: dict[str, str], folder: Path, steps: int, rounds: int) -> str:
    """Measure part 1."""
    sqlite = f"sqlite:///{folder}/others.db"
    ways: dict[str, Callable[[], Recording]] = {
        "a list": in_list,
        "MLflow, SQLite": partial(in_runner, uris["SQLite"], folder),
        "MLflow, HTTP": partial(in_runner, uris["HTTP"], folder),
        "SQLite, by a thread": partial(in_thread, sqlite),
        "SQLite, by mlflow.log_metrics": partial(in_calls, sqlite),
    }
    work = matrix_products(20)

    def step_ms(start: Callable[[], Recording]) -> tuple[float, float]:
        recording = start()
        walls, cpus = zip(*run_loop(steps, work, recording.record), strict=True)
        recording.close()
        return median(walls) / BLOCK * 1e3, median(cpus) / BLOCK * 1e3

    times = run_in_turn({name: partial(step_ms, start) for name, start in ways.items()}, rounds)
    rows = []
    for name, durations in times.items():
        pairs = list(zip(durations, times["a list"], strict=True))
        columns = [
            spread([wall for wall, _ in durations], ".2f"),
            spread([own[0] - base[0] for own, base in pairs], "+.3f"),
            spread([own[1] - base[1] for own, base in pairs], "+.3f"),
            spread([(own[0] / base[0] - 1) * 100 for own, base in pairs], "+.2f"),
        ]
        rows.append([name, *columns])
    head = ["ms per step", "wall ms over the list", "own CPU ms over the list", "% over the list"]
    return table(["records go to", *head], rows)


def closing_table(uris: dict[str, str], folder: Path, steps: int) -> str:
    """Measure part 2."""
    rows = []
    work = matrix_products(1)
    for name, uri in uris.items():
        tracker, log_steps = open_run(uri, folder)
        looped = sum(wall for wall, _ in run_loop(steps, work, log_steps))
        began = time.perf_counter()
        tracker.close("FINISHED")
        closed = time.perf_counter() - began
        assert tracker.run_id is not None
        missing, altered = count_faults(uri, tracker.run_id, steps, folder)
        faults = [f"{missing} of {5 * steps:,}", f"{altered} of {steps:,}"]
        rows.append([name, f"{looped:.1f}", f"{closed:.2f}", *faults])
    head = ["store", "loop s", "close s", "points missing", "values altered in history.npz"]
    return table(head, rows)


def count_faults(uri: str, run_id: str, steps: int, folder: Path) -> tuple[int, int]:
    """Return how many points the store lacks, and how many losses differ from those recorded."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    wanted = {step: SPECIAL_LOSSES.get(step, 1 / step) for step in range(1, steps + 1)}
    missing = 0
    for key in METRICS:
        stored = {point.step for point in client.get_metric_history(run_id, key)}
        missing += len(wanted.keys() - stored)
    metrics = history.read_history(Path(client.download_artifacts(run_id, HISTORY, str(folder))))
    losses = dict(zip(*metrics["train/loss"][[0, 2]].tolist(), strict=True))
    altered = sum(repr(losses.get(step)) != repr(value) for step, value in wanted.items())
    return missing, altered


def long_table(uri: str, folder: Path, steps: int) -> str:
    """Measure part 3."""
    tracker, log_steps = open_run(uri, folder)
    tenth = max(1, steps // 10 // BLOCK)
    rows = []
    walls: list[float] = []
    for number, (wall, _) in enumerate(run_loop(steps, matrix_products(1), log_steps), 1):
        walls.append(wall)
        if number % tenth == 0:
            writer = shared_writer().process
            assert writer is not None
            memory = [f"{resident_mib(pid):.0f}" for pid in (os.getpid(), writer.pid)]
            rows.append([f"{number * BLOCK:,}", f"{median(walls) / BLOCK * 1e3:.3f}", *memory])
            walls.clear()
    start = time.perf_counter()
    tracker.close("FINISHED")
    text = table(["steps", "ms per step", "trainer's MiB", "writer's MiB"], rows)
    return f"{text}\n\nClosed in {time.perf_counter() - start:.1f} s."


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Measure all parts."""
    args = parse_options(__doc__, steps=500, rounds=5, close=10_000, long=100_000)
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    with stores(folder) as uris:
        parts = {
            "Five metrics in every 20 ms step": overhead_table(
                uris, folder, args.steps, args.rounds
            ),
            f"Closing a run of {args.close:,} steps of 1 ms": closing_table(
                uris, folder, args.close
            ),
            f"{args.long:,} steps of 1 ms, SQLite": long_table(uris["SQLite"], folder, args.long),
        }
    shutil.rmtree(folder)
    body = [f"## {title}\n\n{text}" for title, text in parts.items()]
    notes = f"{os.cpu_count()} cores, {versions('mlflow')}; median (least to greatest)."
    write("record", "What recording every step costs the loop", "\n\n".join([notes, *body]))


if __name__ == "__main__":
    main()
