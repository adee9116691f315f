"""Say from float32's numbers what a narrower precision lacks, and in which modules."""

from collections.abc import Iterator

import torch

from runner.diagnostics.numerics import Numerics
from runner.precision.emulation.formats import FORMATS
from runner.precision.precision import Precision
from runner.precision.registry import load_precision

MAX_SUSPECTS = 16
_FLOAT8 = "float8_e4m3fn"
_REASON_TEXTS = {
    "overflow": "overflow",
    "underflow": "become zero",
    "noise": "are rounding error",
    "swallowed": "are swallowed",
}


def formats_and_kinds(name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (format, kinds of tensors) for a precision, the narrowest format first.

    "updates" is among the kinds if weights are stored in the format, "gradients" if no loss scale
    keeps them from vanishing.

    Args:
        name: of the precision.
    """
    policy: Precision = load_precision(name)
    compute = str(policy.compute).removeprefix("torch.")
    storage = str(policy.storage).removeprefix("torch.")
    has_loss_scale = policy.scale(torch.device("cpu")).value is not None
    if name.startswith(("float8", "transformer-engine")):
        yield _FLOAT8, ("activations", "weights", "gradients")
    if compute in FORMATS:
        kinds = ["activations", "weights"]
        if not has_loss_scale:
            kinds.append("gradients")
        if storage == compute:
            kinds.append("updates")
        yield compute, tuple(kinds)


def describe_shortage(numbers: Numerics, name: str) -> str:
    """Return a sentence on the first format that lacks range or precision, empty if none does.

    Args:
        numbers: measured in a run with float32.
        name: of the precision.
    """
    for fmt, kinds in formats_and_kinds(name):
        shortage = numbers.sensitivity(fmt, kinds)
        if shortage == "none":
            continue
        text = f"short of {fmt}'s {shortage}"
        for module, kind, reason, share in numbers.reasons(fmt, kinds)[:1]:
            text += f": in {module} {share:.0%} of {kind} {_REASON_TEXTS[reason]}"
        return text
    return ""


def suspect_modules(numbers: Numerics, name: str) -> list[str]:
    """Return the modules that a precision harms most, the worst first.

    Args:
        numbers: measured in a run with float32.
        name: of the precision.
    """
    modules: dict[str, None] = {}
    for fmt, kinds in formats_and_kinds(name):
        for module, *_ in numbers.worst(fmt, MAX_SUSPECTS, kinds):
            # A name in parentheses is the model as a whole.
            if not module.startswith("("):
                modules[module] = None
    return list(modules)
