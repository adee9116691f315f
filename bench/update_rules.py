"""What does each rule of precision.update cost a step, and how many bytes does it keep?

    python -m bench.update_rules [--rounds 15] [--device cuda] [--layers 4] [--width 128]

A small GPT in bfloat16 weights with AdamW, one step of each contender in turn. Peers are measured
where they are installed: torch-optimi's Kahan AdamW, torchao's AdamW with stochastic rounding (both
step bfloat16 weights by themselves). Two contenders keep AdamW's state in bfloat16 beside float32
weights (optimizer.state_dtype). The update alone is timed, too: the rest of the step is the
same for all. Bytes are those that stay between steps: weights and the optimizer's state.
Writes bench/results/update_rules.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from bench.common import table, versions, write
from runner.models.gpt import GPT
from runner.precision import precision
from runner.precision.weight_updates import UPDATE_RULES
from runner.utils.tensors import tensor_bytes

VOCABULARY = 256
LENGTH = 128
BATCH = 16
LR = 1e-4


class Contender:
    """A model with its optimizer, and the times of its steps and updates in milliseconds."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[..., Optimizer],
        name: str = "bf16-true",
        device: str = "cpu",
        state_dtype: torch.dtype | None = None,
        **keys: str,
    ) -> None:
        self.policy = precision(name, device, **keys)
        self.model = self.policy.convert(model)
        self.optimizer = make(self.model.parameters())
        self.policy.check(self.optimizer, state_dtype=state_dtype)
        self.losses: list[float] = []
        self.step_ms: list[float] = []
        self.update_ms: list[float] = []

    def step(self, tokens: Tensor) -> None:
        """Train on a batch of tokens: [batch, length + 1]."""
        with self.policy.session():
            begin = self._now()
            with self.policy.forward():
                logits = self.model(tokens[:, :-1])
            loss = self.policy.loss(_cross_entropy, logits, tokens[:, 1:])
            self.policy.backward(loss)
            middle = self._now()
            self.policy.step(self.optimizer)
            end = self._now()
        self.losses.append(loss.item())
        self.step_ms.append((end - begin) * 1e3)
        self.update_ms.append((end - middle) * 1e3)

    def _now(self) -> float:
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @property
    def bytes_per_weight(self) -> float:
        """Return the bytes of weights and optimizer state, over the number of weights."""
        params = [*self.model.parameters()]
        states = [self.optimizer.state[p] for p in params]
        kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return tensor_bytes(*params, *kept) / sum(p.numel() for p in params)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _adamw(params: object) -> Optimizer:
    return torch.optim.AdamW(params, lr=LR, fused=True)  # type: ignore[arg-type]


def _contenders(options: argparse.Namespace) -> dict[str, Contender]:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return GPT(VOCABULARY, LENGTH, options.layers, 4, options.width)

    device = options.device
    found = {"32-true": Contender(model(), _adamw, "32-true", device=device)}
    for rule in UPDATE_RULES:
        found[f"bf16-true {rule}"] = Contender(model(), _adamw, update=rule, device=device)
    narrow = {"device": device, "state_dtype": torch.bfloat16}
    found["32-true, bfloat16 state"] = Contender(model(), _adamw, "32-true", **narrow)
    remainders = Contender(model(), _adamw, update="remainders", **narrow)
    found["bf16-true remainders, bfloat16 state"] = remainders
    if find_spec("optimi"):
        from optimi import AdamW  # type: ignore[import-not-found]

        def kahan(params: object) -> Optimizer:
            return AdamW(params, lr=LR, betas=(0.9, 0.999), weight_decay=0.01, eps=1e-8)

        found["optimi AdamW, Kahan"] = Contender(model(), kahan, device=device)
    from torchao.optim import _AdamW

    def rounding(params: object) -> Optimizer:
        return _AdamW(params, lr=LR, bf16_stochastic_round=True)

    if device == "cuda":  # it compiles its step, which takes minutes on a CPU
        found["torchao AdamW, stochastic rounding"] = Contender(model(), rounding, device=device)
    return found


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    contenders = _contenders(options)
    generator = torch.Generator().manual_seed(0)
    for turn in range(options.rounds + 2):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        for contender in contenders.values():
            contender.step(tokens.to(options.device))
        if turn == 1:  # two rounds warm up
            for contender in contenders.values():
                contender.step_ms.clear()
                contender.update_ms.clear()
    nearest = contenders["bf16-true nearest"]
    rows = []
    for name, contender in contenders.items():
        ratios = [a / b for a, b in zip(contender.step_ms, nearest.step_ms, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            [
                name,
                f"{contender.bytes_per_weight:.1f}",
                f"{statistics.median(contender.update_ms):.2f}",
                f"{statistics.median(contender.step_ms):.1f}",
                f"{middle:.3f} ({low:.3f} to {high:.3f})",
                f"{contender.losses[-1]:.4f}",
            ]
        )
    head = ["contender", "bytes per weight", "update ms", "step ms", "step × nearest", "last loss"]
    size = sum(p.numel() for p in nearest.model.parameters())
    body = (
        f"GPT of {size:,} weights, batch {BATCH} x {LENGTH}, AdamW, {options.device}, "
        f"{torch.get_num_threads()} threads; medians of {options.rounds} rounds, the ratio with "
        f"its quartiles. {versions('torch-optimi', 'torchao')}.\n\n{table(head, rows)}"
    )
    write("update_rules", "What does each rule of precision.update cost?", body)


if __name__ == "__main__":
    main()
