"""What does strategy.cpu_ram_efficient_loading save of the hosts' memory, and what does it cost?

    python -m bench.fsdp_loading [--processes 2 4] [--width 1024]

Local processes build the shards of a GPT under strategy=fsdp, with weights of the same seed, in
turn. Memory is the growth of the highest resident set of each process; a model of 0.2 million
weights is built before, so that libraries are loaded. Writes bench/results/fsdp_loading.md.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from bench.common import ROOT, table, write
from runner.config.schema import RunSpec
from runner.distributed.fsdp import FSDP
from runner.precision.registry import load_precision
from runner.training.model import build_model
from runner.training.sharded_model import build_for_strategy
from runner.utils.tensors import MIB

CPU = torch.device("cpu")
LAYERS = 12
SMALL_WIDTH = 32
GPT = {
    "_target_": "runner.models.gpt.GPT",
    "vocab_size": 512,
    "context": 64,
    "layers": LAYERS,
    "heads": 4,
}


class Loading(NamedTuple):
    """What building a model took in one process.

    Attributes:
        grown_mib: growth of the highest resident set.
        seconds: until the shards had their values.
    """

    grown_mib: float
    seconds: float


def peak_mib() -> float:
    """Return the highest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def load(width: int, loads_once: bool) -> Loading:
    """Build the shards of a GPT in this process."""
    strategy = FSDP(cpu_ram_efficient_loading=loads_once)
    precision = load_precision("bf16-mixed")
    build = partial(build_model, RunSpec(model={**GPT, "width": width}), precision)
    before, start = peak_mib(), perf_counter()
    with strategy.session():
        torch.manual_seed(0)
        build_for_strategy(build, precision, strategy, CPU)
        return Loading(peak_mib() - before, perf_counter() - start)


def run_process(folder: Path, width: int, loads_once: bool) -> None:
    """Build a small model, then the large one, and write down what that took."""
    load(SMALL_WIDTH, loads_once)
    found = load(width, loads_once)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def measure(processes: int, width: int, loads_once: bool) -> list[Loading]:
    """Return what the loading took in each of several processes, the main one first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(processes), "-m", "bench.fsdp_loading"),
            *("--folder", folder, "--width", str(width), "--once", str(int(loads_once))),
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        paths = [Path(folder, f"{rank}.json") for rank in range(processes)]
        return [Loading(*json.loads(path.read_text())) for path in paths]


def row(processes: int, width: int, loads_once: bool) -> list[str]:
    """Return the row of the table for a number of processes and a value of the key."""
    first, *others = measure(processes, width, loads_once)
    return [
        str(processes),
        str(loads_once).lower(),
        f"{first.grown_mib:,.0f}",
        f"{max(other.grown_mib for other in others):,.0f}",
        f"{first.grown_mib + sum(other.grown_mib for other in others):,.0f}",
        f"{first.seconds:.1f}",
    ]


def main() -> None:
    """Measure, print and write the table; or, with a folder, be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--once", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.folder is not None:
        run_process(chosen.folder, chosen.width, bool(chosen.once))
        return
    head = ["processes", "key", "first, MiB", "others at most, MiB", "sum, MiB", "seconds"]
    rows = [row(n, chosen.width, once) for n in chosen.processes for once in (False, True)]
    weights = 12 * LAYERS * chosen.width**2 * 4 / MIB
    body = f"GPT of {LAYERS} layers, {weights:,.0f} MiB of float32 weights in its blocks.\n\n"
    body += table(head, rows)
    write("fsdp_loading", "What does strategy.cpu_ram_efficient_loading save and cost?", body)


if __name__ == "__main__":
    main()
