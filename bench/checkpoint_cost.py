"""How long does the loop stop for a checkpoint?

    python -m bench.checkpoint_cost [--rounds 8] [--steps 15]

ResNet-18 with AdamW (weights and two moments: 128 MiB) trains in float32. In turn: steps alone,
steps with a checkpoint written while the loop waits, and steps with one written by a thread. The
results are how long the loop stops for each, in the call and before the next update, and by
how much it is longer, with the steps that the writing slows.
Writes bench/results/checkpoint_cost.md.
"""

import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch

from bench.common import parse_options, run_in_turn, spread, table, write
from bench.training import training_state
from models.resnet import resnet
from runner.core.config.schema import RunSpec
from runner.core.loop.step import train_step
from runner.core.record import checkpoint_file
from runner.precision.registry import load_precision
from runner.training.formats.writers import AsyncCheckpointWriter
from runner.training.state_dict import checkpoint_state_dict
from runner.training.tasks.classification import Classification

WAYS = ("none", "waiting", "by a thread")


class Loop:
    """Steps of a ResNet-18 with AdamW, after a checkpoint that is written in one of WAYS."""

    def __init__(self, folder: Path, steps: int) -> None:
        torch.manual_seed(0)
        model = resnet(18, 10, (1, 8, 8))
        self.state = training_state(model, load_precision("32-true"), Classification())
        self.batch = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
        self.folder, self.steps, self.waited = folder, steps, 0.0
        self.saver = AsyncCheckpointWriter(folder / "thread", 1, print)
        self.state.hooks.call_before_update(self.wait_for_copy)

    def wait_for_copy(self) -> None:
        """Wait until the checkpoint's copy is whole, before the update, and note how long."""
        began = time.perf_counter()
        self.saver.wait_for_copy()
        self.waited += time.perf_counter() - began

    def run(self, way: str) -> tuple[float, float]:
        """Return the milliseconds for which the loop stops, and those of the loop."""
        began = time.perf_counter()
        content = checkpoint_state_dict(self.state, RunSpec())
        if way == "waiting":
            checkpoint_file.save(self.folder / "waiting", content, 1)
        elif way == "by a thread":
            changed = [*self.state.trainable_parameters, *self.state.optimizer_tensors()]
            self.saver.save(content, changed_by_update=changed)
        called, self.waited = time.perf_counter(), 0.0
        for _ in range(self.steps):
            train_step(self.state, [self.batch])
        ended = time.perf_counter()
        self.saver.finish()
        return (called - began + self.waited) * 1e3, (ended - began) * 1e3


def main() -> None:
    """Measure the three ways in turn."""
    args = parse_options(__doc__, rounds=8, steps=15)
    folder = Path(tempfile.mkdtemp())
    loop = Loop(folder, args.steps)
    # The round that is not counted makes the memory of the copies.
    times = run_in_turn({way: partial(loop.run, way) for way in WAYS}, args.rounds)
    shutil.rmtree(folder)
    stops = {way: [stop for stop, _ in pairs] for way, pairs in times.items()}
    loops = {way: median(looped for _, looped in pairs) for way, pairs in times.items()}
    base, sync = loops["none"], median(stops["waiting"])
    rows = []
    for way in WAYS[1:]:
        added = loops[way] - base
        shares = f"{median(stops[way]) / sync:.1%}", f"{added:.0f}", f"{added / sync:.1%}"
        rows.append([way, spread(stops[way]), *shares])
    head = ["written", "loop stops, ms", "of a waiting one", "loop longer by, ms", "of it"]
    note = f"{args.steps} steps take {base:.0f} ms; median (least to greatest)"
    write("checkpoint_cost", "What a checkpoint costs the loop", f"{note}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
