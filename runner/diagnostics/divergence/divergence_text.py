"""Say in words where two executions part."""

import math
from collections.abc import Mapping, Sequence

from runner.diagnostics.divergence.added_error import PASSED, WRITTEN_INPUT, AddedError
from runner.diagnostics.divergence.boundaries import LOSS
from runner.diagnostics.divergence.findings import ModuleErrors, first_divergence

MIN_SUBNORMAL_SHARE = 0.01
"""Share of a tensor's elements below the normal numbers of its dtype, from which on that is named
as the cause."""


def describe_divergence(
    rows: Sequence[ModuleErrors],
    name: str,
    against: str,
    is_exact: bool = False,
    same_format: bool = False,
    uneven_calls: Mapping[str, tuple[int, int]] | None = None,
) -> str:
    """Return the sentence that a report begins with.

    Args:
        rows: of module_errors.
        name: label of the execution.
        against: label of the reference.
        is_exact: whether both computed the same bits when they ran freely.
        same_format: whether both compute in the same precision, so that each bit should agree.
        uneven_calls: by module, how often each of the two calls it, where that is not the same.
    """
    first = first_divergence(rows)
    if is_exact:
        return f"{name} and {against} agree in every bit."
    if first is None:
        return _agreement(rows, name, against, same_format)
    where = "the loss" if first.row.module == LOSS else f"`{first.row.module}`"
    what = "what comes in"
    if first.is_backward:
        where = f"the backward of {where}"
        what = "the gradient that comes in"
    context = f"{what} {_arrival(first.arrived)}"
    calls = (uneven_calls or {}).get(first.row.module, (1, 1))
    for label, count in zip((name, against), calls, strict=True):
        if count == 0:
            context = f"{label} never calls the module"
    return f"{name} parts from {against} in {where}: {describe_cause(first.added)}; {context}."


def _arrival(relative: float) -> str:
    return f"differs by {format_relative(relative)}" if relative else "is the same"


def describe_cause(added: AddedError) -> str:
    """Return in words what is wrong with a tensor."""
    found = added.found
    tensor = f"its {added.tensor}"
    if added.tensor.startswith("gradient"):
        tensor = f"the {added.tensor}"
    if added.tensor == WRITTEN_INPUT:
        tensor = "what it writes into its input"
    if added.tensor.startswith(PASSED):
        tensor = f"what it passes to `{added.tensor.removeprefix(PASSED)}`"
    if found.other_shape:
        return f"{tensor} has another shape"
    if found.nonfinite:
        share = format_share(found.share(found.nonfinite))
        dtype = f" of {added.dtype}" if added.dtype else ""
        return f"{tensor} is not finite in {share} of the elements{dtype}{_place(added)}"
    text = f"{tensor} is off by {format_relative(found.relative)}"
    if found.is_discrete:
        text = f"{tensor} differs in {format_share(found.relative)} of the elements"
    if math.isfinite(added.ratio):
        text += f", {added.ratio:,.0f} times what rounding explains"
    else:
        text += ", which rounding does not explain"
    if found.share(found.subnormal) >= MIN_SUBNORMAL_SHARE:
        text += (
            f" ({format_share(found.share(found.subnormal))} of the elements are below the normal "
            f"numbers of {added.dtype}, {format_share(found.share(found.flushed))} become zero)"
        )
    return text + _place(added)


def _place(added: AddedError) -> str:
    return f", first in its {added.operation}()" if added.operation else ""


def _agreement(rows: Sequence[ModuleErrors], name: str, against: str, same_format: bool) -> str:
    """Return the sentence of two executions that differ by no more than rounding."""
    forward = [
        (row.added, row.module) for row in rows if row.added and not row.added.found.other_shape
    ]
    different = [pair for pair in forward if pair[0].found.error]
    if same_format:
        added, module = _first_different(rows, different)
        return (
            f"{name} and {against} compute in the same format and differ, first in {module}: "
            f"{describe_size(added)}, which rounding can explain."
        )
    text = (
        f"{name} and {against} differ by rounding alone: no module adds more than rounding explains"
    )
    # The share of changed choices would read like a large error.
    numbers = [pair for pair in forward if not pair[0].found.is_discrete]
    if numbers:
        largest, module = max(numbers, key=lambda pair: pair[0].found.relative)
        text += (
            f"; the most in the forward is {format_relative(largest.found.relative)}, in `{module}`"
        )
    return f"{text}."


def _first_different(
    rows: Sequence[ModuleErrors], different: Sequence[tuple[AddedError, str]]
) -> tuple[AddedError, str]:
    """Return the first error that is not zero, and where: in the forward, else in the backward."""
    if different:
        added, module = min(different, key=lambda pair: pair[0].position)
        return added, f"`{module}`"
    backward = [(row.gradient_added, row.module) for row in rows if row.gradient_added]
    added, module = max(backward, key=lambda pair: pair[0].ratio)
    return added, f"the backward of `{module}`"


def describe_size(added: AddedError) -> str:
    """Return how large an error is, in words."""
    found = added.found
    share = format_share(found.share(found.different))
    return f"{format_relative(found.relative)} in norm, {share} of the elements"


def format_relative(value: float) -> str:
    """Return a relative error in percent, or as a power of ten below 0.01 %."""
    if math.isinf(value):
        return "more than its size"
    if value == 0:
        return "0"
    return format_share(value) if value >= 1e-4 else f"{value:.1e}"


def format_share(value: float) -> str:
    """Return a share in percent, with two digits below 99.5 %."""
    # Two digits would make 1e+02 of a whole.
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:,.0f} %"
