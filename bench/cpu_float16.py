"""What does float16 training cost on a CPU: PyTorch's kernels against float32 accumulation?

    python -m bench.cpu_float16 [--rounds 9] [--models mlp gpt ...]

Full training steps (forward, loss, backward, loss scale, SGD) in turn, A B A B, in one process;
ratios of medians over 32-true, wall and CPU time. Writes bench/results/cpu_float16.md.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from bench.common import table, versions, write
from runner.precision.emulation import float16
from runner.precision.emulation.float16 import float32_accumulate

Build = Callable[[], nn.Module]


class Decoder(nn.Module):
    """A decoder of four layers, 128 wide, four heads, over 256 tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, "gelu", batch_first=True)
        self.table, self.head = nn.Embedding(256, 128), nn.Linear(128, 256, bias=False)
        self.blocks = nn.TransformerEncoder(layer, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the last token."""
        x = self.table(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        return self.head(self.blocks(x, mask, is_causal=True))[:, -1]


class LastStep(nn.Module):
    """The last time step of a recurrent layer's output."""

    def forward(self, x: tuple[Tensor, Any]) -> Tensor:
        """Return the last time step."""
        return x[0][:, -1]


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    """Return a recurrent model of two layers."""
    return nn.Sequential(kind(32, 128, 2, batch_first=True), LastStep(), nn.Linear(128, 4))


def resnet(small_stem: bool) -> nn.Module:
    """Return a ResNet-18, with a stem for small images if asked for."""
    model = torchvision.models.resnet18(num_classes=4)
    if small_stem:
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return model


def mlp(width: int) -> nn.Module:
    """Return a model of two linear layers."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def vit() -> nn.Module:
    """Return a vision transformer of four layers."""
    sizes = {"image_size": 32, "patch_size": 4, "num_layers": 4, "num_heads": 3}
    return torchvision.models.VisionTransformer(**sizes, hidden_dim=192, mlp_dim=768, num_classes=4)


class Case(NamedTuple):
    """A model, the shape of its input, and the steps of a round."""

    build: Build
    shape: tuple[int, ...]
    steps: int


CASES = {
    "resnet18, small stem, 16x3x32x32": Case(lambda: resnet(True), (16, 3, 32, 32), 1),
    "resnet18, 16x3x64x64": Case(lambda: resnet(False), (16, 3, 64, 64), 1),
    "resnet18, 32x3x64x64": Case(lambda: resnet(False), (32, 3, 64, 64), 1),
    "vit 4 layers, 192 wide, 16x3x32x32": Case(vit, (16, 3, 32, 32), 2),
    "gpt 4 layers, 128 wide, 8x64 tokens": Case(Decoder, (8, 64), 4),
    "lstm 2 layers, 128 wide, 16x32x32": Case(lambda: recurrent(nn.LSTM), (16, 32, 32), 4),
    "gru 2 layers, 128 wide, 16x32x32": Case(lambda: recurrent(nn.GRU), (16, 32, 32), 4),
    "mlp 256-256-4, batch 32": Case(lambda: mlp(256), (32, 256), 20),
    "mlp 16-16-4, batch 8": Case(lambda: mlp(16), (8, 16), 40),
}

# Precision, whether the kernels accumulate in float32.
CONTENDERS = {
    "32-true": ("32-true", False),
    "16-mixed native": ("16-mixed", False),
    "16-mixed accumulating": ("16-mixed", True),
    "16-true accumulating": ("16-true", True),
    "bf16-mixed": ("bf16-mixed", False),
}
DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32}


class Contender(NamedTuple):
    """A training step, the context that it runs in, and for how many rounds."""

    step: Callable[[], Tensor]
    context: Callable[[], AbstractContextManager[Any]]
    rounds: int


class Milliseconds(NamedTuple):
    """Milliseconds of a step: median and least wall time, median CPU time."""

    wall: float
    least: float
    cpu: float


def training_step(case: Case, precision: str) -> Callable[[], Tensor]:
    """Return a function that does one training step and returns its loss."""
    torch.manual_seed(0)
    model = case.build()
    dtype, is_mixed = DTYPES[precision.split("-")[0]], precision.endswith("mixed")
    y = torch.randint(0, 4, (case.shape[0],))
    if isinstance(model, Decoder):
        x = torch.randint(0, 256, case.shape)
    else:
        x = torch.randn(case.shape).to(torch.float32 if is_mixed else dtype)
    if not is_mixed:
        model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=is_mixed):
            output = model(x)
        loss = F.cross_entropy(output.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def contenders(case: Case, rounds: int) -> dict[str, Contender]:
    """Return the contenders that can train a model, after a first step; the losses must agree."""
    able: dict[str, Contender] = {}
    losses: list[float] = []
    for label, (precision, accumulates) in CONTENDERS.items():
        step = training_step(case, precision)
        context = float32_accumulate if accumulates else nullcontext
        # The native convolutions take minutes for what the others do in seconds.
        is_slow = "native" in label and len(case.shape) == 4
        with suppress(RuntimeError), context():
            losses.append(step().item())
            able[label] = Contender(step, context, 1 if is_slow else rounds)
    assert max(losses) - min(losses) < 0.03 * losses[0], losses
    return able


def time_in_turn(
    contenders: dict[str, Contender], rounds: int, steps: int
) -> dict[str, Milliseconds]:
    """Time the contenders in turn, each for its own number of rounds."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, contender in contenders.items():
            if turn >= contender.rounds:
                continue
            with contender.context():
                if contender.rounds == rounds:
                    contender.step()  # warm: a context empties the caches of the dispatcher
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(steps):
                    contender.step()
                end = time.perf_counter(), time.process_time()
            times[name].append(((end[0] - wall) / steps * 1e3, (end[1] - cpu) / steps * 1e3))
    milliseconds = {}
    for name, pairs in times.items():
        walls, cpus = zip(*pairs, strict=True)
        middle = statistics.median(walls), statistics.median(cpus)
        milliseconds[name] = Milliseconds(middle[0], min(walls), middle[1])
    return milliseconds


def row(name: str, case: Case, rounds: int) -> list[str]:
    """Return a model's cells: milliseconds of 32-true, the others' ratios to it, auto's choice."""
    times = time_in_turn(contenders(case, rounds), rounds, case.steps)
    base = times["32-true"]
    cells = [name, "{:.2f} ({:.2f}, {:.2f})".format(*base)]
    for label in list(CONTENDERS)[1:]:
        if label not in times:
            cells.append("fails")
            continue
        ratios = [own / its for own, its in zip(times[label], base, strict=True)]
        cells.append("{:.2f} ({:.2f}, {:.2f})".format(*ratios))
    return [*cells, float16.choose_kernels("auto", case.build())]


def main() -> None:
    """Measure every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", help="how their names begin; all if not given")
    args = parser.parse_args()
    chosen = tuple(args.models or CASES)
    cases = {name: case for name, case in CASES.items() if name.startswith(chosen)}
    rows = [row(name, case, args.rounds) for name, case in cases.items()]
    head = ["model", "32-true, ms", *list(CONTENDERS)[1:], "auto takes"]
    notes = (
        f"{torch.get_num_threads()} threads, float16 units: {float16.has_native_float16()}, load "
        f"{os.getloadavg()[0]:.1f}, {versions('torchvision')}. Cells are ratios to 32-true's "
        f"milliseconds: median wall time (least wall, median CPU) of {args.rounds} rounds, one for "
        'native cells with images. "auto takes" is what `precision.cpu_float16=auto` resolves to.'
    )
    question = "What does float16 training cost on a CPU?"
    write("cpu_float16", question, f"{notes}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
