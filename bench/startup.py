"""What does --cfg job cost over composing the same defaults with Hydra alone?

Whole processes in turn, user + system seconds, medians. Also: neither torch nor mlflow is imported.
"""

import resource
import subprocess
import sys
from collections.abc import Sequence

from bench.common import median, spread, table, write

ALONE = """
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from runner.config.resolve import register_schema
register_schema()
with initialize_config_module("runner.conf", version_base="1.3"):
    print(OmegaConf.to_yaml(compose("config")))
"""
COMMANDS = {
    "hydra alone": [sys.executable, "-c", ALONE],
    "--cfg job": [sys.executable, "-m", "runner", "--cfg", "job"],
    "--help": [sys.executable, "-m", "runner", "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
}


def cpu_seconds(command: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(8):
        for name, command in COMMANDS.items():
            seconds = cpu_seconds(command)
            if turn:
                times[name].append(seconds)
    base = median(times["hydra alone"])
    rows = [[n, spread(v, ".2f"), f"{median(v) / base:.2f}"] for n, v in times.items()]
    body = table(["command", "CPU seconds", "over hydra alone"], rows)
    write("startup", "What do --cfg job and --help cost over Hydra alone?", body)


if __name__ == "__main__":
    main()
