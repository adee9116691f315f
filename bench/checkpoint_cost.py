"""How long does the loop stop for a checkpoint?

    python -m bench.checkpoint_cost [--rounds 8] [--steps 15]

ResNet-18 with AdamW (weights and two moments: 128 MiB) trains in float32. In turn: steps alone,
steps with a checkpoint written while the loop waits, and steps with one written by a thread. The
results are how long the loop stops for each, in the call and before the next update, and by
how much it is longer, with the steps that the writing slows.
Writes bench/results/checkpoint_cost.md.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch

from bench.common import median, spread, table, write
from models.resnet import resnet
from runner.checkpoint import checkpoint_file
from runner.checkpoint.async_writer import AsyncCheckpointWriter
from runner.config.schema import RunSpec
from runner.precision.registry import load_precision
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.state_dict import checkpoint_state_dict
from runner.training.step import train_step
from runner.training.tasks.classification import Classification


def training_state() -> TrainState:
    """Return a ResNet-18 with AdamW."""
    torch.manual_seed(0)
    cpu, precision = torch.device("cpu"), load_precision("32-true")
    model = resnet(18, 10, (1, 8, 8))
    optimizers = [ScheduledOptimizer(torch.optim.AdamW(model.parameters(), fused=True))]
    return TrainState(model, precision, Classification(), precision.scale(cpu), optimizers, cpu)


def main() -> None:
    """Measure the three ways in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    state, folder = training_state(), Path(tempfile.mkdtemp())
    batch = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    saver = AsyncCheckpointWriter(folder / "thread", 1, print)
    waited = 0.0

    def wait_for_copy() -> None:
        nonlocal waited
        began = time.perf_counter()
        saver.wait_for_copy()
        waited += time.perf_counter() - began

    state.set_update_hook(wait_for_copy)
    calls: dict[str, list[float]] = {"none": [], "waiting": [], "by a thread": []}
    loops: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.rounds + 1):
        for name in calls:
            began = time.perf_counter()
            content = checkpoint_state_dict(state, RunSpec())
            if name == "waiting":
                checkpoint_file.save(folder / "waiting", content, 1)
            elif name == "by a thread":
                changed = [*state.trainable_parameters, *state.optimizer_tensors()]
                saver.save(content, changed_by_update=changed)
            called, waited = time.perf_counter(), 0.0
            for _ in range(args.steps):
                train_step(state, [batch])
            ended = time.perf_counter()
            saver.finish()
            if turn:  # the first round warms up, and makes the memory of the copies
                calls[name].append((called - began + waited) * 1e3)
                loops[name].append((ended - began) * 1e3)
    shutil.rmtree(folder)
    base, sync = median(loops["none"]), median(calls["waiting"])
    rows = []
    for name in ("waiting", "by a thread"):
        added = median(loops[name]) - base
        rows.append(
            [
                name,
                spread(calls[name]),
                f"{median(calls[name]) / sync:.1%}",
                f"{added:.0f}",
                f"{added / sync:.1%}",
            ]
        )
    head = ["written", "loop stops, ms", "of a waiting one", "loop longer by, ms", "of it"]
    note = f"{args.steps} steps take {base:.0f} ms; median (least to greatest)"
    write("checkpoint_cost", "What a checkpoint costs the loop", f"{note}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
