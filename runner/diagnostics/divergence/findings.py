"""Decide from measured errors in which module two executions part."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from runner.diagnostics.divergence.added_error import (
    LARGEST_EXPLAINED_OF_CODE,
    LARGEST_EXPLAINED_OF_INTEGERS,
    PASSED,
    WRITTEN_INPUT,
    AddedError,
)
from runner.diagnostics.divergence.boundaries import CHOICES, ROOT, WRITTEN, Boundary
from runner.diagnostics.divergence.expected_error import with_rounding
from runner.diagnostics.divergence.network import Network
from runner.diagnostics.divergence.tensor_error import TensorError
from runner.utils.tensors import unit_roundoff


@dataclass(frozen=True)
class ModuleErrors:
    """What happens in one module.

    Attributes:
        module: dotted name.
        kind: its class.
        arrived: largest relative error of its inputs in a free execution, in its first call.
        gradient_arrived: the same of the gradients of its outputs.
        added: of the tensors that its own code computes in the forward the first that rounding
            does not explain, else the one with the largest error; None where it computes none.
        gradient_added: of the gradients that it computes the same, in the order of the backward.
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
        buffers_added: of the buffers after the step, by the buffer's name.
        buffers_expected: of these in the perturbed reference.
    """

    arrived: Mapping[Boundary, TensorError] = field(default_factory=dict)
    gradient_arrived: Mapping[Boundary, TensorError] = field(default_factory=dict)
    added: Mapping[Boundary, TensorError] = field(default_factory=dict)
    gradient_added: Mapping[Boundary, TensorError] = field(default_factory=dict)
    parameters_added: Mapping[str, TensorError] = field(default_factory=dict)
    expected: Mapping[Boundary, TensorError] = field(default_factory=dict)
    gradient_expected: Mapping[Boundary, TensorError] = field(default_factory=dict)
    parameters_expected: Mapping[str, TensorError] = field(default_factory=dict)
    buffers_added: Mapping[str, TensorError] = field(default_factory=dict)
    buffers_expected: Mapping[str, TensorError] = field(default_factory=dict)


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
    forward = (
        *_forward_errors(network, errors, positions),
        *_buffer_errors(network, errors, positions),
    )
    for owner, added in forward:
        rows[owner] = replace(rows[owner], added=_worse(rows[owner].added, added, -1))
    for user, added in _backward_errors(network, errors, positions):
        worse = _worse(rows[user].gradient_added, added, 1)
        rows[user] = replace(rows[user], gradient_added=worse)
    return [row for row in rows.values() if row.added or row.gradient_added]


def _worse(one: AddedError | None, other: AddedError, direction: int) -> AddedError:
    """Return the error that stands for a module: the first that rounding does not explain, for what
    comes after it may follow from it; else the largest.

    Args:
        one: None for no error yet.
        other: the next one.
        direction: -1 where lower positions come first, 1 where higher ones do.
    """
    if one is None:
        return other
    return max(one, other, key=lambda added: _severity(added, direction))


def _severity(added: AddedError, direction: int) -> tuple[bool, int, float]:
    is_unexplained = added.is_unexplained
    position = direction * added.position if is_unexplained else 0
    return is_unexplained, position, added.ratio / added.largest_ratio


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
        limit = network.limit(owner)
        if found.is_discrete:
            # No draw of few shows that rounding never changes one element.
            expected = _relative(errors.expected.get(boundary)) + 1 / max(found.elements, 1)
            limit = LARGEST_EXPLAINED_OF_INTEGERS
        name = _tensor_name(boundary, owner)
        dtype = network.dtypes.get(boundary, "")
        yield owner, AddedError(name, found, expected, dtype, positions[boundary], limit)


def _tensor_name(boundary: Boundary, owner: str) -> str:
    """Return in words which tensor crosses a boundary, seen from the module that computed it."""
    if boundary.side in CHOICES:
        return f"choice of {boundary.side}()"
    if boundary.side == WRITTEN:
        return WRITTEN_INPUT
    return "output" if boundary.module == owner else f"{PASSED}{boundary.module}"


def _buffer_errors(
    network: Network, errors: MeasuredErrors, positions: Mapping[Boundary, int]
) -> Iterator[tuple[str, AddedError]]:
    """Yield each buffer after the step, as running statistics, with its module."""
    for buffer, found in errors.buffers_added.items():
        prefix, _, own_name = buffer.rpartition(".")
        module = prefix or ROOT
        if module not in network.kinds:
            continue
        dtype = network.state_dtypes.get(buffer, "")
        roundoff = unit_roundoff(getattr(torch, dtype)) if dtype else 0.0
        expected = with_rounding(
            _relative(errors.buffers_expected.get(buffer)),
            max(network.roundoffs.code.get(module, 0.0), roundoff),
            network.widths.get(module, 1),
        )
        position = positions.get(Boundary(module, 0, "out", 0), 0)
        limit = network.limit(module)
        if found.is_discrete:
            # A counter, which rounding does not change.
            expected = _relative(errors.buffers_expected.get(buffer))
        yield module, AddedError(own_name, found, expected, dtype, position, limit)


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
            network.roundoffs.tensor_gradients.get(boundary, 0.0),
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
        dtype = network.state_dtypes.get(parameter, "")
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
