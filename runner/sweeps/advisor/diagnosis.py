"""Say from float32's numbers what a narrower precision lacks, and in which modules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runner.diagnostics.numerics import Numerics
from runner.precision.contract import Precision

MAX_SUSPECTS_PER_FORMAT = 16
"""Number of modules that each format of a precision adds to the suspects at most."""
_REASON_TEXTS = {
    "overflow": "overflow",
    "underflow": "become zero",
    "noise": "are rounding error",
    "swallowed": "are swallowed",
}


FLOAT32 = "32-true"
"""The precision whose numbers explain the others, whatever the baseline is."""


@dataclass(frozen=True)
class Diagnosis:
    """What float32's numbers say of the precisions that fail; empty if they are not known.

    Attributes:
        suspects: modules that each precision harms most, by dotted name, the worst first.
        losing: precisions that round away updates of their weights.
    """

    suspects: Mapping[str, Sequence[str]] = field(default_factory=dict)
    losing: Sequence[str] = ()


def swallows_updates(numbers: Numerics, precision: Precision) -> bool:
    """Return whether a precision rounds away updates that float32's weights keep.

    Args:
        numbers: measured in a run with float32.
        precision: narrower than float32.
    """
    stored = [name for name, kinds in precision.formats if "updates" in kinds]
    return any(numbers.sensitivity(name, ("updates",)) != "none" for name in stored)


def describe_shortage(numbers: Numerics, precision: Precision) -> str:
    """Return a sentence on the first format that lacks range or precision, empty if none does.

    Args:
        numbers: measured in a run with float32.
        precision: narrower than float32.
    """
    for fmt, kinds in precision.formats:
        shortage = numbers.sensitivity(fmt, kinds)
        if shortage == "none":
            continue
        text = f"short of {fmt}'s {shortage}"
        # One reason: the sentence is a cell of the report's table.
        for module, kind, reason, share in numbers.reasons(fmt, kinds)[:1]:
            text += f": in {module} {share:.0%} of {kind} {_REASON_TEXTS[reason]}"
        return text
    return ""


def suspect_modules(numbers: Numerics, precision: Precision) -> list[str]:
    """Return the modules that a precision harms most, the worst first.

    Args:
        numbers: measured in a run with float32.
        precision: narrower than float32.
    """
    # A dict is a set that keeps the order: several formats may name one module.
    modules: dict[str, None] = {}
    for fmt, kinds in precision.formats:
        for module, *_ in numbers.worst(fmt, MAX_SUSPECTS_PER_FORMAT, kinds):
            # A name in parentheses is the model as a whole.
            if not module.startswith("("):
                modules[module] = None
    return list(modules)
