"""What does each option of docs/performance.md buy on a CPU?

One thread, contenders in turn, medians of CPU time; cold starts with torch's own caches off and the
compiler's time counted. `python -m bench.tuned [part ...]` runs some of the parts only, and puts
them beside what bench/results/tuned.json holds of the others. Nothing here needs a GPU, and nothing
here says what a GPU does.
"""

import argparse
import gc
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from bench.common import RESULTS, interleave, median, table, write, write_rows
from runner.config.schema import RunSpec, TrainSpec
from runner.data.loader import Loader, LoaderOptions
from runner.models.gpt import GPT
from runner.models.resnet import resnet
from runner.precision import registry
from runner.training.compile import prepare_model
from runner.training.optimizers import build_optimizer

CPU = torch.device("cpu")
PLAIN = registry.load_precision("32-true")
Rows = list[list[str]]


def gpt(vocab: int = 256, **sizes: float) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab, 128, **{"layers": 4, "heads": 4, "width": 128, **sizes})


def stepper(model: nn.Module, x: Tensor, y: Tensor, first: dict[str, float], name: str, **train):
    """A training step of a model that is shaped so."""
    prepare_model(replace(RunSpec(), train=TrainSpec(**train)), PLAIN, CPU, model)
    node = {"_target_": "torch.optim.AdamW", "lr": 1e-3}
    optimizer = build_optimizer("optimizer", node, list(model.parameters()))

    def step() -> None:
        output = model(x)
        loss = F.cross_entropy(output.flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        first.setdefault(name, loss.item())

    return step


def ratios(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """CPU time of each over that of the first."""
    found = {name: median([cpu for cpu, _ in t]) for name, t in interleave(steps, rounds).items()}
    base = next(iter(found.values()))
    return {name: value / base for name, value in found.items()}


def agree(first: dict[str, float], within: float = 1e-4) -> None:
    losses = list(first.values())
    assert max(losses) - min(losses) <= within, first


def tokens(rows: int, vocab: int = 256) -> tuple[Tensor, Tensor]:
    made = torch.randint(vocab, (rows, 129), generator=torch.Generator().manual_seed(0))
    return made[:, :-1], made[:, 1:]


def spent() -> float:
    """CPU seconds of this process and of the compilers that it has started."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, whose))


def compilation() -> Rows:
    """Steps of model=gpt, and the first of them, with its 4 layers and with 12."""
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1
    x, y = tokens(8)
    first: dict[str, float] = {}
    eager = stepper(gpt(), x, y, first, "false")
    torch.compile(nn.Linear(128, 128))(torch.ones(8, 128)).sum().backward()  # loads the compiler
    rows = [["`train.compile=false`", "1.00", "none", "none"]]
    for mode in ("default", "regional"):
        cold = {}
        for layers in (12, 4):
            label = f"{mode} {layers}" if layers == 12 else mode
            seen = {} if layers == 12 else first
            step, begun = stepper(gpt(layers=layers), x, y, seen, label, compile=mode), spent()
            step()
            cold[layers] = f"{spent() - begun:.0f} s"
        ratio = ratios({"false": eager, mode: step}, 15)[mode]
        rows.append([f"`train.compile={mode}`", f"{ratio:.2f}", cold[4], cold[12]])
    agree(first)
    return rows


class Kept:
    """Counts the bytes that autograd keeps for the backward, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self.params = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.seen: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.params:
            self.seen[storage.data_ptr()] = storage.nbytes()
        return tensor


def checkpointing() -> Rows:
    """Steps of model=gpt with 12 layers, and what they keep for the backward."""
    x, y = tokens(8)
    first: dict[str, float] = {}
    steps, kept = {}, {}
    for what in (False, True):
        model = gpt(layers=12, dropout=0.1)
        steps[str(what)] = stepper(model, x, y, first, str(what), activation_checkpointing=what)
        torch.manual_seed(1)
        count = Kept(model)
        with count.hooks:
            steps[str(what)]()
        kept[str(what)] = sum(count.seen.values())
    agree(first, 0.0)
    found = ratios(steps, 9)
    return [
        [
            f"`train.activation_checkpointing={name.lower()}`",
            f"{found[name]:.2f}",
            f"{kept[name] / kept['False']:.2f}",
        ]
        for name in found
    ]


class Short(Dataset):
    """A few examples that are not in memory."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((16,), float(index)), index


def loading() -> Rows:
    """Epochs of 8 batches from two processes, wall time."""
    options = LoaderOptions(workers=2)
    loaders = [
        Loader(Short(), 8, shuffle=True, seed=0, device=CPU, options=options) for _ in range(2)
    ]

    def epoch(loader: Loader, close: bool) -> None:
        assert sum(len(y) for _, y in loader.epoch(1)) == 64
        if close:
            loader.close()

    steps = {
        "anew in each epoch": lambda: epoch(loaders[0], True),
        "kept": lambda: epoch(loaders[1], False),
    }
    times = {name: median([wall for _, wall in t]) for name, t in interleave(steps, 25).items()}
    loaders[1].close()
    base = times["anew in each epoch"]
    return [[name, f"{value / base:.2f}", f"{value * 1e3:.0f} ms"] for name, value in times.items()]


def optimizers() -> Rows:
    """The update alone, of model=gpt's parameters: what the runner picks, and the others."""
    rows = []
    for name, lr in (
        ("AdamW", 1e-3),
        ("Adam", 1e-3),
        ("SGD", 1e-2),
        ("Adagrad", 1e-2),
        ("RMSprop", 1e-3),
        ("NAdam", 1e-3),
    ):
        node = {"_target_": f"torch.optim.{name}", "lr": lr}
        node |= {"momentum": 0.9} if name == "SGD" else {}
        steps = {}
        for how in ("picked", "for-loop", "foreach"):
            params = list(gpt().parameters())
            for p in params:
                p.grad = torch.ones_like(p)
            flag = {} if how == "picked" else {"foreach": how == "foreach", "fused": False}
            flag = {
                k: v
                for k, v in flag.items()
                if k in signature(getattr(torch.optim, name)).parameters
            }
            made = build_optimizer("optimizer", {**node, **flag}, params)
            steps[how] = made.step
            if how == "picked":
                label = "fused" if made.defaults.get("fused") else "torch's default"
        found = ratios(steps, 25)
        rows.append([f"{name}: {label}", *(f"{found[how]:.2f}" for how in steps)])
    return rows


def memory_format() -> Rows:
    """Steps of model=resnet on 32x32 images."""
    x, y = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    first: dict[str, float] = {}
    steps = {}
    for on in (False, True):
        torch.manual_seed(0)
        net = resnet(18, 10, [3, 32, 32])
        given = x.to(memory_format=torch.channels_last) if on else x
        steps[str(on)] = stepper(net, given, y, first, str(on), channels_last=on)
    found = ratios(steps, 7)
    agree(first, 1e-3)
    return [[f"`train.channels_last={name.lower()}`", f"{v:.2f}"] for name, v in found.items()]


def cross_entropy() -> Rows:
    """Head and loss of 1024 tokens of width 128 on a vocabulary of 32768."""
    torch.manual_seed(0)
    hidden = torch.randn(1024, 128, requires_grad=True)
    weight = torch.randn(32768, 128).mul_(0.02).requires_grad_()
    target = torch.randint(32768, (1024,))
    first: dict[str, float] = {}
    kept: dict[str, int] = {}

    def run(name: str, loss_of: Callable[[], Tensor]) -> None:
        hidden.grad = weight.grad = None
        count = Kept(nn.ParameterList([weight]))
        with count.hooks:
            loss = loss_of()
        kept[name] = sum(count.seen.values())
        first.setdefault(name, loss.item())
        loss.backward()

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target)

    def chunked() -> Tensor:
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden, weight, target, options=options)

    steps = {"logits, then cross_entropy": lambda: run("logits, then cross_entropy", plain)}
    if hasattr(F, "linear_cross_entropy"):
        steps["linear_cross_entropy"] = lambda: run("linear_cross_entropy", chunked)
    found = ratios(steps, 5)
    agree(first, 1e-3)
    return [[n, f"{found[n]:.2f}", f"{kept[n] / 2**20:.1f} MiB"] for n in found]


PARTS: dict[str, tuple[Callable[[], Rows], list[str]]] = {
    "compilation": (
        compilation,
        ["model=gpt", "step", "cold start, CPU time", "with model.layers=12"],
    ),
    "checkpointing": (checkpointing, ["model=gpt, 12 layers", "step", "kept for the backward"]),
    "loading": (loading, ["two processes", "epoch of 8 batches, wall time", "median"]),
    "optimizers": (optimizers, ["update: the runner picks", "picked", "for-loop", "foreach"]),
    "memory_format": (memory_format, ["model=resnet, 32x32", "step"]),
    "cross_entropy": (
        cross_entropy,
        ["32768 classes, 1024 tokens", "forward and backward", "kept for the backward"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    chosen = parser.parse_args().parts or list(PARTS)
    torch.set_num_threads(1)
    path = RESULTS / "tuned.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in chosen:
        begun, (measure, head) = perf_counter(), PARTS[name]
        found[name] = {"head": head, "rows": measure()}
        write_rows(path, found)
        print(f"{name}: {perf_counter() - begun:.0f} s", flush=True)
        gc.collect()
    body = "\n\n".join(
        f"{measure.__doc__}\n\n{table(found[name]['head'], found[name]['rows'])}"
        for name, (measure, _) in PARTS.items()
        if name in found
    )
    write("tuned", "What does each option of docs/performance.md buy on a CPU?", body)


if __name__ == "__main__":
    main()
