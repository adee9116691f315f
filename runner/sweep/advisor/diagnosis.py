"""What float32's numbers say of a narrower precision: what it is short of, and where."""

from collections.abc import Iterator

import torch

from runner.diagnostics.numerics import Numerics
from runner.precision.emulation.formats import FORMATS
from runner.precision.precision import Precision
from runner.precision.registry import load_precision

MOST = 16
_FLOAT8 = "float8_e4m3fn"
_WORDS = {
    "overflow": "overflow",
    "underflow": "become zero",
    "noise": "are rounding error",
    "swallowed": "are swallowed",
}


def formats_and_kinds(name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The formats that a precision computes in, the narrowest first, and the kinds of numbers that
    it holds in them: updates where weights are stored so, gradients where no loss scale that
    float32 does not have keeps them from vanishing."""
    policy: Precision = load_precision(name)
    compute, storage = (str(d).removeprefix("torch.") for d in (policy.compute, policy.storage))
    scaled = policy.scale(torch.device("cpu")).value is not None
    if name.startswith(("float8", "transformer-engine")):
        yield _FLOAT8, ("activations", "weights", "gradients")
    if compute in FORMATS:
        kinds = ("activations", "weights", *([] if scaled else ["gradients"]))
        yield compute, (*kinds, "updates") if storage == compute else kinds


def describe_shortage(numbers: Numerics, name: str) -> str:
    """A sentence on the first format that is short of something; empty where none is."""
    for fmt, kinds in formats_and_kinds(name):
        lacks = numbers.sensitivity(fmt, kinds)
        if lacks == "none":
            continue
        worst = numbers.reasons(fmt, kinds)[:1]
        where = "".join(f": in {m} {s:.0%} of {k} {_WORDS[w]}" for m, k, w, s in worst)
        return f"short of {fmt}'s {lacks}{where}"
    return ""


def suspect_modules(numbers: Numerics, name: str) -> list[str]:
    """Modules that it harms most, each once; not the model as a whole."""
    found = (
        m for fmt, kinds in formats_and_kinds(name) for m, *_ in numbers.worst(fmt, MOST, kinds)
    )
    return [module for module in dict.fromkeys(found) if not module.startswith("(")]
