"""What do whole commands of the runner cost?

    python -m bench.commands startup [--rounds 7]
    python -m bench.commands launchers [--rounds 3] [--jobs 8]

startup: --cfg job and --help over composing the same defaults with Hydra alone, in CPU seconds.
launchers: a process of its own for each job of a sweep. Sweeps of one and of `jobs` more tiny jobs
run under either launcher: the difference over `jobs` is what one more job takes. For comparison:
what a job would pay at least in a new process (multiprocessing's spawn), for the interpreter and
the same imports. Whole commands run in turn. Writes bench/results/startup.md or launcher_cost.md.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from bench.common import ROOT, median, spread, table, write

COMPOSE = """
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from runner.config.resolve import register_schema
register_schema()
with initialize_config_module("runner.conf", version_base="1.3"):
    print(OmegaConf.to_yaml(compose("config")))
"""
RUNNER = (sys.executable, "-m", "runner")
STARTUPS = {
    "hydra alone": (sys.executable, "-c", COMPOSE),
    "--cfg job": (*RUNNER, "--cfg", "job"),
    "--help": (*RUNNER, "--help"),
    "import torch": (sys.executable, "-c", "import torch"),
}
LAUNCHERS = ("basic", "isolated")
TRACKING = ("none", "mlflow")


class Seconds(NamedTuple):
    """Seconds of a command and of all processes that it waits for."""

    wall: float
    cpu: float


def time_command(command: Sequence[str]) -> Seconds:
    """Run a command in a folder of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(command, check=True, cwd=folder, env=env, capture_output=True)
        wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Seconds(wall, cpu)


def measure_startup(rounds: int) -> None:
    """Measure the commands that compose a config, after a round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in STARTUPS}
    for turn in range(rounds + 1):
        for name, command in STARTUPS.items():
            seconds = time_command(command).cpu
            if turn:
                times[name].append(seconds)
    base = median(times["hydra alone"])
    rows = [[n, spread(v, ".2f"), f"{median(v) / base:.2f}"] for n, v in times.items()]
    body = table(["command", "CPU seconds", "over hydra alone"], rows)
    write("startup", "What do --cfg job and --help cost over Hydra alone?", body)


def sweep(tracking: str, launcher: str, jobs: int) -> list[str]:
    """Return the command of a sweep of tiny jobs."""
    seeds = ",".join(map(str, range(jobs)))
    job = ("-m", "model=mlp", "train.max_steps=3", f"seed={seeds}")
    return [*RUNNER, *job, f"hydra/launcher={launcher}", f"tracking={tracking}"]


def measure_launchers(rounds: int, jobs: int) -> None:
    """Measure what each further job of a sweep takes under each launcher."""
    from runner.sweeps.launcher.fork_server import PRELOADED_MODULES

    spawn = (sys.executable, "-c", f"import {', '.join(PRELOADED_MODULES)}")
    cases = list(product(TRACKING, LAUNCHERS))
    first: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    further: dict[tuple[str, str], list[Seconds]] = {case: [] for case in cases}
    spawned = []
    for _ in range(rounds):
        for case in cases:
            short, long = (time_command(sweep(*case, count)) for count in (1, 1 + jobs))
            first[case].append(short.cpu)
            each = Seconds((long.wall - short.wall) / jobs, (long.cpu - short.cpu) / jobs)
            further[case].append(each)
        spawned.append(time_command(spawn).cpu)
    rows = []
    for tracking, launcher in cases:
        walls, cpus = zip(*further[tracking, launcher], strict=True)
        ratio = median(cpus) / median([each.cpu for each in further[tracking, "basic"]])
        costs = [spread(cpus, ".2f"), f"{ratio:.2f}", spread(walls, ".2f")]
        rows.append([launcher, tracking, *costs, spread(first[tracking, launcher])])
    head = ["launcher", "tracking", "CPU s per job", "over basic", "s per job", "CPU s of one job"]
    body = (
        f"{table(head, rows)}\n\n"
        f"Medians (least to greatest) of {rounds} interleaved rounds; a job is three steps of an "
        "MLP on digits, with one thread. The last column is of a whole sweep of one job; in a "
        f"spawned process each further job would take {spread(spawned, '.2f')} CPU s more, for its "
        "imports. CPU s leaves out a writer that outlives the command. The machine's load was "
        f"{os.getloadavg()[2]:.0f}: wall seconds are of little worth where that is more than its "
        "processors."
    )
    write("launcher_cost", "What does a process of its own cost each job of a sweep?", body)


def main() -> None:
    """Measure one of the questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=["startup", "launchers"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--jobs", type=int, default=8)
    args = parser.parse_args()
    if args.question == "startup":
        measure_startup(args.rounds or 7)
    else:
        measure_launchers(args.rounds or 3, args.jobs)


if __name__ == "__main__":
    main()
