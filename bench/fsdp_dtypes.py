"""What do the dtypes of FSDP save, strategy.param_dtype and strategy.reduce_dtype, and lose?

    python -m bench.fsdp_dtypes [--processes 2] [--rounds 7] [--width 256]

Small GPTs train with the runner's own loop in local processes that communicate over gloo, one
thread each, in turn. Bytes are counted twice: those of the tensors that FSDP gathers and reduces,
in its calls of torch.distributed, and those that pass the loopback device. The error of a reduction
is that of the first gradient, whole, against the one that is reduced in float32. Memory is the
growth of a process's resident set, of a larger model. Writes bench/results/fsdp_dtypes.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from bench.common import ROOT, median, table, write
from bench.scaling import (
    CONTEXT,
    CPU,
    LAYERS,
    MEMORY_WIDTH,
    VOCABULARY,
    WARM_UP_WIDTH,
    loopback_bytes_of,
    slowest_seconds,
)
from models.gpt import GPT
from runner.distributed.ddp import DDP
from runner.distributed.fsdp import FSDP
from runner.precision.gathered_weights import find_narrow_weights
from runner.precision.registry import load_precision
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.step import train_step
from runner.training.tasks.language import Language
from runner.utils.accelerator import Accelerator
from runner.utils.tensors import MIB

EXAMPLES = 2  # of each process in a micro-batch
STEPS = 4  # of a round
MEMORY_PRECISION = "bf16-mixed"
MICRO_BATCHES = (1, 8)  # of a step whose gradient is compared


class Keys(NamedTuple):
    """Values of strategy.param_dtype and strategy.reduce_dtype."""

    param: str | None = None
    reduce: str | None = None

    def __str__(self) -> str:
        return f"`{self.param or 'null'}`, `{self.reduce or 'null'}`"


KEYS = (Keys(), Keys("compute"), Keys(None, "bfloat16"), Keys("compute", "bfloat16"))
KEYS_OF = {"bf16-mixed": KEYS, "16-mixed": KEYS, "float8-tensorwise": KEYS[:2]}
OPTIONS: dict[str, dict[str, Any]] = {"float8-tensorwise": {"emulate": True}}
"""Keys of a precision that are not its defaults."""


class Training:
    """Steps of a GPT under strategy=fsdp."""

    def __init__(self, name: str, width: int, keys: Keys) -> None:
        torch.manual_seed(0)
        self.precision = load_precision(name, **OPTIONS.get(name, {}))
        strategy = FSDP(param_dtype=keys.param, reduce_dtype=keys.reduce)
        model, _ = self.precision.convert(GPT(VOCABULARY, CONTEXT, LAYERS, 4, width))
        self.weights = sum(parameter.numel() for parameter in model.parameters())
        narrow = None
        if keys.param:
            narrow = find_narrow_weights(model, self.precision, CPU)
        wrapped = strategy.wrap(model, CPU, narrow)
        self.parameters = [*model.parameters()]
        adam = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        self.state = TrainState(
            wrapped,
            self.precision,
            Language(),
            self.precision.scale(CPU),
            [ScheduledOptimizer(adam)],
            CPU,
            strategy=strategy,
        )
        self.place = strategy.place
        self.generator = torch.Generator().manual_seed(1 + self.place.rank)

    def step(self, micro_batches: int = 1) -> None:
        """Train one step on random tokens."""
        micros = []
        for _ in range(micro_batches):
            shape = (EXAMPLES, CONTEXT + 1)
            tokens = torch.randint(VOCABULARY, shape, generator=self.generator)
            micros.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        with self.precision.session(self.state.plain_model, CPU):
            train_step(self.state, micros, [EXAMPLES * self.place.world_size] * micro_batches)

    def steps(self) -> None:
        """Train STEPS steps."""
        for _ in range(STEPS):
            self.step()

    def first_gradient(self, micro_batches: int) -> Tensor:
        """Return the whole gradient of the first step, before any weight changes, as one vector."""
        found: list[Tensor] = []

        def keep() -> None:
            # Collective: each parameter's gradient is gathered in float32.
            grads: Iterator[Any] = (parameter.grad for parameter in self.parameters)
            found.extend(grad.full_tensor().flatten().float() for grad in grads)

        self.state.set_update_hook(keep)
        self.step(micro_batches)
        return torch.cat(found)


@contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """Return a context that counts the bytes of the tensors that FSDP gathers and reduces."""
    counts: Counter[str] = Counter()

    def counting(name: str, position: int, kind: str) -> Callable[..., object]:
        collective = getattr(dist, name)

        def call(*args: Any, **named: Any) -> object:
            keyword = "output_tensor" if kind == "gathered" else "input"
            tensor = args[position] if len(args) > position else named[keyword]
            counts[kind] += tensor.numel() * tensor.element_size()
            return collective(*args, **named)

        return call

    # A gather counts its output, a reduction its input: whole tensors in both cases.
    calls = (("all_gather_single", 0, "gathered"), ("reduce_scatter_single", 1, "reduced"))
    with ExitStack() as patches:
        for name, position, kind in calls:
            patches.enter_context(mock.patch.object(dist, name, counting(name, position, kind)))
        yield counts


def measure_steps(name: str, width: int, rounds: int) -> list[dict[str, Any]]:
    """Measure bytes and seconds of steps, the settings in turn, after a round that warms up."""
    trainings = {keys: Training(name, width, keys) for keys in KEYS_OF[name]}
    seconds: dict[Keys, list[float]] = {keys: [] for keys in trainings}
    loopback: dict[Keys, list[float]] = {keys: [] for keys in trainings}
    counts: dict[Keys, Counter[str]] = {}
    for turn in range(rounds + 1):
        for keys, training in trainings.items():
            with counted_bytes() as counts[keys]:
                taken = slowest_seconds(training.steps) / STEPS
            sent = loopback_bytes_of(training.steps) / STEPS
            if turn:
                seconds[keys].append(taken)
                loopback[keys].append(sent)
    rows = []
    for keys, training in trainings.items():
        rows.append(
            {
                "precision": name,
                "keys": keys,
                "weights": training.weights,
                "gathered": counts[keys]["gathered"] / STEPS,
                "reduced": counts[keys]["reduced"] / STEPS,
                "loopback": min(loopback[keys]),
                "seconds": median(seconds[keys]),
                "ratios": [a / b for a, b in zip(seconds[keys], seconds[KEYS[0]], strict=True)],
            }
        )
    return rows


def measure_errors(name: str, width: int) -> list[dict[str, Any]]:
    """Measure how far the first gradient is from the one without the keys."""
    rows = []
    for micro_batches in MICRO_BATCHES:
        exact = Training(name, width, KEYS[0]).first_gradient(micro_batches)
        for keys in KEYS_OF[name][1:]:
            found = Training(name, width, keys).first_gradient(micro_batches)
            error = float((found - exact).norm() / exact.norm())
            rows.append({"precision": name, "keys": keys, "micro": micro_batches, "error": error})
    return rows


def resident_growth(width: int, keys: Keys) -> dict[str, Any]:
    """Measure by how much three steps raise the resident memory, with the model's own."""
    accelerator = Accelerator(CPU)
    accelerator.reset_peak_memory()
    before = psutil.Process().memory_info().rss
    training = Training(MEMORY_PRECISION, width, keys)
    for _ in range(3):
        training.step()
    held = accelerator.peak_memory_mib() * MIB - before
    return {"keys": keys, "weights": training.weights, "held": held}


def work(file: Path, rounds: int, width: int) -> None:
    """Measure as one of several processes; the first one writes the file. rounds=0: memory."""
    torch.set_num_threads(1)
    control = DDP()
    found: dict[str, list[dict[str, Any]]] = {}
    with control.session():
        if rounds:
            found["steps"] = [row for name in KEYS_OF for row in measure_steps(name, width, rounds)]
            found["errors"] = [row for name in KEYS_OF for row in measure_errors(name, width)]
        else:
            for keys in KEYS:  # load the libraries
                resident_growth(WARM_UP_WIDTH, keys)
            found["memory"] = [resident_growth(width, keys) for keys in KEYS]
    if control.place.is_main:
        file.write_text(json.dumps(found))


def launch(processes: int, rounds: int, width: int, **env: str) -> dict[str, list[dict[str, Any]]]:
    """Return what this module's processes measure."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        words = [f"--rounds={rounds}", f"--width={width}", f"--file={file}"]
        command = [*torchrun, f"--nproc-per-node={processes}", "-m", "bench.fsdp_dtypes", *words]
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=os.environ | own | env, cwd=ROOT, check=True)
        return json.loads(file.read_text())


def step_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of bytes and seconds."""
    megabytes = [f"{row[key] / 1e6:.2f}" for key in ("gathered", "reduced", "loopback")]
    ratios = row["ratios"]
    ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    name = f"`{row['precision']}`"
    return [name, str(Keys(*row["keys"])), *megabytes, f"{row['seconds'] * 1e3:.0f}", ratio]


def error_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of errors."""
    error = f"{row['error']:.1e}" if row["error"] else "0, bit by bit"
    return [f"`{row['precision']}`", str(Keys(*row["keys"])), str(row["micro"]), error]


def memory_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of memory."""
    return [str(Keys(*row["keys"])), f"{row['held'] / 1e6:.0f}"]


def report(
    found: dict[str, list[dict[str, Any]]], args: argparse.Namespace, loads: Sequence[float]
) -> str:
    """Return the text of the result."""
    weights = found["steps"][0]["weights"]
    head = ["precision", "param_dtype, reduce_dtype"]
    bytes_head = [
        "MB gathered",
        "MB reduced",
        "MB sent, loopback",
        "ms of a step",
        "ratio of times",
    ]
    return "\n\n".join(
        [
            f"A GPT of {weights / 1e6:.1f} million weights, {LAYERS} layers of width {args.width}, "
            f"{args.processes} processes over gloo on {os.cpu_count()} CPUs, {EXAMPLES} sequences "
            f"of {CONTEXT} tokens per process. Load average {loads[0]:.1f} before and "
            f"{loads[1]:.1f} after: other work ran on the machine, so that times only indicate, "
            "and the loopback device may have carried more than these processes'. Bytes of "
            "tensors are exact. Per process and step:",
            table([*head, *bytes_head], [step_cells(row) for row in found["steps"]]),
            "Gathered and reduced are whole tensors; a process sends (N - 1) / N of them, and gloo "
            "sends as much for a reduce-scatter as for an all-reduce. Ratios are to the step "
            f"without the keys in the same round: median of {args.rounds} rounds, least and "
            "greatest.",
            "Relative error of the first step's gradient, as a 2-norm, against the one that is "
            "gathered as stored and added in float32:",
            table([*head, "micro-batches", "error"], [error_cells(row) for row in found["errors"]]),
            f"Growth of the resident memory of a process, `{MEMORY_PRECISION}`, a GPT of "
            f"{found['memory'][0]['weights'] / 1e6:.1f} million weights:",
            table([head[1], "MB"], [memory_cells(row) for row in found["memory"]]),
        ]
    )


def main() -> None:
    """Measure, or be one of the processes that do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--file", type=Path, help="where a process of torchrun writes its rows")
    args = parser.parse_args()
    if args.file:
        work(args.file, args.rounds, args.width)
        return
    before = os.getloadavg()[0]
    found = launch(args.processes, args.rounds, args.width)
    # So that the allocator returns each tensor's memory, and none of one case is left for the next.
    found |= launch(args.processes, 0, MEMORY_WIDTH, MALLOC_MMAP_THRESHOLD_="65536")
    body = report(found, args, (before, os.getloadavg()[0]))
    write(
        "fsdp_dtypes",
        "What do FSDP's param_dtype and reduce_dtype save, and what do they lose?",
        body,
    )


if __name__ == "__main__":
    main()
