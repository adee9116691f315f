"""What do the packed experts of a mixture hold, and what does a step of converted ones cost?

    python -m bench.experts [--rounds 9]    writes bench/results/experts.md

held: bytes of a packed stack of 8 experts of 256 x 256 weights, read from its tensors. paper: those
of its codes and its scales, for each expert alone. step: CPU time of forward and backward of a
mixture (8 experts, 128 to 256 to 128 wide, 512 tokens, each for one at random) whose stacks are
converted, over that of the same mixture of unfused nn.Linears, converted too, and over that of the
stacks in bf16-mixed. peer: the same mixture by peft's target_parameters (LoRA of rank 8, 32-true)
and by torchao's grouped product (MXFP8, emulated), where the number of each expert's tokens is a
multiple of 32. A time is that of 5 steps; contenders in turn, one thread.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from torchao.quantization.quantize_.common import KernelPreference

from bench.common import interleave, parse_options, spread, table, versions, write
from runner.core.base.tensor_facts import stored_bytes
from runner.precision.registry import load_precision
from runner.training.adapters import Lora

COUNT, SIZE, WIDTH, INNER, TOKENS = 8, 256, 128, 256, 512
STEPS = 5
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
FP8 = ("float8-rowwise", "torchao-mxfp8", "transformer-engine-current")
TIMED = (*PAPER, *FP8, "qat-int4", "bnb-int8-training")


def random_ends(multiple: int = 1) -> Tensor:
    """Return the row after the last one of each expert: other numbers of tokens in each step."""
    groups = torch.randint(COUNT, (TOKENS // multiple,)).bincount(minlength=COUNT)
    return (multiple * groups).cumsum(0).to(torch.int32)


class Stacks(nn.Module):
    """Experts in two stacks, among which the tokens are shared at random."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, multiple: int = 1) -> None:
        super().__init__()
        self.multiple = multiple
        self.first = nn.Parameter(torch.randn(COUNT, inner, width) / width**0.5)
        self.second = nn.Parameter(torch.randn(COUNT, width, inner) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        ends = random_ends(self.multiple)
        inner = torch.relu(self.product(x, self.first, ends))
        return self.product(inner, self.second, ends)

    def product(self, rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
        """Return the products of rows [N, in] with their experts of [E, out, in]."""
        return F.grouped_mm(rows, stack.mT, offs=ends)


class Torchao(Stacks):
    """The same with torchao's product in MXFP8."""

    def product(self, rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
        """Return the products of rows, see Stacks."""
        emulated = KernelPreference.EMULATED
        return _to_mxfp8_then_scaled_grouped_mm(rows, stack.mT, ends, kernel_preference=emulated)


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
    emulate = {"emulate": True} if name in FP8 else {}
    precision = load_precision(name, **emulate, **options)
    return precision, precision.convert(model)[0]


def step(name: str, model: nn.Module, **options: Any) -> Callable[[], None]:
    """Return forwards and backwards of a converted model on fixed tokens."""
    precision, model = converted(name, model, **options)
    x = torch.randn(TOKENS, WIDTH).requires_grad_()

    def run() -> None:
        with precision.session(model, CPU):
            for _ in range(STEPS):
                with precision.forward(CPU):
                    model(precision.cast(x)).float().square().mean().backward()

    return run


def adapted(by_peft: bool) -> nn.Module:
    """Return the stacks with additions of rank 8."""
    model = nn.Sequential(Stacks())
    names = ["0.first", "0.second"]
    if by_peft:
        config = peft.LoraConfig(r=8, target_parameters=names, target_modules=[])
        return peft.inject_adapter_in_model(config, model)
    lora = Lora(modules=names)
    lora.split_experts(model, dict.fromkeys(names, False))
    lora.add(model, torch.float32)
    return model


def compared(steps: dict[str, Callable[[], None]], rounds: int) -> list[str]:
    """Return the first contender's ms per step, and its ratios to each other one, as texts."""
    times = interleave(steps, rounds)
    own, *others = ([seconds for seconds, _ in found] for found in times.values())
    ratios = [[a / b for a, b in zip(own, other, strict=True)] for other in others]
    return [f"{1000 * median(own) / STEPS:.1f}", *(spread(found, ".2f") for found in ratios)]


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
        steps["bf16"] = step("bf16-mixed", Stacks())
        lines.append([f"`{name}`", *compared(steps, rounds)])
    head = ["precision", "step, ms", "over unfused (least to greatest)", "over bf16-mixed"]
    peers = {
        "peft's target_parameters": {
            "own": step("32-true", adapted(by_peft=False)),
            "peer": step("32-true", adapted(by_peft=True)),
        },
        "torchao's MXFP8 product": {
            "own": step("torchao-mxfp8", Stacks(multiple=32), **stacks),
            "peer": step("bf16-true", Torchao(multiple=32)),
        },
    }
    beside = [[name, *compared(steps, rounds)] for name, steps in peers.items()]
    body = (
        table(["precision", "held", "paper"], rows),
        table(head, lines),
        table(["peer", "step, ms", "over the peer (least to greatest)"], beside),
    )
    setting = f"{versions('torch', 'bitsandbytes', 'torchao', 'peft')}, one thread"
    write("experts", (__doc__ or "").splitlines()[0], "\n\n".join([*body, setting]))


if __name__ == "__main__":
    main()
