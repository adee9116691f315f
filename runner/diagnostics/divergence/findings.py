"""Decide from measured errors in which module two executions part, and say so in one sentence."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from runner.diagnostics.divergence.boundaries import LOSS, ROOT, Boundary
from runner.diagnostics.divergence.expected_error import Roundoffs, with_rounding
from runner.diagnostics.divergence.tensor_error import TensorError

LARGEST_EXPLAINED = 2.0
"""Error that rounding explains, as a multiple of the expected error, of a layer of torch.nn or a
converted one: operands and result are rounded once, as the expected error has it."""
LARGEST_EXPLAINED_OF_CODE = 5.0
"""The same for any other code, which may round several times on its way."""
_FEW_ELEMENTS = 32
_PASSED = "input of "
MIN_FLUSHED_SHARE = 0.01
"""Share of a tensor's elements that must become zero before that is named as the cause."""


@dataclass(frozen=True)
class AddedError:
    """The error of one tensor that a module computed from the reference's own tensors.

    Attributes:
        tensor: which one, in words.
        found: its error.
        expected: relative error that rounding explains.
        dtype: name of the dtype that the tensor has in the other execution.
        position: number of the tensor's boundary in the order of the forward.
        limit: error of many elements that rounding explains, as a multiple of `expected`.
        operation: name of the function in which the module's code goes wrong first; empty where
            that was not looked for or found.
    """

    tensor: str
    found: TensorError
    expected: float
    dtype: str
    position: int
    limit: float = LARGEST_EXPLAINED
    operation: str = ""

    @property
    def ratio(self) -> float:
        """Return the error as a multiple of what rounding explains."""
        relative = self.found.relative
        if not relative:
            return 0.0
        return relative / self.expected if self.expected else math.inf

    @property
    def largest_ratio(self) -> float:
        """Return the largest ratio that rounding explains."""
        # The expected error of few elements, as of a loss, is that of few draws: by chance small.
        return self.limit * (1 + _FEW_ELEMENTS / max(self.found.elements, 1))

    @property
    def ulps(self) -> float:
        """Return the relative error in units in the last place of the tensor's dtype."""
        if not self.dtype:
            return math.nan
        return self.found.relative / torch.finfo(getattr(torch, self.dtype)).eps

    @property
    def is_unexplained(self) -> bool:
        """Return whether rounding does not explain the error."""
        if self.found.other_shape or self.found.nonfinite:
            return True
        return self.ratio > self.largest_ratio


@dataclass(frozen=True)
class ModuleErrors:
    """What happens in one module.

    Attributes:
        module: dotted name.
        kind: its class.
        arrived: largest relative error of its inputs in a free execution, in its first call.
        gradient_arrived: the same of the gradients of its outputs.
        added: the worst of the tensors that its own code computes in the forward; None where it
            computes none.
        gradient_added: the worst of the gradients that it computes.
    """

    module: str
    kind: str
    arrived: float = 0.0
    gradient_arrived: float = 0.0
    added: AddedError | None = None
    gradient_added: AddedError | None = None


@dataclass(frozen=True)
class MeasuredErrors:
    """The errors of the passes of one batch.

    Attributes:
        arrived: of the tensors in a free execution, by boundary.
        gradient_arrived: of their gradients.
        added: of the tensors computed from the reference's.
        gradient_added: of the gradients computed from the reference's.
        parameters_added: of the parameters' gradients, by the parameter's name.
        expected: of the tensors in the perturbed reference.
        gradient_expected: of their gradients.
        parameters_expected: of the parameters' gradients.
    """

    arrived: Mapping[Boundary, TensorError] = field(default_factory=dict)
    gradient_arrived: Mapping[Boundary, TensorError] = field(default_factory=dict)
    added: Mapping[Boundary, TensorError] = field(default_factory=dict)
    gradient_added: Mapping[Boundary, TensorError] = field(default_factory=dict)
    parameters_added: Mapping[str, TensorError] = field(default_factory=dict)
    expected: Mapping[Boundary, TensorError] = field(default_factory=dict)
    gradient_expected: Mapping[Boundary, TensorError] = field(default_factory=dict)
    parameters_expected: Mapping[str, TensorError] = field(default_factory=dict)


@dataclass(frozen=True)
class Network:
    """Facts about the compared model.

    Attributes:
        kinds: class of each module, by name, in the order of the first calls.
        owners: by boundary, the module whose own code computed the tensor; in the forward's order.
        users: by boundary, the module whose own code takes it.
        dtypes: by boundary, name of the tensor's dtype in the other execution.
        parameter_dtypes: by parameter, the same.
        roundoffs: with which the wider of the two executions computes.
        widths: by module, the most elements of an example of the tensors that it takes and returns.
        rows: by module, the largest number of rows of their last dimension.
        layers: names of the layers of torch.nn and of converted ones, which round once.
    """

    kinds: Mapping[str, str]
    owners: Mapping[Boundary, str]
    users: Mapping[Boundary, str]
    dtypes: Mapping[Boundary, str]
    parameter_dtypes: Mapping[str, str]
    roundoffs: Roundoffs
    widths: Mapping[str, int]
    rows: Mapping[str, int]
    layers: frozenset[str]

    def limit(self, module: str) -> float:
        """Return the error that rounding explains in a module, as a multiple of the expected."""
        return LARGEST_EXPLAINED if module in self.layers else LARGEST_EXPLAINED_OF_CODE


def module_errors(network: Network, errors: MeasuredErrors) -> list[ModuleErrors]:
    """Return a row for every module that computes something, in the order of the forward."""
    rows = {name: ModuleErrors(name, kind) for name, kind in network.kinds.items()}
    for boundary, found in errors.arrived.items():
        row = rows.get(boundary.module) if boundary.call == 0 else None
        if row is not None and boundary.side == "in":
            rows[boundary.module] = replace(row, arrived=max(row.arrived, found.relative))
    for boundary, found in errors.gradient_arrived.items():
        row = rows.get(boundary.module) if boundary.call == 0 else None
        if row is not None and boundary.side == "out":
            worst = max(row.gradient_arrived, found.relative)
            rows[boundary.module] = replace(row, gradient_arrived=worst)
    positions = {boundary: number for number, boundary in enumerate(network.owners)}
    for owner, added in _forward_errors(network, errors, positions):
        rows[owner] = replace(rows[owner], added=_worse(rows[owner].added, added))
    for user, added in _backward_errors(network, errors, positions):
        rows[user] = replace(rows[user], gradient_added=_worse(rows[user].gradient_added, added))
    return [row for row in rows.values() if row.added or row.gradient_added]


def _worse(one: AddedError | None, other: AddedError) -> AddedError:
    if one is None:
        return other
    return max(
        one, other, key=lambda added: (added.found.nonfinite > 0, added.ratio / added.largest_ratio)
    )


def _forward_errors(
    network: Network, errors: MeasuredErrors, positions: Mapping[Boundary, int]
) -> Iterator[tuple[str, AddedError]]:
    """Yield each tensor that a module computes, with the module."""
    for boundary, found in errors.added.items():
        owner = network.owners[boundary]
        if owner not in network.kinds:
            continue
        expected = with_rounding(
            _relative(errors.expected.get(boundary)),
            network.roundoffs.tensors.get(boundary, 0.0),
            network.widths[owner],
        )
        name = "output" if boundary.module == owner else f"{_PASSED}{boundary.module}"
        dtype = network.dtypes.get(boundary, "")
        limit = network.limit(owner)
        yield owner, AddedError(name, found, expected, dtype, positions[boundary], limit)


def _backward_errors(
    network: Network, errors: MeasuredErrors, positions: Mapping[Boundary, int]
) -> Iterator[tuple[str, AddedError]]:
    """Yield each gradient that a module computes, with the module."""
    outputs: dict[str, int] = {}
    for boundary, user in network.users.items():
        outputs[network.owners[boundary]] = positions[boundary]
        found = errors.gradient_added.get(boundary)
        if found is None or user not in network.kinds:
            continue
        expected = with_rounding(
            _relative(errors.gradient_expected.get(boundary)),
            network.roundoffs.tensors.get(boundary, 0.0),
            network.widths[user],
        )
        name = f"gradient of the output of {boundary.module}"
        if boundary.module == user:
            name = "gradient of its input"
        dtype = network.dtypes.get(boundary, "")
        limit = network.limit(user)
        yield user, AddedError(name, found, expected, dtype, positions[boundary], limit)
    for parameter, found in errors.parameters_added.items():
        prefix, _, own_name = parameter.rpartition(".")
        module = prefix or ROOT
        if module not in network.kinds:
            continue
        expected = with_rounding(
            _relative(errors.parameters_expected.get(parameter)),
            max(network.roundoffs.code.get(module, 0.0), network.roundoffs.parameters),
            network.rows.get(module, 1),
        )
        name = f"gradient of its {own_name}"
        position = outputs.get(module, 0)
        # A sum over all rows, which kernels add up in several ways.
        limit = LARGEST_EXPLAINED_OF_CODE
        dtype = network.parameter_dtypes.get(parameter, "")
        yield module, AddedError(name, found, expected, dtype, position, limit)


def _relative(error: TensorError | None) -> float:
    return error.relative if error is not None else 0.0


@dataclass(frozen=True)
class Divergence:
    """The first error that rounding does not explain.

    Attributes:
        row: of the module that adds it.
        added: the error.
        is_backward: whether it is of a gradient.
    """

    row: ModuleErrors
    added: AddedError
    is_backward: bool

    @property
    def arrived(self) -> float:
        """Return the relative error of what comes into the module, in the same direction."""
        return self.row.gradient_arrived if self.is_backward else self.row.arrived


def first_divergence(rows: Sequence[ModuleErrors]) -> Divergence | None:
    """Return where the executions part first; None where rounding explains every error.

    The forward comes first, in its order, then the backward in its order, from the loss on.
    """
    forward = [
        Divergence(row, row.added, False)
        for row in rows
        if row.added is not None and row.added.is_unexplained
    ]
    if forward:
        return min(forward, key=lambda found: found.added.position)
    backward = [
        Divergence(row, row.gradient_added, True)
        for row in rows
        if row.gradient_added is not None and row.gradient_added.is_unexplained
    ]
    return max(backward, key=lambda found: found.added.position, default=None)


def describe_divergence(
    rows: Sequence[ModuleErrors],
    name: str,
    against: str,
    is_exact: bool = False,
    same_format: bool = False,
) -> str:
    """Return the sentence that a report begins with.

    Args:
        rows: of module_errors.
        name: label of the execution.
        against: label of the reference.
        is_exact: whether both computed the same bits when they ran freely.
        same_format: whether both compute in the same precision, so that each bit should agree.
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
    return (
        f"{name} parts from {against} in {where}: {describe_cause(first.added)}; "
        f"{what} {_arrival(first.arrived)}."
    )


def _arrival(relative: float) -> str:
    return f"differs by {format_relative(relative)}" if relative else "is the same"


def describe_cause(added: AddedError) -> str:
    """Return in words what is wrong with a tensor."""
    found = added.found
    tensor = f"its {added.tensor}"
    if added.tensor.startswith("gradient"):
        tensor = f"the {added.tensor}"
    if added.tensor.startswith(_PASSED):
        tensor = f"what it passes to `{added.tensor.removeprefix(_PASSED)}`"
    if found.other_shape:
        return f"{tensor} has another shape"
    if found.nonfinite:
        share = format_share(found.share(found.nonfinite))
        dtype = f" of {added.dtype}" if added.dtype else ""
        return f"{tensor} is not finite in {share} of the elements{dtype}{_place(added)}"
    times = f"{added.ratio:,.0f} times" if math.isfinite(added.ratio) else "more than"
    text = f"{tensor} is off by {format_relative(found.relative)}, {times} what rounding explains"
    if found.share(found.flushed) >= MIN_FLUSHED_SHARE:
        text += f" ({format_share(found.share(found.flushed))} of the elements become zero)"
    return text + _place(added)


def _place(added: AddedError) -> str:
    return f", first in its {added.operation}()" if added.operation else ""


def _agreement(rows: Sequence[ModuleErrors], name: str, against: str, same_format: bool) -> str:
    """Return the sentence of two executions that differ by no more than rounding."""
    forward = [(row.added, row.module) for row in rows if row.added]
    different = [pair for pair in forward if pair[0].found.error]
    if same_format:
        added, module = _first_different(rows, different)
        return (
            f"{name} and {against} compute in the same format and differ, first in {module}: "
            f"{describe_size(added)}, which rounding can explain."
        )
    largest, module = max(forward, key=lambda pair: pair[0].found.relative)
    return (
        f"{name} and {against} differ by rounding alone: no module adds more than rounding "
        f"explains; the most in the forward is {format_relative(largest.found.relative)}, in "
        f"`{module}`."
    )


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
