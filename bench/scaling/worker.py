"""One of several processes: times collectives, compute and the runner's own steps, in turn.

torchrun ... -m bench.scaling.worker <file> <rounds, or 0 for memory> <width,layers> ...
The first process writes the file. Every time is the slowest process's, a list of rounds.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import TensorDataset

from models.gpt import GPT
from runner.config.schema import TrainSpec
from runner.data.loader import Loader, LoaderOptions
from runner.distributed.ddp import DDP
from runner.distributed.fsdp import FSDP
from runner.distributed.strategy import Single, Strategy
from runner.distributed.torchrun import ProcessRank
from runner.precision.registry import load_precision
from runner.training.loop import fit
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.step import loss_of
from runner.training.tasks.language import Language
from runner.utils.accelerator import Accelerator
from runner.utils.tensors import MIB

CPU = torch.device("cpu")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
SIZES = tuple(2**n for n in range(12, 26, 2))  # bytes, 4 KiB to 16 MiB
COPIED = 8 * MIB
VOCABULARY, CONTEXT, EXAMPLES = 256, 64, 2  # examples of each process
LOG_EVERY = 2

Times = dict[str, list[tuple[float, float]]]
"""By contender: wall and CPU seconds of each round."""


def timed(run: Callable[[], object], times: Times, name: str) -> None:
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    times[name].append((spent[0].item(), spent[1].item()))


def collectives(times: Times) -> None:
    """One of each kind and size, float32: in place, or into new memory, as the strategies call
    them. The barrier before each makes the processes start together."""
    world = dist.get_world_size()

    def gather(part: Tensor) -> None:
        dist.all_gather_into_tensor(torch.empty(len(part) * world), part)

    def scatter(whole: Tensor) -> None:
        dist.reduce_scatter_tensor(torch.empty(len(whole) // world), whole)

    for size in SIZES:
        whole = torch.ones(size // 4)
        part = torch.ones(size // 4 // world)
        timed(partial(dist.all_reduce, whole), times, f"all_reduce {size}")
        timed(partial(gather, part), times, f"all_gather {size}")
        timed(partial(scatter, whole), times, f"reduce_scatter {size}")


def others(times: Times, control: DDP) -> None:
    """8 MiB copied into new memory by every process at once; the flag of a stop, asked once, and
    twice in a row."""
    source = torch.ones(COPIED // 4)
    timed(source.clone, times, "copy")
    timed(lambda: control.all_reduce_max_async(0), times, "flag")
    timed(
        lambda: (control.all_reduce_max_async(0), control.all_reduce_max_async(0)),
        times,
        "flag twice",
    )


class Contender:
    """A GPT under a strategy, and the runner's loop over it."""

    def __init__(self, name: str, size: tuple[int, int], strategy: Strategy, control: DDP) -> None:
        width, layers = size
        torch.manual_seed(0)
        precision = load_precision(name)
        plain, _ = precision.convert(GPT(VOCABULARY, CONTEXT, layers, 4, width))
        self.params = sum(p.numel() for p in plain.parameters())
        self.block = sum(p.numel() for p in plain.blocks[0].parameters())  # type: ignore[union-attr]
        model = strategy.wrap(plain, CPU)
        adam = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
        self.state = TrainState(
            model,
            precision,
            Language(),
            precision.scale(CPU),
            [ScheduledOptimizer(adam)],
            CPU,
            strategy=strategy,
        )
        place = strategy.place
        tokens = torch.randint(VOCABULARY, (64 * place.world_size, CONTEXT + 1))
        data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        options = LoaderOptions(place=place)
        size = EXAMPLES * place.world_size
        loader = Loader(data, size, shuffle=True, seed=0, device=CPU, options=options)
        self.batch = next(loader.epoch(1))
        train = TrainSpec(max_steps=10**9, eval_every=10**9, log_every=LOG_EVERY)
        stopped = (
            (lambda: control.all_reduce_max_async(0) > 0) if place.world_size > 1 else lambda: False
        )
        self.precision = precision
        self.records = fit(self.state, loader, loader, train, should_stop=stopped)

    def session(self) -> AbstractContextManager[object]:
        return self.precision.session(self.state.plain_model, CPU)

    def steps(self) -> None:
        """LOG_EVERY steps of the runner's loop."""
        next(self.records)

    def passes(self) -> None:
        """As many forwards and backwards of the same, and nothing else."""
        for _ in range(LOG_EVERY):
            self.state.scale.multiply(loss_of(self.state, *self.batch)).backward()
            for p in self.state.trainable_parameters:
                p.grad = None


class Alone(Single):
    """One process among others, which compute at the same time and share nothing."""

    def __init__(self) -> None:
        self.place = ProcessRank()


def strategies() -> dict[str, Strategy]:
    return {"alone": Alone(), "ddp": DDP(), "fsdp": FSDP()}


def contest(name: str, size: tuple[int, int], rounds: int, control: DDP) -> dict[str, object]:
    """Compute alone, the steps of both strategies, collectives and copies, in turn; the first round
    warms up."""
    times, links = defaultdict(list), defaultdict(list)
    made = {key: Contender(name, size, strategy, control) for key, strategy in strategies().items()}
    for turn in range(rounds + 1):
        with made["alone"].session():
            timed(made["alone"].passes, times, "passes")
        for key, contender in made.items():
            with contender.session():
                timed(contender.steps, times, key)
        collectives(links)
        others(links, control)
        if not turn:
            times.clear()
            links.clear()
    for contender in made.values():
        contender.records.close()
    alone = made["alone"]
    per = {
        key: [(wall / LOG_EVERY, cpu / LOG_EVERY) for wall, cpu in found]
        for key, found in times.items()
    }
    return {
        "width": size[0],
        "layers": size[1],
        "precision": name,
        "params": alone.params,
        "block": alone.block,
        "times": per,
        "links": links,
    }


def peak(name: str, size: tuple[int, int], key: str, control: DDP) -> float:
    """Bytes by which four steps raised the resident set at most, the model's own included. Exact
    where malloc maps every tensor (MALLOC_MMAP_THRESHOLD_), so that none stays behind."""
    accelerator = Accelerator(CPU)
    accelerator.reset_peak_memory()
    before = psutil.Process().memory_info().rss
    contender = Contender(name, size, strategies()[key], control)
    with contender.session():
        contender.steps()
        contender.steps()
    contender.records.close()
    return accelerator.peak_memory_mib() * MIB - before


def memory(size: tuple[int, int], control: DDP) -> dict[str, float]:
    """By precision and strategy, after a small model of each has loaded what they load."""
    chosen = [(name, key) for name in PRECISIONS for key in ("ddp", "fsdp")]
    for name, key in chosen:
        peak(name, (32, size[1]), key, control)
    return {f"{name} {key}": peak(name, size, key, control) for name, key in chosen}


def main() -> None:
    file, rounds, *sizes = sys.argv[1:]
    chosen = [tuple(map(int, size.split(","))) for size in sizes]
    torch.set_num_threads(1)
    control = DDP()
    with control.session():
        if int(rounds):
            found = {
                "steps": [
                    contest(name, size, int(rounds), control)
                    for size in chosen
                    for name in PRECISIONS
                ]
            }
        else:
            found = {"memory": memory(chosen[0], control)}
    if control.place.is_main:
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
