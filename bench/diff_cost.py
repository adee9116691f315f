"""What does mode=diff cost, next to a training step?

    python -m bench.diff_cost [--rounds 5] [--batch-size 16]

A GPT of 4 layers and a width of 128 in bfloat16 autocast against float32, one thread, next to a
training step of AdamW in each. Times are of one process, in turn; memory is the growth of the
highest resident set, each in a process of its own whose allocator returns each tensor's memory.
Writes bench/results/diff_cost.md.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.common import interleave, parse_options, table, write
from bench.training import CPU, VOCABULARY, random_tokens
from models.gpt import GPT
from runner.core.config.schema import RunSpec
from runner.core.loop.step import train_step
from runner.core.loop.train_state import TrainState
from runner.core.run.run_context import TrainingSetup
from runner.diagnostics.divergence.compare import compare_batch
from runner.diagnostics.divergence.substitution import Execution
from runner.precision.registry import load_precision
from runner.training.setup import build_state
from runner.training.tasks.language import Language

CONTEXT = 128
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-3}
PRECISIONS = ("bf16-mixed", "32-true")
DIFF = "mode=diff precision=bf16-mixed against=32-true"


def build(name: str, trains: bool) -> TrainState:
    """Return the state of a GPT in a precision, with weights of one seed."""
    torch.manual_seed(0)
    precision = load_precision(name)
    model, _ = precision.convert(GPT(VOCABULARY, CONTEXT, 4, 4, 128))
    spec = RunSpec(optimizer=ADAMW)
    setup = TrainingSetup(spec, precision, Language(), CPU)
    return build_state(setup, model, 1000 if trains else None)


def contenders(batch_size: int, wanted: str = "") -> dict[str, Callable[[], Any]]:
    """Return what is timed: a step in each precision, and a comparison; with a name that alone."""
    batch = random_tokens(batch_size, CONTEXT)
    found: dict[str, Callable[[], Any]] = {}
    for name in PRECISIONS:
        if wanted in ("", f"a step in {name}"):
            trained = build(name, trains=True)
            found[f"a step in {name}"] = partial(train_step, trained, [batch])
    if wanted in ("", DIFF):
        other, reference = (Execution(name, build(name, trains=False)) for name in PRECISIONS)
        states = [torch.get_rng_state()]
        found[DIFF] = partial(compare_batch, reference, other, (batch, batch), states)
    return found


def memory_mib(name: str) -> float:
    """Return a line of this process's status: VmRSS, its resident set, or VmHWM, the highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def grow(run: Callable[[], Any]) -> float:
    """Return by how many MiB the resident set grows while a function runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident set starts anew
    before = memory_mib("VmRSS")
    run()
    return memory_mib("VmHWM") - before


def growth_mib(name: str, batch_size: int) -> float:
    """Return the memory that a contender takes, measured in a process of its own."""
    command = [sys.executable, "-m", "bench.diff_cost", "--only", name]
    command += ["--batch-size", str(batch_size)]
    # Else memory that malloc keeps for later would count as taken.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def main() -> None:
    """Measure, print and write the table; or be the process of one contender."""
    chosen = parse_options(__doc__, rounds=5, batch_size=16, only="")
    torch.set_num_threads(1)
    if chosen.only:
        for run in contenders(1, chosen.only).values():  # libraries and kernels
            run()
        for run in contenders(chosen.batch_size, chosen.only).values():
            print(json.dumps(grow(run)))
        return
    times = interleave(contenders(chosen.batch_size), chosen.rounds)
    seconds = {name: median([cpu for cpu, _ in rows]) for name, rows in times.items()}
    memory = {name: growth_mib(name, chosen.batch_size) for name in seconds}
    steps = [f"a step in {name}" for name in PRECISIONS]
    rows = []
    for name in seconds:
        row = [name, f"{1000 * seconds[name]:,.0f}", f"{memory[name]:,.0f}"]
        for step in steps:
            row += [f"{seconds[name] / seconds[step]:.2f}", f"{memory[name] / memory[step]:.2f}"]
        rows.append([*row, f"{seconds[name] / sum(seconds[step] for step in steps):.2f}"])
    head = ["what", "CPU ms", "memory, MiB"]
    for name in PRECISIONS:
        head += [f"time / {name} step", f"memory / {name} step"]
    head.append("time / both steps")
    write("diff_cost", "What does mode=diff cost, next to a training step?", table(head, rows))


if __name__ == "__main__":
    main()
