"""What do --cfg job and --help cost over Hydra alone?

    python -m bench.commands [--rounds 7]

CPU seconds of whole commands, in turn: those of the runner, composing the same defaults with Hydra
alone, and importing torch. Writes bench/results/startup.md.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from statistics import median

from bench.common import ROOT, parse_options, run_in_turn, spread, table, write

COMPOSE = """
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from runner.config.hydra_plugins import VERSION_BASE
from runner.config.resolve import register_schema
from runner.rooms import install_rooms
install_rooms()
register_schema()
with initialize_config_module("runner.conf", **VERSION_BASE):
    print(OmegaConf.to_yaml(compose("config")))
"""
RUNNER = (sys.executable, "-m", "runner")
COMMANDS = {
    "hydra alone": (sys.executable, "-c", COMPOSE),
    "--cfg job": (*RUNNER, "--cfg", "job"),
    "--help": (*RUNNER, "--help"),
    "import torch": (sys.executable, "-c", "import torch"),
}


def cpu_seconds(command: Sequence[str]) -> float:
    """Run a command in a folder of its own; return its CPU seconds."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, check=True, cwd=folder, env=env, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure the commands."""
    rounds = parse_options(__doc__, rounds=7).rounds
    times = run_in_turn({name: partial(cpu_seconds, c) for name, c in COMMANDS.items()}, rounds)
    base = median(times["hydra alone"])
    rows = [[n, spread(v, ".2f"), f"{median(v) / base:.2f}"] for n, v in times.items()]
    body = table(["command", "CPU seconds", "over hydra alone"], rows)
    write("startup", "What do --cfg job and --help cost over Hydra alone?", body)


if __name__ == "__main__":
    main()
