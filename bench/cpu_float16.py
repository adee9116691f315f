"""What does float16 training cost on a CPU: PyTorch's kernels against float32 accumulation?

    python -m bench.cpu_float16

Full training steps (forward, loss, backward, loss scale, SGD) in turn, A B A B, in one process;
ratios of medians over 32-true, wall and CPU time. Writes bench/results/cpu_float16.md.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runner.precision.emulation import float16 as cpu16
from runner.precision.emulation.float16 import KERNELS, float32_accumulate

HALF, BF16 = torch.float16, torch.bfloat16
RESULTS = Path(__file__).parent / "results" / "cpu_float16.md"


class Gpt(nn.Module):
    """A decoder of four layers, 128 wide, four heads, over 256 tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, "gelu", batch_first=True)
        self.table, self.head = nn.Embedding(256, 128), nn.Linear(128, 256, bias=False)
        self.blocks = nn.TransformerEncoder(layer, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        return self.head(self.blocks(x, mask, is_causal=True))[:, -1]


class Last(nn.Module):  # the last time step of a recurrent layer's output
    def forward(self, x: tuple[Tensor, Any]) -> Tensor:
        return x[0][:, -1]


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return nn.Sequential(kind(32, 128, 2, batch_first=True), Last(), nn.Linear(128, 4))


def resnet(small_stem: bool) -> nn.Module:
    model = torchvision.models.resnet18(num_classes=4)
    if small_stem:
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return model


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def vit() -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 4, "num_layers": 4, "num_heads": 3}
    return torchvision.models.VisionTransformer(**sizes, hidden_dim=192, mlp_dim=768, num_classes=4)


# model, input shape, interleaved rounds, steps per round
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "resnet18, small stem, 16x3x32x32": (lambda: resnet(True), (16, 3, 32, 32), 9, 1),
    "resnet18, 16x3x64x64": (lambda: resnet(False), (16, 3, 64, 64), 9, 1),
    "resnet18, 32x3x64x64": (lambda: resnet(False), (32, 3, 64, 64), 9, 1),
    "vit 4 layers, 192 wide, 16x3x32x32": (vit, (16, 3, 32, 32), 9, 2),
    "gpt 4 layers, 128 wide, 8x64 tokens": (Gpt, (8, 64), 9, 4),
    "lstm 2 layers, 128 wide, 16x32x32": (lambda: recurrent(nn.LSTM), (16, 32, 32), 9, 4),
    "gru 2 layers, 128 wide, 16x32x32": (lambda: recurrent(nn.GRU), (16, 32, 32), 9, 4),
    "mlp 256-256-4, batch 32": (lambda: mlp(256), (32, 256), 15, 20),
    "mlp 16-16-4, batch 8": (lambda: mlp(16), (8, 16), 25, 40),
}

# precision, whether the kernels accumulate in float32
CONTENDERS = {
    "32-true": ("32-true", False),
    "16-mixed native": ("16-mixed", False),
    "16-mixed accumulating": ("16-mixed", True),
    "16-true accumulating": ("16-true", True),
    "bf16-mixed": ("bf16-mixed", False),
}

Step = Callable[[], Any]


def training(build: Callable[[], nn.Module], shape: tuple[int, ...], precision: str) -> Step:
    """A function that does one training step and returns its loss."""
    torch.manual_seed(0)
    model, tokens = build(), build is Gpt
    x = torch.randint(0, 256, shape) if tokens else torch.randn(shape)
    y = torch.randint(0, 4, (shape[0],))
    dtype = {"16": HALF, "bf16": BF16}.get(precision.split("-")[0], torch.float32)
    mixed = precision.endswith("mixed")
    if not mixed:
        model, x = model.to(dtype), x if tokens else x.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=mixed):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


Took = tuple[float, float, float]
Contender = tuple[Step, Callable[[], AbstractContextManager[Any]], int]


def interleaved(contenders: dict[str, Contender], rounds: int, steps: int) -> dict[str, Took]:
    """Median wall, least wall, median CPU milliseconds per step, within each one's own limit."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, (step, context, limit) in contenders.items():
            if turn >= limit:
                continue
            with context():
                if limit == rounds:
                    step()  # warm: entering the context empties the caches of the dispatcher
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(steps):
                    step()
                end = time.perf_counter(), time.process_time()
            times[name].append(((end[0] - wall) / steps * 1e3, (end[1] - cpu) / steps * 1e3))
    middle = {n: [statistics.median(c) for c in zip(*t, strict=True)] for n, t in times.items()}
    return {name: (wall, min(times[name])[0], cpu) for name, (wall, cpu) in middle.items()}


def ratios(took: dict[str, Took], names: list[str]) -> str:
    """Cells of a row: the first contender's milliseconds, the others' ratios to it."""
    base = took[names[0]]
    cells = ["{:.2f} ({:.2f}, {:.2f})".format(*base)]
    for name in names[1:]:
        parts = [mine / its for mine, its in zip(took.get(name, ()), base, strict=False)]
        cells.append("{:.2f} ({:.2f}, {:.2f})".format(*parts) if parts else "fails")
    return " | ".join(cells)


def attempt(
    build: Callable[[], nn.Module], shape: tuple[int, ...], rounds: int
) -> dict[str, Contender]:
    """The contenders that can train this model, after a first step; its losses must agree."""
    ready: dict[str, Contender] = {}
    losses: list[float] = []
    for label, (precision, accumulates) in CONTENDERS.items():
        step = training(build, shape, precision)
        context = float32_accumulate if accumulates else nullcontext
        # The native convolutions take minutes for what the others do in seconds.
        slow = "native" in label and len(shape) == 4
        with suppress(RuntimeError), context():
            losses.append(step().item())
            ready[label] = (step, context, 1 if slow else rounds)
    assert max(losses) - min(losses) < 0.03 * losses[0], losses
    return ready


def models() -> Iterator[str]:
    yield "| model | 32-true, ms | " + " | ".join(list(CONTENDERS)[1:]) + " | auto takes |"
    yield "|" + "---|" * (len(CONTENDERS) + 2)
    for name, (build, shape, rounds, steps) in MODELS.items():
        took = interleaved(attempt(build, shape, rounds), rounds, steps)
        auto = cpu16.choose_kernels("auto", build())
        yield f"| {name} | {ratios(took, list(CONTENDERS))} | {auto} |"


class DispatchMode(TorchDispatchMode):
    """Mechanism (a): every ATen operator of the forward and the backward passes Python."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kernel = KERNELS.get(func._schema.name.removeprefix("aten::"))
        if kernel is None or args[0].dtype is not HALF:
            return func(*args, **kwargs)
        wide = [None if t is None else t.float() for t in args[: kernel.half_arguments]]
        out = func(*wide, *args[kernel.half_arguments :], **kwargs)
        if isinstance(out, Tensor):
            return out.half()
        return tuple(
            t if t is None or i >= kernel.half_results else t.half() for i, t in enumerate(out)
        )


class FunctionMode(TorchFunctionMode):
    """Mechanism (c): the forward's functions, casts recorded by autograd (saved in float32)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in (torch.conv2d, F.linear):
            return func(*args, **(kwargs or {}))
        wide = [t.half().float() if isinstance(t, Tensor) else t for t in args]
        with torch.autocast("cpu", enabled=False):
            return func(*wide, **(kwargs or {})).half()


def mechanisms() -> Iterator[str]:
    contexts = {
        "kernels in the dispatcher (used)": float32_accumulate,
        "dispatch mode": DispatchMode,
        "function mode": FunctionMode,
    }
    yield "| model | 32-true, ms | " + " | ".join(contexts) + " |"
    yield "|" + "---|" * (len(contexts) + 2)
    for name in ("resnet18, small stem, 16x3x32x32", "mlp 16-16-4, batch 8"):
        build, shape, rounds, steps = MODELS[name]
        steps_of = {"32": (training(build, shape, "32-true"), nullcontext, rounds)}
        for label, context in contexts.items():
            steps_of[label] = (training(build, shape, "16-mixed"), context, rounds)
        took = interleaved(steps_of, rounds, steps)
        yield f"| {name} | {ratios(took, list(steps_of))} |"


def crossover() -> Iterator[str]:
    yield "| layer | weight elements | batch | native, µs | accumulating, µs |"
    yield "|---|---|---|---|---|"
    layers = [(nn.Linear(w, w), (w,)) for w in (32, 64, 96, 128)]
    channels = ((1, 4), (1, 8), (1, 16), (4, 8), (8, 16))
    layers += [(nn.Conv2d(i, o, 3), (i, s, s)) for s in (8, 28) for i, o in channels]
    for layer, shape in layers:
        layer.half()
        for batch in (8, 32, 128):
            x = torch.randn(batch, *shape).half().requires_grad_()

            def step(layer: nn.Module = layer, x: Tensor = x) -> None:
                layer(x).sum().backward()

            pair: dict[str, Contender] = {
                "native": (step, nullcontext, 9),
                "accumulating": (step, float32_accumulate, 9),
            }
            took = interleaved(pair, 9, 10)
            cells = " | ".join(f"{least * 1e3:.0f}" for _, least, _ in took.values())
            label = f"{type(layer).__name__} on {'x'.join(map(str, shape))}"
            yield f"| {label} | {layer.weight.numel()} | {batch} | {cells} |"


NOTES = """
## Reading

- Cells are ratios to 32-true's milliseconds: median wall time (least wall, median CPU) of 9 to 25
  interleaved rounds, one for native cells with images. The last table has least wall times.
- "auto takes" is what `precision.cpu_float16=auto` resolves to. Its thresholds (4096 elements of a
  matrix, 128 of a convolution's weight) are where the last table crosses over.

## What did not work, or was left out

- A dispatch mode: every operator of the step passes Python, not only the heavy ones.
- A function mode: it sees the forward only. Autograd records the casts, so it keeps float32 copies
  of the activations and the backward has float16's range only at the borders.
- Overriding `lstm.input` for CPU only: a CPU kernel takes a composite's autograd away.
- `pow` with a scalar and vector norms (18x), the backward of `conv_tbc` (7x) are left to PyTorch:
  cheap beside the products, or rare. Normalisation, softmax, GELU, pooling, embeddings and
  element-wise operators cost at most 2x float32, most of them less than 1x.
- GRU and RNN have no fused CPU kernel, in float32 either: each time step pays for its casts.
"""


def report() -> Iterator[str]:
    yield "# float16 on the CPU: ratios to float32"
    yield "\nQuestion: " + str(__doc__).splitlines()[0]
    yield "\nCommand: `python -m bench.cpu_float16`\n"
    cpu = torch.cpu.get_capabilities().get("cpu_name", platform.processor())
    yield f"- {cpu} ({platform.machine()}), {torch.get_num_threads()} threads"
    yield f"- float16 units: {cpu16.has_native_float16()}; load {os.getloadavg()[0]:.1f}"
    versions = (platform.python_version(), torch.__version__, torchvision.__version__)
    yield "- Python {}, torch {}, torchvision {}".format(*versions)
    yield "\n## Training steps\n"
    yield from models()
    yield "\n## Mechanisms (16-mixed)\n"
    yield from mechanisms()
    yield "\n## Where accumulating starts to pay (forward and backward of one layer)\n"
    yield from crossover()
    yield NOTES.rstrip()


def main() -> None:
    lines = []
    for line in report():
        print(line, flush=True)
        lines.append(line)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
