"""What does each precision hold, round and cost on this machine?

weights: bytes of a 1024 x 1024 layer against float32's, read from the tensors. error: of that
layer's product on normal weights and inputs, relative to float64; library: of the library's own
way to the same product. step: wall time of a training step of a GPT (4 layers, 128 wide, 8 x 64
tokens) against 32-true, contenders in turn; emulated FP8 is not timed. optimizer: bytes of state
against torch's AdamW, for a model without embeddings.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from bench.common import RESULTS, interleave, median, table, versions, write, write_rows
from models.gpt import GPT
from runner.precision.registry import load_precision, precision_names
from runner.training import lowbit_optimizers
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.step import train_step
from runner.training.tasks.language import Language
from runner.utils.errors import Unavailable
from runner.utils.tensors import stored_bytes, tensor_bytes

CPU = torch.device("cpu")
WIDTH = 1024
EMULATED = ("tf32", "float8", "transformer-engine")
OPTIMIZERS = ("Adam8bit", "AdamW8bit", "Lion8bit", "AdamW4bit", "AdamWFp8")


def here() -> list[str]:
    """Precisions that run here, or are emulated."""
    found = []
    for name in precision_names():
        try:
            made(name).require(CPU)
        except Unavailable:
            continue
        found.append(name)
    return found


def made(name: str):
    return load_precision(name, **({"emulate": True} if name.startswith(EMULATED) else {}))


def layer(name: str) -> tuple[float, float]:
    """Bytes against float32's and relative error of the product."""
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.normal_(plain.weight, std=0.02)
    exact, size = plain.weight.detach().double().clone(), stored_bytes(plain)
    precision = made(name)
    model, _ = precision.convert(plain)
    inputs = torch.randn(256, WIDTH)
    with torch.no_grad(), precision.session(model, CPU), precision.forward(CPU):
        found = model(precision.cast(inputs)).double()
    wanted = inputs.double() @ exact.T
    error = (found - wanted).norm() / wanted.norm()
    return stored_bytes(model) / size, error.item()


def library(name: str) -> float | None:
    """Relative error of the library's own weight, unpacked by itself."""
    if not name.startswith("bnb-") or name.endswith("training"):
        return None
    from runner.precision.layers.bnb_library import bnb

    torch.manual_seed(0)
    weight = nn.init.normal_(torch.empty(WIDTH, WIDTH), std=0.02)
    if name == "bnb-int8":
        codes, rows, _ = bnb.functional.int8_vectorwise_quant(weight.half())
        back = codes * (rows[:, None] / 127)
    else:
        kind, _, nested = name.removeprefix("bnb-").partition("-")
        packed = bnb.functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=bool(nested)
        )
        back = bnb.functional.dequantize_4bit(*packed)
    return ((back - weight).norm() / weight.norm()).item()


def steps(name: str) -> Callable[[], None]:
    """Two training steps of a small GPT."""
    precision = made(name)
    torch.manual_seed(0)
    model, _ = precision.convert(GPT(256, 64, layers=4, width=128, heads=4))
    params = [p for p in model.parameters() if p.requires_grad]
    driven = [ScheduledOptimizer(torch.optim.AdamW(params, lr=1e-3, eps=1e-4))]
    state = TrainState(model, precision, Language(), precision.scale(CPU), driven, CPU)
    tokens = torch.randint(256, (8, 65))

    def run() -> None:
        with precision.session(model, CPU):
            for _ in range(2):
                train_step(state, [(tokens[:, :-1], tokens[:, 1:])])

    return run


def state_bytes(kind: Callable[..., torch.optim.Optimizer]) -> int:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    made = kind(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    made.step()
    held = [v for values in made.state.values() for v in values.values()]
    return tensor_bytes(*(v for v in held if isinstance(v, torch.Tensor)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    chosen = here()
    timed = {name: steps(name) for name in chosen if not name.startswith(EMULATED)}
    times = interleave(timed, rounds)
    base = [wall for _, wall in times["32-true"]]
    figures, rows = {}, []
    for name in chosen:
        weights, error = layer(name)
        ratios = [w / b for (_, w), b in zip(times.get(name, []), base, strict=False)]
        own = library(name)
        step = median(ratios) if ratios else None
        figures[name] = {"weights": weights, "error": error, "library": own, "step": step}
        rows.append(
            [
                f"`{name}`",
                f"{weights:.3f}",
                f"{error:.2g}",
                "" if own is None else f"{own:.2g}",
                "" if step is None else f"{step:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            ]
        )
    whole = state_bytes(torch.optim.AdamW)
    ratio = {name: state_bytes(getattr(lowbit_optimizers, name)) / whole for name in OPTIMIZERS}
    head = ["precision", "weights", "error", "library", "step (least to greatest)"]
    states = [[f"`{name}`", f"{value:.3f}"] for name, value in ratio.items()]
    setting = f"{versions('torch', 'bitsandbytes', 'torchao')}, one thread, {rounds} rounds"
    body = "\n\n".join([table(head, rows), table(["optimizer", "state"], states), setting])
    write("low_bit", (__doc__ or "").strip().splitlines()[0], body)
    found = {"precisions": figures, "optimizers": ratio}
    write_rows(RESULTS / "low_bit.json", found)


if __name__ == "__main__":
    main()
