"""What float32's numbers say of a narrower precision: whether range or precision is short, where."""

from collections.abc import Iterator

from runner.numerics import Numerics
from runner.precision.base import Precision
from runner.precision.support import load

MOST = 16
_FLOAT8 = "float8_e4m3fn"
_WORDS = {"overflow": "overflow", "underflow": "become zero", "noise": "are rounding error",
          "swallowed": "are swallowed"}  # fmt: skip


def formats(name: str) -> Iterator[str]:
    """Those that a precision computes in, the narrowest first."""
    policy: Precision = load(name)
    if name.startswith(("float8", "transformer-engine")):
        yield _FLOAT8
    yield str(policy.compute).removeprefix("torch.")


def about(numbers: Numerics, name: str) -> str:
    """A sentence on the first format that is short of something; empty where none is."""
    for fmt in formats(name):
        lacks = numbers.sensitivity(fmt)
        if lacks == "none":
            continue
        worst = numbers.worst(fmt, 1)
        where = "".join(f": in {m} {s:.0%} of {k} {_WORDS[w]}" for m, k, w, s in worst)
        return f"short of {fmt}'s {lacks}{where}"
    return ""


def suspects(numbers: Numerics, name: str) -> list[str]:
    """Modules that it harms most, each once; not the model as a whole."""
    found = (module for fmt in formats(name) for module, *_ in numbers.worst(fmt, MOST))
    return [module for module in dict.fromkeys(found) if not module.startswith("(")]
