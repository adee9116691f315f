"""What does a process of its own cost each job of a sweep?

    python -m bench.launcher_cost [--jobs 8] [--rounds 3]

Whole commands in turn, sweeps of one and of `jobs` more tiny jobs under either launcher: the
difference over `jobs` is what one more job takes. For comparison: what a job would pay at least if
its process were new (multiprocessing's spawn), for the interpreter and the same imports.
Writes bench/results/launcher_cost.md.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common import median, spread, table, write
from runner.sweep.launcher.fork_server import PRELOADED_MODULES

ROOT = Path(__file__).parents[1]
SWEEP = (sys.executable, "-m", "runner", "-m", "model=mlp", "train.max_steps=3")
SPAWNED = (sys.executable, "-c", f"import {', '.join(PRELOADED_MODULES)}")
TRACKING = ("none", "mlflow")
LAUNCHERS = ("basic", "isolated")


def seconds(command: Sequence[str]) -> tuple[float, float]:
    """Return (wall, CPU) seconds of a command and all that it waits for, in a folder of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(command, check=True, cwd=folder, env=env, capture_output=True)
        wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def command(launcher: str, tracking: str, jobs: int) -> list[str]:
    seeds = ",".join(map(str, range(jobs)))
    return [*SWEEP, f"hydra/launcher={launcher}", f"tracking={tracking}", f"seed={seeds}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ways = [(launcher, tracking) for tracking in TRACKING for launcher in LAUNCHERS]
    one: dict[tuple[str, str], list[tuple[float, float]]] = {way: [] for way in ways}
    more: dict[tuple[str, str], list[tuple[float, float]]] = {way: [] for way in ways}
    spawned: list[tuple[float, float]] = []
    for _ in range(args.rounds):
        for way in ways:
            short, long = (seconds(command(*way, n)) for n in (1, 1 + args.jobs))
            one[way].append(short)
            each = [(b - a) / args.jobs for a, b in zip(short, long, strict=True)]
            more[way].append((each[0], each[1]))
        spawned.append(seconds(SPAWNED))
    rows = []
    for launcher, tracking in ways:
        walls, cpus = zip(*more[launcher, tracking], strict=True)
        base = median([cpu for _, cpu in more["basic", tracking]])
        whole = spread([cpu for _, cpu in one[launcher, tracking]])
        ratio = f"{median(cpus) / base:.2f}"
        rows.append([launcher, tracking, spread(cpus, ".2f"), ratio, spread(walls, ".2f"), whole])
    head = ["launcher", "tracking", "CPU s per job", "over basic", "s per job", "CPU s of one job"]
    afresh = spread([cpu for _, cpu in spawned], ".2f")
    body = (
        f"{table(head, rows)}\n\n"
        f"Medians (least to greatest) of {args.rounds} interleaved rounds; a job is three steps of "
        "an MLP on digits, with one thread. The last column is of a whole sweep of one job; with "
        f"spawn each further job would take {afresh} CPU s more, for the imports that it finds "
        "made. CPU s leaves out a writer that outlives the command. The machine's load was "
        f"{os.getloadavg()[2]:.0f}: seconds by the clock are of little worth where that is more "
        "than its processors.\n"
    )
    write("launcher_cost", "What does a process of its own cost each job of a sweep?", body)


if __name__ == "__main__":
    main()
