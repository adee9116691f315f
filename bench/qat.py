"""How much of int4's loss does quantisation-aware training recover?

    python -m bench.qat [--quick] [--seeds 3] [--steps 900] [--tune 250] [--group 128]

A small GPT learns the topics of Python's documentation, byte by byte, in float32. Then it is tuned
twice from the same weights, on the same batches at the same learning rates: in 32-true and in
qat-int4. All three models are evaluated in float32 and in int4 on the held-out tenth of the text.
The share that is recovered is (int4 after plain tuning - int4 after qat-int4) / (int4 after plain
tuning - float32 after plain tuning). Writes bench/results/qat.md; --quick only prints.
"""

import argparse
import copy
import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.common import table, versions, write
from runner.data.datasets.text import text
from runner.models.gpt import GPT
from runner.precision import precision

VOCABULARY = 256
CONTEXT = 128
BATCH = 16
LR = 1e-3
TUNE_LR = 3e-4


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(model: nn.Module, policy: Any, data: Any, steps: int, lr: float, seed: int) -> None:
    """Train a converted model on random windows, with a cosine schedule to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    with policy.session():
        for _ in range(steps):
            inputs, target = data.batch(torch.randint(len(data), (BATCH,), generator=generator))
            with policy.forward():
                logits = model(inputs)
            policy.backward(policy.loss(_cross_entropy, logits, target))
            policy.step(optimizer, clip_norm=1.0)
            schedule.step()


def validation_loss(model: nn.Module, name: str, data: Any, **keys: Any) -> float:
    """Return a plain model's mean loss per byte on all windows, in a precision."""
    policy = precision(name, **keys)
    converted = policy.convert(copy.deepcopy(model)).eval()
    total = 0.0
    with policy.session(), torch.no_grad():
        for indices in torch.arange(len(data)).split(64):
            inputs, target = data.batch(indices)
            with policy.forward():
                logits = converted(inputs)
            total += policy.loss(_cross_entropy, logits, target).item() * len(indices)
    return total / len(data)


def tuned(base: nn.Module, name: str, data: Any, options: argparse.Namespace, seed: int) -> Any:
    """Return the weights of a model after tuning in a precision, in a plain model."""
    keys = {"group_size": options.group} if name == "qat-int4" else {}
    policy = precision(name, **keys)
    model = policy.convert(copy.deepcopy(base))
    train(model, policy, data, options.tune, TUNE_LR, 1000 + seed)
    plain = copy.deepcopy(base)
    plain.load_state_dict(model.state_dict())
    return plain


def measure(options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Return the losses of one seed."""
    splits = text(context=CONTEXT)
    torch.manual_seed(seed)
    base = GPT(VOCABULARY, CONTEXT, options.layers, 4, options.width)
    policy = precision("32-true")
    train(policy.convert(base), policy, splits.train, options.steps, LR, seed)
    models = {"base": base}
    for name in ("32-true", "qat-int4"):
        models[name] = tuned(base, name, splits.train, options, seed)
    losses = {}
    for name, model in models.items():
        losses[f"{name} float32"] = validation_loss(model, "32-true", splits.val)
        losses[f"{name} int4"] = validation_loss(
            model, "int4", splits.val, group_size=options.group
        )
    lost = losses["32-true int4"] - losses["32-true float32"]
    losses["lost"] = lost
    losses["recovered"] = (losses["32-true int4"] - losses["qat-int4 int4"]) / lost
    return losses


def mean_and_error(values: list[float], form: str) -> str:
    """Return the text of a mean with its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):{form}} ± {error:{form}}"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, no file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--tune", type=int, default=250)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.tune = 1, 30, 10
    began = time.perf_counter()
    results = []
    for seed in range(options.seeds):
        results.append(measure(options, seed))
        print(seed, {name: round(value, 4) for name, value in results[-1].items()}, flush=True)
    seconds = time.perf_counter() - began
    rows = [
        [label, *(mean_and_error([r[f"{name} {kind}"] for r in results], ".4f") for kind in KINDS)]
        for name, label in LABELS.items()
    ]
    head = ["model", "loss in float32", f"loss in int4, groups of {options.group}"]
    lost = mean_and_error([r["lost"] for r in results], ".4f")
    recovered = mean_and_error([100 * r["recovered"] for r in results], ".0f")
    model = GPT(VOCABULARY, CONTEXT, options.layers, 4, options.width)
    size = sum(p.numel() for p in model.parameters())
    body = (
        f"GPT of {size:,} weights on Python's documentation topics, batch {BATCH} x {CONTEXT} "
        f"bytes, AdamW, {options.steps} steps in float32, then {options.tune} steps of tuning; "
        "loss per byte on the held-out tenth, mean ± standard error of "
        f"{options.seeds} seeds. The head shares its weight with the embedding and is not packed. "
        f"{versions('torchao')}, {seconds / 60:.0f} minutes.\n\n{table(head, rows)}\n\n"
        f"int4 costs the plainly tuned model {lost}; qat-int4 recovers {recovered} % of it, "
        "computed within each seed."
    )
    if options.quick:
        print(body)
    else:
        write("qat", "How much of int4's loss does quantisation-aware training recover?", body)


KINDS = ("float32", "int4")
LABELS = {
    "base": "before tuning",
    "32-true": "tuned in 32-true",
    "qat-int4": "tuned in qat-int4",
}


if __name__ == "__main__":
    main()
