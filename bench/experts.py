"""What do the packed experts of a mixture hold, and what does a step of converted ones cost?

    python -m bench.experts [--rounds 9]    writes bench/results/experts.md

held: bytes of a packed stack of 8 experts of 256 x 256 weights, read from its tensors. paper: those
of its codes and its scales, for each expert alone. step: CPU time of forward and backward of a
mixture (8 experts, 128 to 256 to 128 wide, 512 tokens, each for one at random) whose stacks are
converted, over that of the same mixture of unfused nn.Linears, converted too, and over that of the
stacks in bf16-mixed; contenders in turn, one thread.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.common import interleave, parse_options, spread, table, versions, write
from runner.precision.registry import load_precision
from runner.utils.tensors import stored_bytes

COUNT, SIZE, WIDTH, INNER, TOKENS = 8, 256, 128, 256, 512
CPU = torch.device("cpu")
# Bits of a code and of the scales for each weight; bnb's 4 bits have a table of 16 values, too.
PAPER = {
    "bnb-nf4": 4 + 32 / 64 + 32 * 16 / SIZE**2,
    "bnb-fp4": 4 + 32 / 64 + 32 * 16 / SIZE**2,
    "bnb-int8": 8 + 32 / SIZE,
    "int4": 4 + 32 / 32,
    "int8": 8 + 32 / SIZE,
    "nvfp4": 4 + 8 / 16 + 32 / SIZE**2,
}
TIMED = (*PAPER, "float8-rowwise", "transformer-engine-current", "qat-int4", "bnb-int8-training")


def random_ends() -> Tensor:
    """Return the row after the last one of each expert: other numbers of tokens in each step."""
    tokens = torch.randint(COUNT, (TOKENS,)).bincount(minlength=COUNT)
    return tokens.cumsum(0).to(torch.int32)


class Stacks(nn.Module):
    """Experts in two stacks, among which the tokens are shared at random."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(COUNT, inner, width) / width**0.5)
        self.second = nn.Parameter(torch.randn(COUNT, width, inner) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        ends = random_ends()
        inner = torch.relu(F.grouped_mm(x, self.first.mT, offs=ends))
        return F.grouped_mm(inner, self.second.mT, offs=ends)


class Unfused(nn.Module):
    """The same with an nn.Linear for each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(COUNT))
        self.second = nn.ModuleList(nn.Linear(INNER, WIDTH, bias=False) for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.tensor_split(random_ends()[:-1].long())
        pairs = zip(self.first, self.second, parts, strict=True)
        return torch.cat([second(torch.relu(first(rows))) for first, second, rows in pairs])


def converted(name: str, model: nn.Module, **options: Any) -> tuple[Any, nn.Module]:
    """Return a precision, emulated where it can be, and the model that it converted."""
    emulate = {"emulate": True} if name.startswith(("float8", "transformer")) else {}
    precision = load_precision(name, **emulate, **options)
    return precision, precision.convert(model)[0]


def step(name: str, model: nn.Module, **options: Any) -> Callable[[], None]:
    """Return a forward and backward of a converted model on fixed tokens."""
    precision, model = converted(name, model, **options)
    x = torch.randn(TOKENS, WIDTH).requires_grad_()

    def run() -> None:
        with precision.session(model, CPU), precision.forward(CPU):
            model(precision.cast(x)).float().square().mean().backward()

    return run


def main() -> None:
    """Write the bytes and the times."""
    rounds = parse_options(__doc__, rounds=9).rounds
    torch.set_num_threads(1)
    stacks = {"experts": ["first", "second"]}
    held = {n: stored_bytes(converted(n, Stacks(SIZE, SIZE), **stacks)[1]) / 2 for n in PAPER}
    paper = {name: bits / 8 * COUNT * SIZE**2 for name, bits in PAPER.items()}
    rows = [[f"`{n}`", f"{held[n]:,.0f}", f"{paper[n]:,.0f}"] for n in PAPER]
    lines = []
    for name in TIMED:
        steps = {"own": step(name, Stacks(), **stacks), "unfused": step(name, Unfused())}
        times = interleave({**steps, "bf16": step("bf16-mixed", Stacks())}, rounds)
        cpu = {key: [seconds for seconds, _ in found] for key, found in times.items()}
        ratios = {
            key: [a / b for a, b in zip(cpu["own"], cpu[key], strict=True)]
            for key in ("unfused", "bf16")
        }
        texts = [spread(ratios[key], ".2f") for key in ratios]
        lines.append([f"`{name}`", f"{1000 * median(cpu['own']):.1f}", *texts])
    head = ["precision", "step, ms", "over unfused (least to greatest)", "over bf16-mixed"]
    body = table(["precision", "held", "paper"], rows), table(head, lines)
    setting = f"{versions('torch', 'bitsandbytes', 'torchao')}, one thread"
    write("experts", (__doc__ or "").splitlines()[0], "\n\n".join([*body, setting]))


if __name__ == "__main__":
    main()
