"""What does recording every step cost the training loop, and does every point arrive?

    python -m bench.record [--steps 500] [--rounds 5] [--close 10000] [--long 100000]

1. A loop of 20 ms steps, in turn (A B C A B C ...): its records kept in a list, and recorded with
   the runner's own Recorder to MLflow on SQLite and over HTTP. Five metrics in every step: loss,
   learning rate, gradient norm, loss scale, overflow (and the running count of skipped steps).
2. A run of --close steps of 1 ms: how long does it take to close, and is every point there?
3. A run of --long steps: does a step's time or the memory grow?

Writes bench/results/record.md.
"""

import argparse
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from bench.common import median, spread, table, versions, write
from runner.precision.registry import load_precision
from runner.tracking import history
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.tracker import RunInfo
from runner.tracking.writer_process import shared_writer
from runner.training.callbacks.metric_logger import MetricLogger
from runner.training.records import StepRecord
from runner.training.state import TrainState
from runner.training.tasks.regression import Regression
from runner.utils.accelerator import Accelerator
from runner.utils.layout import HISTORY

BLOCK = 20
NAMES = ("train/loss", "train/lr", "train/grad_norm", "loss_scale/value", "loss_scale/overflow")
ODD = {7: math.nan, 11: math.inf, 13: -math.inf}
Observe = Callable[[tuple[StepRecord, ...]], None]


def record(step: int, seconds: float) -> StepRecord:
    """Made-up values of one step; every twentieth overflows, so that the scale changes, too."""
    loss = ODD.get(step, 1 / step)
    over = float(step % 500 == 0)
    now = time.time_ns() // 1_000_000
    scale = 2.0 ** (16 - step // 500 % 8)
    return StepRecord(
        step, now, 1, loss, 1e-3, 0.5 / step, seconds * 1e3, 64, scale, over, step // 500
    )


def loop(steps: int, work: Callable[[], None], observe: Observe) -> Iterator[tuple[float, float]]:
    """Steps in blocks; yields wall and CPU seconds of each block, observation included."""
    block: list[StepRecord] = []
    wall, cpu = time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        work()
        block.append(record(step, 0.02))
        if step % BLOCK == 0:
            observe(tuple(block))
            block.clear()
            now = time.perf_counter(), time.process_time()
            yield now[0] - wall, now[1] - cpu
            wall, cpu = now


def busy(milliseconds: float) -> Callable[[], None]:
    """Work of about this long on one thread: matrix products, counted once."""
    left, right = torch.randn(192, 192), torch.randn(192, 192)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right)

    products(100)
    start = time.perf_counter()
    products(200)
    each = (time.perf_counter() - start) / 200
    count = max(1, round(milliseconds / 1e3 / each))
    return lambda: products(count)


@contextmanager
def stores(folder: Path) -> Iterator[dict[str, str]]:
    """A SQLite store, and a server with one worker on another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host=127.0.0.1",
        f"--port={port}",
        "--workers=1",
        f"--backend-store-uri=sqlite:///{folder}/server.db",
        f"--artifacts-destination={folder}/artifacts",
    ]
    log = (folder / "server.log").open("wb")
    server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield {"SQLite": f"sqlite:///{folder}/mlflow.db", "HTTP": f"http://127.0.0.1:{port}"}
    finally:
        os.killpg(server.pid, 9)
        server.wait()
        log.close()


def opened(uri: str, folder: Path) -> tuple[MlflowTracker, MetricLogger]:
    """A run that is open: what the start of the writer takes is not measured here."""
    tracker = MlflowTracker(uri=uri)
    tracker.open(RunInfo(Path(tempfile.mkdtemp(dir=folder))))
    while tracker.run_id is None:
        tracker.check()
        time.sleep(0.05)
    cpu = torch.device("cpu")
    precision = load_precision("32-true")
    state = TrainState(nn.Linear(2, 2), precision, Regression(), precision.scale(cpu), [], cpu)
    return tracker, MetricLogger(tracker, state, Accelerator(cpu))


def overhead(uris: dict[str, str], folder: Path, steps: int, rounds: int) -> str:
    """Part 1."""
    work, ways = busy(20), {"list": None, **uris}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, uri in ways.items():
            kept: list[object] = []
            tracker, recorder = opened(uri, folder) if uri else (None, None)
            blocks = list(loop(steps, work, recorder.steps if recorder else kept.append))
            if tracker:
                tracker.close("FINISHED")
            if turn:  # the first round warms up
                means = (median([b[i] for b in blocks]) / BLOCK * 1e3 for i in (0, 1))
                found[name].append(tuple(means))  # type: ignore[arg-type]
    rows = []
    for name, pairs in found.items():
        twins = list(zip(pairs, found["list"], strict=True))
        columns = [
            spread([wall for wall, _ in pairs], ".2f"),
            spread([mine[0] - base[0] for mine, base in twins], "+.3f"),
            spread([mine[1] - base[1] for mine, base in twins], "+.3f"),
            spread([(mine[0] / base[0] - 1) * 100 for mine, base in twins], "+.2f"),
        ]
        rows.append([name, *columns])
    head = [
        "records go to",
        "ms per step",
        "wall ms over the list",
        "own CPU ms over the list",
        "% over the list",
    ]
    return table(head, rows)


def closing(uris: dict[str, str], folder: Path, steps: int) -> str:
    """Part 2."""
    rows, work = [], busy(1)
    for name, uri in uris.items():
        tracker, recorder = opened(uri, folder)
        began = time.perf_counter()
        for _ in loop(steps, work, recorder.steps):
            pass
        ended = time.perf_counter()
        tracker.close("FINISHED")
        closed = time.perf_counter() - ended
        assert tracker.run_id is not None
        missing, altered = arrived(uri, tracker.run_id, steps, folder)
        rows.append(
            [
                name,
                f"{ended - began:.1f}",
                f"{closed:.2f}",
                f"{missing} of {5 * steps:,}",
                f"{altered} of {steps:,}",
            ]
        )
    head = ["store", "loop s", "close s", "points missing", "values altered in history.npz"]
    return table(head, rows)


def arrived(uri: str, run_id: str, steps: int, folder: Path) -> tuple[int, int]:
    """Return how many points the store lacks, and how many losses differ from those recorded."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    wanted = {step: ODD.get(step, 1 / step) for step in range(1, steps + 1)}
    missing = 0
    for key in NAMES:
        there = {point.step for point in client.get_metric_history(run_id, key)}
        missing += len(wanted.keys() - there)
    losses = history.read_history(Path(client.download_artifacts(run_id, HISTORY, str(folder))))
    exact = dict(zip(*losses["train/loss"][[0, 2]].tolist(), strict=True))
    same = (repr(exact.get(step)) == repr(value) for step, value in wanted.items())
    return missing, sum(not equal for equal in same)


def long(uri: str, folder: Path, steps: int) -> str:
    """Part 3."""
    tracker, recorder = opened(uri, folder)
    work, rows, tenth = busy(1), [], steps // 10 // BLOCK
    walls: list[float] = []
    for number, (wall, _) in enumerate(loop(steps, work, recorder.steps), 1):
        walls.append(wall)
        if number % tenth == 0:
            process = shared_writer().process
            assert process is not None
            each = median(walls) / BLOCK * 1e3
            memory = [f"{resident(pid):.0f}" for pid in (os.getpid(), process.pid)]
            rows.append([f"{number * BLOCK:,}", f"{each:.3f}", *memory])
            walls.clear()
    start = time.perf_counter()
    tracker.close("FINISHED")
    text = table(["steps", "ms per step", "trainer's MiB", "writer's MiB"], rows)
    return f"{text}\n\nClosed in {time.perf_counter() - start:.1f} s."


def resident(pid: int) -> float:
    """Resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--close", type=int, default=10_000)
    parser.add_argument("--long", type=int, default=100_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    with stores(folder) as uris:
        parts = {
            "Five metrics in every 20 ms step": overhead(uris, folder, args.steps, args.rounds),
            f"Closing a run of {args.close:,} steps of 1 ms": closing(uris, folder, args.close),
            f"{args.long:,} steps of 1 ms, SQLite": long(uris["SQLite"], folder, args.long),
        }
    shutil.rmtree(folder)
    body = [f"## {title}\n\n{text}" for title, text in parts.items()]
    notes = f"{os.cpu_count()} cores, {versions('mlflow')}; median (least to greatest)."
    write("record", "What recording every step costs the loop", "\n\n".join([notes, *body]))


if __name__ == "__main__":
    main()
