"""How far are the formulae of docs/scaling.md from what DDP and FSDP take on this machine?

    python -m bench.scaling [--processes 2] [--rounds 5] [--widths 128 256 384]

Small GPTs train with the runner's own loop in local processes that communicate over gloo, one
thread each, in turn: every process for itself, under DDP, under FSDP. Predicted and measured are
the bytes that a process sends in a step, the seconds of a step, and the growth of its resident
memory. gloo works on the cores that compute, so no collective hides behind the compute: a step is
predicted as the step without collectives plus the collectives. Writes bench/results/scaling.md.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from bench.common import ROOT, parse_options, table, write
from bench.training import CPU, VOCABULARY, random_tokens, training_state
from models.gpt import GPT
from runner.core import training_loop
from runner.core.base.accelerators import Accelerator
from runner.core.base.tensor_facts import MIB
from runner.core.base.torchrun import ProcessRank
from runner.core.config.schema import TrainSpec
from runner.core.loop.strategy import Single, Strategy
from runner.data.loader import Loader, LoaderOptions
from runner.precision.registry import load_precision
from runner.training.strategies.ddp import DDP
from runner.training.strategies.fsdp import FSDP
from runner.training.tasks.language import Language

CONTEXT, LAYERS = 64, 4
EXAMPLES = 2  # of each process in a step
STEPS = 2  # of a round
SMALL, LARGE = 4096, 16 * MIB  # bytes of the collectives that are timed
WARM_UP_WIDTH, MEMORY_WIDTH = 32, 512
REDUCED = 4  # bytes of a gradient on the wire: both strategies add in float32
FIRST_BUCKET, BUCKET = MIB, 25 * MIB  # of DistributedDataParallel


class Storage(NamedTuple):
    """Bytes that a precision stores per weight, and those of the copy that autocast makes of it."""

    weight: int
    cast: int = 0


PRECISIONS = {
    "32-true": Storage(4),
    "bf16-mixed": Storage(4, cast=2),
    "16-mixed": Storage(4, cast=2),
    "bf16-true": Storage(2),
}


class Size(NamedTuple):
    """Weights of a model and of one of its repeated blocks."""

    weights: int
    block: int


def sent_per_weight(
    strategy: str, storage: Storage, processes: int, over_gloo: bool = False
) -> float:
    """Return the bytes per weight that a process sends in a step.

    DDP all-reduces the gradients, which sends them twice. FSDP gathers the weights for the forward
    and again for the backward, and reduce-scatters the gradients; gloo sends as much for a
    reduce-scatter as for an all-reduce.
    """
    share = (processes - 1) / processes
    if strategy == "ddp":
        return 2 * REDUCED * share
    reduced = 2 * REDUCED if over_gloo else REDUCED
    return (2 * storage.weight + reduced) * share


def held_bytes(strategy: str, storage: Storage, processes: int, size: Size) -> float:
    """Return the bytes of weights, gradients, AdamW's two averages and copies on a process.

    FSDP shards the first three. Two gathered blocks and the gradients of one, before and after
    they are added in float32, are held for a moment. DDP widens narrow gradients to float32.
    """
    state = 4 * storage.weight * size.weights
    cast = storage.cast * size.weights
    if strategy == "fsdp":
        return state / processes + cast + size.block * (3 * storage.weight + REDUCED)
    widened = size.weights * REDUCED if storage.weight < REDUCED else 0
    return state + cast + widened


def collective_seconds(
    strategy: str, storage: Storage, size: Size, timed: dict[str, float]
) -> float:
    """Return the seconds that a step's collectives take: latency of each, bytes over bandwidth."""

    def seconds(kind: str, count: int, tensor_bytes: float) -> float:
        latency = timed[f"{kind} {SMALL}"]
        per_byte = (timed[f"{kind} {LARGE}"] - latency) / (LARGE - SMALL)
        return count * latency + tensor_bytes * max(per_byte, 0.0)

    if strategy == "ddp":
        buckets = 1 + ceil((size.weights * storage.weight - FIRST_BUCKET) / BUCKET)
        return seconds("all_reduce", max(buckets, 1), size.weights * REDUCED)
    units = LAYERS + 1  # the blocks, and the rest of the model
    gathers = seconds("all_gather", 2 * units, 2 * size.weights * storage.weight)
    return gathers + seconds("reduce_scatter", units, size.weights * REDUCED)


class Alone(Single):
    """A process that shares nothing with the others, which compute at the same time."""

    def __init__(self) -> None:
        self.rank = ProcessRank()


STRATEGIES: dict[str, Callable[[], Strategy]] = {"alone": Alone, "ddp": DDP, "fsdp": FSDP}


def count_weights(model: torch.nn.Module) -> int:
    """Return the number of weights."""
    return sum(parameter.numel() for parameter in model.parameters())


class Training:
    """The runner's loop over a GPT under a strategy."""

    def __init__(self, precision: str, width: int, strategy: Strategy) -> None:
        torch.manual_seed(0)
        self.precision = load_precision(precision)
        model: Any = self.precision.convert(GPT(VOCABULARY, CONTEXT, LAYERS, 4, width))[0]
        self.size = Size(count_weights(model), count_weights(model.blocks[0]))
        wrapped = strategy.wrap(model, CPU)
        self.state = training_state(wrapped, self.precision, Language(), lr=1e-4)
        self.state.strategy = strategy
        rank = strategy.rank
        data = TensorDataset(*random_tokens(64 * rank.world_size, CONTEXT))
        options = LoaderOptions(rank=rank)
        batch = EXAMPLES * rank.world_size
        loader = Loader(data, batch, shuffle=True, seed=0, device=CPU, options=options)
        train = TrainSpec(max_steps=10**9, eval_every=10**9, log_every=STEPS)
        self.records: Any = training_loop.fit(self.state, loader, loader, train)

    def session(self) -> AbstractContextManager[object]:
        """Return the context of the precision's kernels."""
        return self.precision.session(self.state.plain_model, CPU)

    def steps(self) -> None:
        """Train STEPS steps."""
        next(self.records)


def slowest_seconds(run: Callable[[], object]) -> float:
    """Return the seconds that the slowest process takes from a common start."""
    dist.barrier()
    began = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def loopback_bytes_of(run: Callable[[], object]) -> float:
    """Return the bytes that each process sends meanwhile, which all pass the loopback device."""
    dist.barrier()
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    run()
    dist.barrier()
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
    return sent / dist.get_world_size()


def time_collectives(times: dict[str, list[float]]) -> None:
    """Time each kind of collective on float32 tensors of two sizes, as the strategies call them."""
    world = dist.get_world_size()
    for size in (SMALL, LARGE):
        whole, part = torch.ones(size // 4), torch.ones(size // 4 // world)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole),  # noqa: B023
            "all_gather": lambda: dist.all_gather_into_tensor(torch.empty_like(whole), part),  # noqa: B023
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty_like(part), whole),  # noqa: B023
        }
        for kind, call in calls.items():
            times[f"{kind} {size}"].append(slowest_seconds(call))


def measure_steps(precision: str, width: int, rounds: int) -> dict[str, Any]:
    """Measure steps and collectives in turn, after a round that warms up."""
    times, sent = defaultdict(list), defaultdict(list)
    trainings = {name: Training(precision, width, make()) for name, make in STRATEGIES.items()}
    for turn in range(rounds + 1):
        for name, training in trainings.items():
            with training.session():
                times[name].append(slowest_seconds(training.steps) / STEPS)
                sent[name].append(loopback_bytes_of(training.steps) / STEPS)
        time_collectives(times)
        if not turn:
            times.clear()
    size = trainings["alone"].size
    for training in trainings.values():
        training.records.close()
    return {
        "precision": precision,
        "size": size,
        "seconds": {name: median(values) for name, values in times.items()},
        "sent": {name: min(values) for name, values in sent.items()},
    }


def resident_growth(precision: str, width: int, strategy: str) -> dict[str, Any]:
    """Measure by how much four steps raise the resident memory, with the model's own."""
    accelerator = Accelerator(CPU)
    accelerator.reset_peak_memory()
    before = psutil.Process().memory_info().rss
    training = Training(precision, width, STRATEGIES[strategy]())
    with training.session():
        training.steps()
        training.steps()
    training.records.close()
    grown = accelerator.peak_memory_mib() * MIB - before
    return {"precision": precision, "strategy": strategy, "size": training.size, "held": grown}


def work(file: Path, rounds: int, widths: Sequence[int]) -> None:
    """Measure as one of several processes; the first one writes the file."""
    torch.set_num_threads(1)
    control = DDP()
    with control.session():
        if rounds:
            rows = [measure_steps(name, width, rounds) for width in widths for name in PRECISIONS]
        else:
            cases = [(name, strategy) for strategy in ("ddp", "fsdp") for name in PRECISIONS]
            for name, strategy in cases:  # load the libraries
                resident_growth(name, WARM_UP_WIDTH, strategy)
            rows = [resident_growth(name, widths[0], strategy) for name, strategy in cases]
    if control.rank.is_main:
        file.write_text(json.dumps(rows))


def launch(processes: int, rounds: int, widths: Sequence[int], **env: str) -> list[dict[str, Any]]:
    """Return the rows that this module's processes measure; rounds=0 is for memory."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        words = [f"--rounds={rounds}", "--widths", *map(str, widths), f"--file={file}"]
        command = [*torchrun, f"--nproc-per-node={processes}", "-m", "bench.scaling", *words]
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        subprocess.run(command, env=os.environ | own, cwd=ROOT, check=True)
        return json.loads(file.read_text())


def step_rows(rows: Sequence[dict[str, Any]], processes: int) -> Iterator[list[str]]:
    """Yield the cells of a table: bytes and seconds, predicted / measured."""
    for row in rows:
        size, seconds, storage = Size(*row["size"]), row["seconds"], PRECISIONS[row["precision"]]
        for strategy in ("ddp", "fsdp"):
            sent = sent_per_weight(strategy, storage, processes, over_gloo=True) * size.weights
            collectives = collective_seconds(strategy, storage, size, seconds)
            predicted = seconds["alone"] + collectives
            yield [
                strategy.upper(),
                f"`{row['precision']}`",
                f"{size.weights / 1e6:.1f}",
                compared(sent, row["sent"][strategy], 1e6),
                f"{seconds['alone'] * 1e3:.0f}",
                compared(predicted, seconds[strategy], 1e-3),
            ]


def memory_rows(rows: Sequence[dict[str, Any]], processes: int) -> Iterator[list[str]]:
    """Yield the cells of a table: memory, predicted / measured."""
    for row in rows:
        storage, size = PRECISIONS[row["precision"]], Size(*row["size"])
        held = held_bytes(row["strategy"], storage, processes, size)
        cells = [row["strategy"].upper(), f"`{row['precision']}`", f"{size.weights / 1e6:.1f}"]
        yield [*cells, compared(held, row["held"], 1e6)]


def compared(predicted: float, measured: float, unit: float) -> str:
    """Return both values and the error of the prediction."""
    error = predicted / measured - 1
    return f"{predicted / unit:.0f} / {measured / unit:.0f} ({error:+.0%})"


def main() -> None:
    """Measure, or be one of the processes that do."""
    # A process of torchrun writes its rows to the file.
    args = parse_options(__doc__, processes=2, rounds=5, widths=[128, 256, 384], file="")
    if args.file:
        work(Path(args.file), args.rounds, args.widths)
        return
    steps = launch(args.processes, args.rounds, args.widths)
    # So that the allocator returns each tensor's memory, and none of one case is left for the next.
    held = launch(args.processes, 0, [MEMORY_WIDTH], MALLOC_MMAP_THRESHOLD_="65536")
    model = ["strategy", "precision", "10^6 weights"]
    head = [*model, "MB sent per step", "ms without collectives", "ms of a step"]
    body = "\n\n".join(
        [
            f"{args.processes} processes, medians of {args.rounds} rounds, load average "
            f"{os.getloadavg()[0]:.1f}. Cells: predicted / measured (error).",
            table(head, list(step_rows(steps, args.processes))),
            "Memory of a process, without activations in the prediction:",
            table([*model, "MB"], list(memory_rows(held, args.processes))),
        ]
    )
    write("scaling", "How far are the formulae of docs/scaling.md from what is measured?", body)


if __name__ == "__main__":
    main()
