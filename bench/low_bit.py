"""What does each precision hold, round and cost on this machine?

    python -m bench.low_bit [--rounds 9]              writes bench/results/low_bit.md and .json
    python -m bench.low_bit --emulated [--rounds 9]   writes bench/results/emulated_fp8.md

weights: bytes of a 1024 x 1024 layer against float32's, read from the tensors. error: of that
layer's product on normal weights and inputs, relative to float64; library: of the library's own
way to the same product. step: wall time of a training step of a GPT (4 layers, 128 wide, 8 x 64
tokens) against 32-true, contenders in turn, one thread; optimizer: bytes of state against torch's
AdamW, for a model without embeddings. Steps of emulated FP8 and FP4 are timed apart, in CPU time.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.common import (
    RESULTS,
    interleave,
    parse_options,
    spread,
    table,
    versions,
    write,
    write_rows,
)
from bench.training import CPU, VOCABULARY, random_tokens, training_state
from models.gpt import GPT
from runner.core.base.errors import Unavailable
from runner.core.base.tensor_facts import stored_bytes, tensor_bytes
from runner.core.loop.step import train_step
from runner.core.policy.precision import Precision
from runner.precision.registry import load_precision, precision_names
from runner.training import lowbit_optimizers
from runner.training.tasks.language import Language

WIDTH = 1024
STEPS = 2  # of a round
EMULATED = ("tf32", "float8", "torchao-", "transformer-engine")
EMULATED_NARROW = ("transformer-engine", "float8", "torchao-")
OPTIMIZERS = ("Adam8bit", "AdamW8bit", "Lion8bit", "AdamW4bit", "AdamWFp8")


def load(name: str) -> Precision:
    """Return a precision, emulated where it can be."""
    options: dict[str, Any] = {"emulate": True} if name.startswith(EMULATED) else {}
    return load_precision(name, **options)


def runnable_precisions() -> list[str]:
    """Return the precisions that run on this machine, or are emulated."""
    names = []
    for name in precision_names():
        try:
            load(name).require(CPU)
        except Unavailable:
            continue
        names.append(name)
    return names


def layer_size_and_error(name: str) -> tuple[float, float]:
    """Return a layer's bytes against float32's, and the relative error of its product."""
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.normal_(plain.weight, std=0.02)
    exact, size = plain.weight.detach().double().clone(), stored_bytes(plain)
    precision = load(name)
    model, _ = precision.convert(plain)
    inputs = torch.randn(256, WIDTH)
    with torch.no_grad(), precision.session(model, CPU), precision.forward(CPU):
        product = model(precision.cast(inputs)).double()
    wanted = inputs.double() @ exact.T
    error = (product - wanted).norm() / wanted.norm()
    return stored_bytes(model) / size, error.item()


def library_error(name: str) -> float | None:
    """Return the relative error of bitsandbytes' own weight, unpacked by itself."""
    if not name.startswith("bnb-") or name.endswith("training"):
        return None
    from runner.precision.layers.bnb_linear import bnb

    torch.manual_seed(0)
    weight = nn.init.normal_(torch.empty(WIDTH, WIDTH), std=0.02)
    if name == "bnb-int8":
        codes, rows, _ = bnb.functional.int8_vectorwise_quant(weight.half())
        unpacked = codes * (rows[:, None] / 127)
    else:
        kind, _, nested = name.removeprefix("bnb-").partition("-")
        packed = bnb.functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=bool(nested)
        )
        unpacked = bnb.functional.dequantize_4bit(*packed)
    return ((unpacked - weight).norm() / weight.norm()).item()


def training_steps(name: str) -> Callable[[], None]:
    """Return a function that trains a small GPT for STEPS steps."""
    precision = load(name)
    torch.manual_seed(0)
    model, _ = precision.convert(GPT(VOCABULARY, 64, layers=4, width=128, heads=4))
    state = training_state(model, precision, Language(), lr=1e-3, eps=1e-4)
    batch = random_tokens(8, 64)

    def run() -> None:
        with precision.session(model, CPU):
            for _ in range(STEPS):
                train_step(state, [batch])

    return run


def state_bytes(kind: Callable[..., torch.optim.Optimizer]) -> int:
    """Return the bytes of an optimizer's state after a step."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    optimizer = kind(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    held = [v for values in optimizer.state.values() for v in values.values()]
    return tensor_bytes(*(v for v in held if isinstance(v, torch.Tensor)))


def measure_precisions(rounds: int) -> None:
    """Measure every precision's weights, error and step, and the optimizers' states."""
    names = runnable_precisions()
    timed = {name: training_steps(name) for name in names if not name.startswith(EMULATED)}
    times = interleave(timed, rounds)
    base = [wall for _, wall in times["32-true"]]
    figures, rows = {}, []
    for name in names:
        weights, error = layer_size_and_error(name)
        ratios = [wall / b for (_, wall), b in zip(times.get(name, []), base, strict=False)]
        own = library_error(name)
        step = median(ratios) if ratios else None
        figures[name] = {"weights": weights, "error": error, "library": own, "step": step}
        cells = [f"`{name}`", f"{weights:.3f}", f"{error:.2g}"]
        cells.append("" if own is None else f"{own:.2g}")
        rows.append([*cells, spread(ratios, ".2f") if ratios else ""])
    whole = state_bytes(torch.optim.AdamW)
    ratio = {name: state_bytes(getattr(lowbit_optimizers, name)) / whole for name in OPTIMIZERS}
    head = ["precision", "weights", "error", "library", "step (least to greatest)"]
    states = [[f"`{name}`", f"{value:.3f}"] for name, value in ratio.items()]
    setting = f"{versions('torch', 'bitsandbytes', 'torchao')}, one thread, {rounds} rounds"
    body = "\n\n".join([table(head, rows), table(["optimizer", "state"], states), setting])
    write("low_bit", "What does each precision hold, round and cost on this machine?", body)
    write_rows(RESULTS / "low_bit.json", {"precisions": figures, "optimizers": ratio})


def measure_emulated(rounds: int) -> None:
    """Measure the CPU time of a step of each emulated precision.

    It is CPU time, because on a machine that others use, wall time is theirs as well.
    """
    emulated = [name for name in runnable_precisions() if name.startswith(EMULATED_NARROW)]
    steps = {name: training_steps(name) for name in ["32-true", "bf16-true", *emulated]}
    times = interleave(steps, rounds)
    base = [cpu for cpu, _ in times["32-true"]]
    rows = []
    for name, spent in times.items():
        ratios = [cpu / b for (cpu, _), b in zip(spent, base, strict=True)]
        milliseconds = median([cpu for cpu, _ in spent]) / STEPS * 1e3
        rows.append([f"`{name}`", f"{milliseconds:.0f}", spread(ratios, ".2f")])
    body = table(["precision", "ms", "step (least to greatest)"], rows)
    setting = f"{versions('torch', 'torchao')}, one thread, {rounds} rounds"
    question = "What does a training step in emulated FP8 and FP4 cost against one in float32?"
    write("emulated_fp8", question, f"{body}\n\n{setting}")


def main() -> None:
    """Measure the precisions, or the emulated ones."""
    args = parse_options(__doc__, rounds=9, emulated=False)
    torch.set_num_threads(1)
    if args.emulated:
        measure_emulated(args.rounds)
    else:
        measure_precisions(args.rounds)


if __name__ == "__main__":
    main()
