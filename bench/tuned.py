"""What does each option of docs/performance.md buy on a CPU?

    python -m bench.tuned [--parts compilation checkpointing ...]

One thread, contenders in turn, medians of CPU time; cold starts with torch's own caches off and the
compiler's time counted. Parts that are not named stay as bench/results/tuned.json has them. Nothing
here needs a GPU, and nothing here says what a GPU does.
"""

import gc
import json
import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from bench.common import RESULTS, interleave, parse_options, table, write, write_rows
from bench.training import CPU, VOCABULARY, random_tokens
from models.gpt import GPT
from models.resnet import resnet
from runner.core.config.schema import RunSpec, TrainSpec
from runner.data.loader import Loader, LoaderOptions
from runner.precision.registry import load_precision
from runner.training.compile import prepare_model
from runner.training.setup import build_optimizer

PRECISION = load_precision("32-true")
LEARNING_RATES = {
    "AdamW": 1e-3,
    "Adam": 1e-3,
    "SGD": 1e-2,
    "Adagrad": 1e-2,
    "RMSprop": 1e-3,
    "NAdam": 1e-3,
}
Rows = list[list[str]]


def gpt(**sizes: float) -> nn.Module:
    """Return a GPT of four layers, or of other sizes."""
    torch.manual_seed(0)
    return GPT(VOCABULARY, 128, **{"layers": 4, "heads": 4, "width": 128, **sizes})


class TrainingStep:
    """A training step of a model under options of train.*.

    Attributes:
        first_loss: loss of the first call.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, **train: Any) -> None:
        prepare_model(replace(RunSpec(), train=TrainSpec(**train)), PRECISION, CPU, model)
        node = {"_target_": "torch.optim.AdamW", "lr": 1e-3}
        self.optimizer = build_optimizer("optimizer", node, list(model.parameters()))
        self.model, self.x, self.y = model, x, y
        self.first_loss: float | None = None

    def __call__(self) -> None:
        """Train one step."""
        output = self.model(self.x)
        loss = F.cross_entropy(output.flatten(0, -2), self.y.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.first_loss is None:
            self.first_loss = loss.item()


def cpu_ratios(steps: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the CPU time of each over that of the first."""
    times = interleave(steps, rounds)
    medians = {name: median([cpu for cpu, _ in pairs]) for name, pairs in times.items()}
    base = next(iter(medians.values()))
    return {name: value / base for name, value in medians.items()}


def assert_close(losses: list[float | None], within: float = 1e-4) -> None:
    """Refuse contenders that compute something else."""
    values = [loss for loss in losses if loss is not None]
    assert max(values) - min(values) <= within, losses


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the compilers that it has started."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compilation() -> Rows:
    """Time steps of model=gpt, and the first of them, with its 4 layers and with 12."""
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1
    x, y = random_tokens(8, 128)
    eager = TrainingStep(gpt(), x, y)
    torch.compile(nn.Linear(128, 128))(torch.ones(8, 128)).sum().backward()  # loads the compiler
    rows = [["`train.compile=false`", "1.00", "none", "none"]]
    for mode in ("default", "regional"):
        deep = cold_start(TrainingStep(gpt(layers=12), x, y, compile=mode))
        step = TrainingStep(gpt(), x, y, compile=mode)
        cold = cold_start(step)
        ratio = cpu_ratios({"false": eager, mode: step}, 15)[mode]
        assert_close([eager.first_loss, step.first_loss])
        rows.append([f"`train.compile={mode}`", f"{ratio:.2f}", cold, deep])
    return rows


def cold_start(step: Callable[[], None]) -> str:
    """Return the text of the CPU seconds of a first step."""
    began = cpu_seconds()
    step()
    return f"{cpu_seconds() - began:.0f} s"


def bytes_for_backward(model: nn.Module, run: Callable[[], object]) -> int:
    """Return the bytes that autograd saves for the backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(saved.values())


def checkpointing() -> Rows:
    """Time steps of model=gpt with 12 layers; measure what they keep for the backward."""
    x, y = random_tokens(8, 128)
    steps, saved = {}, {}
    for name, is_on in (("false", False), ("true", True)):
        model = gpt(layers=12, dropout=0.1)
        steps[name] = TrainingStep(model, x, y, activation_checkpointing=is_on)
        torch.manual_seed(1)
        saved[name] = bytes_for_backward(model, steps[name])
    assert_close([step.first_loss for step in steps.values()], 0.0)
    ratios = cpu_ratios(steps, 9)
    rows = []
    for name, ratio in ratios.items():
        key = f"`train.activation_checkpointing={name}`"
        rows.append([key, f"{ratio:.2f}", f"{saved[name] / saved['false']:.2f}"])
    return rows


class FewExamples(Dataset):
    """Examples that are not in memory."""

    def __len__(self) -> int:
        """Return the number of examples."""
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an example and its label."""
        return torch.full((16,), float(index)), index


def loading() -> Rows:
    """Time epochs of 8 batches from two processes, wall time."""
    options = LoaderOptions(workers=2)
    make = partial(Loader, FewExamples(), 8, shuffle=True, seed=0, device=CPU, options=options)
    anew, kept = make(), make()

    def read_epoch(loader: Loader) -> None:
        assert sum(len(y) for _, y in loader.epoch(1)) == 64

    def read_epoch_anew() -> None:
        read_epoch(anew)
        anew.close()

    steps = {"anew in each epoch": read_epoch_anew, "kept": partial(read_epoch, kept)}
    times = interleave(steps, 25)
    kept.close()
    medians = {name: median([wall for _, wall in pairs]) for name, pairs in times.items()}
    base = medians["anew in each epoch"]
    return [[name, f"{v / base:.2f}", f"{v * 1e3:.0f} ms"] for name, v in medians.items()]


def optimizers() -> Rows:
    """Time updates of model=gpt's parameters: what the runner picks, and the others."""
    rows = []
    for name, lr in LEARNING_RATES.items():
        node = {"_target_": f"torch.optim.{name}", "lr": lr}
        if name == "SGD":
            node["momentum"] = 0.9
        accepted = signature(getattr(torch.optim, name)).parameters
        others = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
        if "fused" in accepted:
            others = {how: {**flags, "fused": False} for how, flags in others.items()}
        built = {}
        for how, flags in ({"picked": {}} | others).items():
            parameters = list(gpt().parameters())
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            built[how] = build_optimizer("optimizer", {**node, **flags}, parameters)
        ratios = cpu_ratios({how: optimizer.step for how, optimizer in built.items()}, 25)
        label = "fused" if built["picked"].defaults.get("fused") else "torch's default"
        rows.append([f"{name}: {label}", *(f"{ratio:.2f}" for ratio in ratios.values())])
    return rows


def memory_format() -> Rows:
    """Time steps of model=resnet on 32x32 images."""
    x, y = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    steps = {}
    for name, layout in (("false", torch.contiguous_format), ("true", torch.channels_last)):
        torch.manual_seed(0)
        model, images = resnet(18, 10, [3, 32, 32]), x.to(memory_format=layout)
        steps[name] = TrainingStep(model, images, y, channels_last=name == "true")
    ratios = cpu_ratios(steps, 7)
    assert_close([step.first_loss for step in steps.values()], 1e-3)
    return [[f"`train.channels_last={name}`", f"{ratio:.2f}"] for name, ratio in ratios.items()]


def cross_entropy() -> Rows:
    """Time head and loss of 1024 tokens of width 128 on a vocabulary of 32768."""
    torch.manual_seed(0)
    hidden = torch.randn(1024, 128, requires_grad=True)
    weight = nn.Parameter(torch.randn(32768, 128).mul_(0.02))
    target = torch.randint(32768, (1024,))

    def whole_logits() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target)

    def in_chunks() -> Tensor:
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden, weight, target, options=options)

    def train(loss_of: Callable[[], Tensor]) -> None:
        hidden.grad = weight.grad = None
        loss_of().backward()

    losses = {"logits, then cross_entropy": whole_logits}
    if hasattr(F, "linear_cross_entropy"):
        losses["linear_cross_entropy"] = in_chunks
    assert_close([loss_of().item() for loss_of in losses.values()], 1e-3)
    parameters = nn.ParameterList([weight])
    saved = {name: bytes_for_backward(parameters, loss_of) for name, loss_of in losses.items()}
    ratios = cpu_ratios({name: partial(train, loss_of) for name, loss_of in losses.items()}, 5)
    return [[name, f"{ratios[name]:.2f}", f"{saved[name] / 2**20:.1f} MiB"] for name in losses]


class Part(NamedTuple):
    """A question: its measurement, and the head of its table."""

    measure: Callable[[], Rows]
    head: list[str]


PARTS = {
    "compilation": Part(
        compilation, ["model=gpt", "step", "cold start, CPU time", "with model.layers=12"]
    ),
    "checkpointing": Part(checkpointing, ["model=gpt, 12 layers", "step", "kept for the backward"]),
    "loading": Part(loading, ["two processes", "epoch of 8 batches, wall time", "median"]),
    "optimizers": Part(optimizers, ["update: the runner picks", "picked", "for-loop", "foreach"]),
    "memory_format": Part(memory_format, ["model=resnet, 32x32", "step"]),
    "cross_entropy": Part(
        cross_entropy,
        ["32768 classes, 1024 tokens", "forward and backward", "kept for the backward"],
    ),
}


def main() -> None:
    """Measure the chosen parts."""
    chosen = parse_options(__doc__, parts=list(PARTS)).parts
    torch.set_num_threads(1)
    path = RESULTS / "tuned.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in chosen:
        began = perf_counter()
        results[name] = {"head": PARTS[name].head, "rows": PARTS[name].measure()}
        write_rows(path, results)
        print(f"{name}: {perf_counter() - began:.0f} s", flush=True)
        gc.collect()
    texts = [
        f"{part.measure.__doc__}\n\n{table(results[name]['head'], results[name]['rows'])}"
        for name, part in PARTS.items()
        if name in results
    ]
    question = "What does each option of docs/performance.md buy on a CPU?"
    write("tuned", question, "\n\n".join(texts))


if __name__ == "__main__":
    main()
