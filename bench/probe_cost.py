"""What does the numerics probe cost a training loop that it measures every 100 steps?

    python -m bench.probe_cost [--every 100] [--block 5] [--rounds 15]

A run's own model, data and optimizer step, in turn (off, on, off, on, ...), a block of steps each,
of which the last one is measured where the probe is on. What a measurement adds is the difference
of a pair of blocks; over `every` steps it is the probe's cost. One thread. Writes
bench/results/probe_cost.md.
"""

import argparse
import os
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from hydra import compose, initialize_config_module

from bench.common import interleave, median, spread, table, write
from runner.config.resolve import register_schema, resolve_spec
from runner.config.targets import build_group
from runner.data.build import build_loaders, build_splits
from runner.diagnostics.numerics.probe import Probe
from runner.diagnostics.numerics.results import NumericsSnapshot
from runner.distributed.strategy import Single
from runner.training.loop import accumulation_batches
from runner.training.model import build_model
from runner.training.optimizers import build_scheduled_optimizers
from runner.training.state import TrainState
from runner.training.step import train_step
from runner.utils.reproducibility import seed_all

CPU = torch.device("cpu")
RUNS = {
    "resnet on digits": ("model=resnet", "data=digits"),
    "gpt on text": ("model=gpt", "data=text"),
}


class Loop:
    """The steps of a run, of which some are measured by the numerics probe."""

    def __init__(self, *overrides: str) -> None:
        with initialize_config_module(version_base="1.3", config_module="runner.conf"):
            spec = resolve_spec(compose("config", list(overrides)))
        seed_all(0)
        precision = build_group("precision", spec.precision)
        loader, _ = build_loaders(spec, build_splits(spec), CPU, Single().place)
        model = build_model(spec, precision, CPU).model
        optimizers = build_scheduled_optimizers(spec, model, precision, 10**6)
        task, scale = build_group("task", spec.task), precision.scale(CPU)
        self.state = TrainState(model, precision, task, scale, optimizers, CPU)
        self.batches = accumulation_batches(self.state, loader, 1)
        self.snapshots: list[NumericsSnapshot] = []
        self.probe = Probe(self.state, self.snapshots.append)

    def train(self, steps: int, is_probed: bool) -> None:
        """Train steps, of which the last is measured by the probe if asked for."""
        for number, (micro_batches, sizes) in enumerate(islice(self.batches, steps), 1):
            is_measured = is_probed and number == steps
            context: Any = self.probe if is_measured else nullcontext()
            with context:
                train_step(self.state, micro_batches, sizes)


def measure(name: str, every: int, block: int, rounds: int) -> list[str]:
    """Return the cells of a run's row."""
    loop = Loop(*RUNS[name], "precision=32-true")
    contenders = {"off": partial(loop.train, block, False), "on": partial(loop.train, block, True)}
    times = interleave(contenders, rounds)
    off, on = ([cpu * 1e3 for cpu, _ in times[key]] for key in ("off", "on"))
    step = median(off) / block
    added = [b - a for a, b in zip(off, on, strict=True)]
    return [
        name,
        str(len(loop.snapshots[-1].measured)),
        spread([milliseconds / block for milliseconds in off], ".0f"),
        spread(added, ".0f"),
        spread([100 * milliseconds / step / every for milliseconds in added], ".1f"),
    ]


def main() -> None:
    """Measure both runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    register_schema()
    loads = [os.getloadavg()[0]]
    rows = []
    for name in RUNS:
        rows.append(measure(name, args.every, args.block, args.rounds))
        loads.append(os.getloadavg()[0])
    head = [
        "run",
        "tensors",
        "ms per step",
        "ms that a measurement adds",
        f"% of {args.every} steps",
    ]
    notes = (
        f"CPU time, median (least to greatest) of {args.rounds} pairs of {args.block} steps; "
        f"float32, one thread. {os.cpu_count()} cores, load average from {min(loads):.1f} to "
        f"{max(loads):.1f}."
    )
    write("probe_cost", "What the numerics probe costs", f"{table(head, rows)}\n\n{notes}")


if __name__ == "__main__":
    main()
