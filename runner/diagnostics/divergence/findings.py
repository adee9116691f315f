"""Decide from measured errors in which module two executions part."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from runner.core import module_tape, tensor_facts
from runner.diagnostics.divergence.boundaries import CHOICES, LOSS, WRITTEN, Boundary
from runner.diagnostics.divergence.passes import Arrival, PassErrors
from runner.diagnostics.divergence.reference import Reference
from runner.diagnostics.divergence.roundoffs import Execution, Roundoffs, with_rounding
from runner.diagnostics.divergence.tensor_error import TensorError
from runner.precision.conversion import is_converted

LARGEST_EXPLAINED = 2.0
"""Error that rounding explains, as a multiple of the expected error, of a layer of torch.nn or a
converted one: operands and result are rounded once, as the expected error has it."""
LARGEST_EXPLAINED_OF_CODE = 5.0
"""The same for any other code, which may round several times on its way."""
LARGEST_EXPLAINED_OF_INTEGERS = 4.0
"""The same of integers and truth values, for the number of elements that differ."""
_FEW_ELEMENTS = 32
KNOWN_SUM = "on CPUs torch sums this gradient in bfloat16"
"""Of a parameter of an nn.LayerNorm that takes bfloat16, and of an nn.Embedding that stores it."""
WRITTEN_INPUT = "input after the call"
PASSED = "input of "
"""How the name of a tensor begins that a module passes to another one."""


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
        is_state: whether the tensor is a buffer or the gradient of a parameter, and crosses no
            module's boundary.
        operation: name of the function in which the module's code goes wrong first; empty where
            that was not looked for or found.
        is_known_sum: whether KNOWN_SUM holds of it, so that its error is none of the model's code.
    """

    tensor: str
    found: TensorError
    expected: float
    dtype: str
    position: int
    limit: float = LARGEST_EXPLAINED
    is_state: bool = False
    operation: str = ""
    is_known_sum: bool = False

    @property
    def is_compared(self) -> bool:
        """Return whether the tensor shows anything of the code that computes it: not where each
        element is 0 or not finite in the reference, or where rounding gives it another shape."""
        return self.is_unexplained or (self.found.norm > 0 and not self.found.other_shape)

    @property
    def ratio(self) -> float:
        """Return the error as a multiple of what rounding explains."""
        relative = self.found.relative
        if not relative or math.isinf(self.expected):
            return 0.0
        return relative / self.expected if self.expected else math.inf

    @property
    def largest_ratio(self) -> float:
        """Return the largest ratio that rounding explains."""
        if self.found.is_discrete:
            return self.limit
        # The expected error of few elements, as of a loss, is that of few draws: by chance small.
        return self.limit * (1 + _FEW_ELEMENTS / max(self.found.elements, 1))

    @property
    def ulps(self) -> float:
        """Return the relative error in units in the last place of the tensor's dtype; NaN for
        integers."""
        if not self.dtype or self.found.is_discrete:
            return math.nan
        return self.found.relative / torch.finfo(getattr(torch, self.dtype)).eps

    @property
    def is_unexplained(self) -> bool:
        """Return whether rounding does not explain the error."""
        if self.found.other_shape:
            # Rounding explains it where the perturbed reference has another shape, too.
            return math.isfinite(self.expected)
        if self.found.nonfinite:
            return True
        return self.ratio > self.largest_ratio


@dataclass(frozen=True)
class Network:
    """Facts about the compared model.

    Attributes:
        kinds: class of each module, by name, in the order of the first calls.
        owners: by boundary, the module whose own code computed the tensor; in the forward's order.
        users: by boundary, the module whose own code takes it.
        dtypes: by boundary, name of the tensor's dtype in the other execution.
        state_dtypes: by parameter or buffer, the same.
        roundoffs: with which the wider of the two executions computes.
        widths: by module, the most elements of an example of the tensors that it takes and
            returns; 1 where it takes none.
        rows: by module, the largest number of rows of their last dimension.
        layers: names of the layers of torch.nn and of converted ones, which round once.
        is_on_cpu: whether the other execution computes on a CPU.
    """

    kinds: Mapping[str, str]
    owners: Mapping[Boundary, str]
    users: Mapping[Boundary, str]
    dtypes: Mapping[Boundary, str]
    state_dtypes: Mapping[str, str]
    roundoffs: Roundoffs
    widths: Mapping[str, int]
    rows: Mapping[str, int]
    layers: set[str]
    is_on_cpu: bool

    @cached_property
    def positions(self) -> dict[Boundary, int]:
        """Return by boundary its number in the order of the forward."""
        return {boundary: number for number, boundary in enumerate(self.owners)}

    def limit(self, module: str) -> float:
        """Return the error that rounding explains in a module, as a multiple of the expected."""
        return LARGEST_EXPLAINED if module in self.layers else LARGEST_EXPLAINED_OF_CODE


def build_network(
    execution: Execution,
    reference: Reference,
    arrival: Arrival,
    added: PassErrors,
    roundoffs: Roundoffs,
) -> Network:
    """Return the facts about the compared model that its errors are judged by."""
    model = execution.state.plain_model
    modules = {name or module_tape.ROOT: module for name, module in model.named_modules()}
    # In the order of the first calls; the loss last.
    called = dict.fromkeys(name for name, _ in reference.generators)
    kinds = {name: type(modules[name]).__name__ if name in modules else "" for name in called}
    layers = set()
    for name, module in modules.items():
        is_plain = type(module).__module__.startswith("torch.nn.")
        if is_converted(module) or (is_plain and next(module.children(), None) is None):
            layers.add(name)
    widths: defaultdict[str, int] = defaultdict(lambda: 1)
    rows: defaultdict[str, int] = defaultdict(lambda: 1)
    for boundary, value in reference.values.items():
        width = value.numel() // max(value.shape[0], 1) if value.ndim > 1 else 1
        height = value.numel() // max(value.shape[-1], 1) if value.ndim else 1
        for name in (reference.owners[boundary], reference.users[boundary]):
            widths[name] = max(widths[name], width)
            rows[name] = max(rows[name], height)
    # What only this execution writes into is no boundary of the reference.
    written = {b: b.module for b in added.forward if b not in reference.owners}
    state = (*model.named_parameters(), *model.named_buffers())
    return Network(
        kinds={**kinds, LOSS: "loss"},
        owners={**reference.owners, **written},
        users=reference.users,
        dtypes={
            boundary: tensor_facts.dtype_name(dtype) for boundary, dtype in arrival.dtypes.items()
        },
        state_dtypes={name: tensor_facts.dtype_name(tensor.dtype) for name, tensor in state},
        roundoffs=roundoffs,
        widths=widths,
        rows=rows,
        layers=layers,
        is_on_cpu=execution.device.type == "cpu",
    )


@dataclass
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
        experts: numbers of the experts with gradients that rounding does not explain, as "[3]".
        uncompared: "output" where none of the tensors that it computes is compared; "backward"
            where the gradient of one of its inputs is not, or no parameter's.
    """

    module: str
    kind: str
    arrived: float = 0.0
    gradient_arrived: float = 0.0
    added: AddedError | None = None
    gradient_added: AddedError | None = None
    experts: set[str] = field(default_factory=set)
    uncompared: set[str] = field(default_factory=set)


def module_errors(
    network: Network, free: PassErrors, added: PassErrors, explained: PassErrors
) -> list[ModuleErrors]:
    """Return a row for every module that computes something, in the order of the forward.

    Args:
        network: facts about the compared model.
        free: errors of a free execution.
        added: of what is computed from the reference's own tensors and gradients.
        explained: of the perturbed reference.
    """
    rows = {name: ModuleErrors(name, kind) for name, kind in network.kinds.items()}
    for boundary, error in free.forward.items():
        if boundary.side == "in" and boundary.call == 0 and boundary.module in rows:
            row = rows[boundary.module]
            row.arrived = max(row.arrived, error.relative)
    for boundary, error in free.backward.items():
        if boundary.side == "out" and boundary.call == 0 and boundary.module in rows:
            row = rows[boundary.module]
            row.gradient_arrived = max(row.gradient_arrived, error.relative)
    forward = [each for each in _forward_errors(network, added, explained) if each[0] in rows]
    for name, one in forward:
        rows[name].added = _worse(rows[name].added, one, -1)
    backward = [each for each in _backward_errors(network, added, explained) if each[0] in rows]
    for name, one in backward:
        rows[name].gradient_added = _worse(rows[name].gradient_added, one, 1)
        _, bracket, number = one.tensor.rpartition("[")
        if bracket and one.is_unexplained:
            rows[name].experts.add(bracket + number)
    # Buffers, as the counter of a batch norm, say nothing of the output beside them; an attention
    # mask of zeros is usual beside other tensors, and a gradient of zeros is not.
    for name in _uncompared(forward, is_state=False):
        rows[name].uncompared.add("output")
    stopped = {name for name, one in backward if not (one.is_state or one.is_compared)}
    for name in stopped | _uncompared(backward, is_state=True):
        rows[name].uncompared.add("backward")
    return [row for row in rows.values() if row.added or row.gradient_added]


def _uncompared(errors: Sequence[tuple[str, AddedError]], is_state: bool) -> set[str]:
    """Return the modules that have state, or other tensors, and none that is compared."""
    chosen = [(name, one.is_compared) for name, one in errors if one.is_state is is_state]
    return {name for name, _ in chosen} - {name for name, is_compared in chosen if is_compared}


def _worse(one: AddedError | None, other: AddedError, direction: int) -> AddedError:
    """Return the error that stands for a module: the first that rounding does not explain, for what
    comes after it may follow from it; else the largest.

    Args:
        one: None for no error yet.
        other: the next one.
        direction: -1 where lower positions come first, 1 where higher ones do.
    """

    def severity(added: AddedError) -> tuple[bool, bool, int, float]:
        position = direction * added.position if added.is_unexplained else 0
        is_news = added.is_unexplained and not added.is_known_sum
        return is_news, added.is_unexplained, position, added.ratio / added.largest_ratio

    return other if one is None else max(one, other, key=severity)


def _forward_errors(
    network: Network, added: PassErrors, explained: PassErrors
) -> Iterator[tuple[str, AddedError]]:
    """Yield each tensor that a module computes and each buffer after the step, as running
    statistics, with the module."""
    roundoffs, positions = network.roundoffs, network.positions
    for boundary, error in added.forward.items():
        owner = network.owners[boundary]
        expected = _relative(explained.forward.get(boundary))
        limit = network.limit(owner)
        if error.is_discrete:
            # No draw of few shows that rounding never changes one element.
            expected += 1 / max(error.elements, 1)
            limit = LARGEST_EXPLAINED_OF_INTEGERS
        else:
            roundoff = roundoffs.tensors[boundary]
            expected = with_rounding(expected, roundoff, network.widths[owner])
        name = "output" if boundary.module == owner else f"{PASSED}{boundary.module}"
        if boundary.side in CHOICES:
            name = f"choice of {boundary.side}()"
        elif boundary.side == WRITTEN:
            name = WRITTEN_INPUT
        dtype = network.dtypes.get(boundary, "")
        yield owner, AddedError(name, error, expected, dtype, positions[boundary], limit)
    for buffer, error in added.buffers.items():
        prefix, _, name = buffer.rpartition(".")
        module = prefix or module_tape.ROOT
        dtype = network.state_dtypes.get(buffer, "")
        expected = _relative(explained.buffers.get(buffer))
        # Rounding does not change a counter.
        if not error.is_discrete:
            roundoff = tensor_facts.unit_roundoff(getattr(torch, dtype)) if dtype else 0.0
            roundoff = max(roundoffs.code[module], roundoff)
            expected = with_rounding(expected, roundoff, network.widths[module])
        position = positions.get(Boundary(module, 0, "out", 0), 0)
        limit = network.limit(module)
        yield module, AddedError(name, error, expected, dtype, position, limit, True)


def _backward_errors(
    network: Network, added: PassErrors, explained: PassErrors
) -> Iterator[tuple[str, AddedError]]:
    """Yield each gradient that a module computes, with the module."""
    roundoffs, positions = network.roundoffs, network.positions
    outputs: dict[str, int] = {}
    for boundary, user in network.users.items():
        outputs[network.owners[boundary]] = positions[boundary]
        if boundary not in added.backward:
            continue
        expected = with_rounding(
            _relative(explained.backward.get(boundary)),
            roundoffs.tensor_gradients[boundary],
            network.widths[user],
        )
        name = f"gradient of the output of {boundary.module}"
        if boundary.module == user:
            name = "gradient of its input"
        dtype = network.dtypes.get(boundary, "")
        error, limit = added.backward[boundary], network.limit(user)
        yield user, AddedError(name, error, expected, dtype, positions[boundary], limit)
    for parameter, error in added.gradients.items():
        prefix, _, own_name = parameter.rpartition(".")
        module = prefix or module_tape.ROOT
        expected = with_rounding(
            _relative(explained.gradients.get(parameter)),
            max(roundoffs.code[module], roundoffs.parameters),
            network.rows[module],
        )
        name = f"gradient of its {own_name}"
        dtype = network.state_dtypes.get(parameter.partition("[")[0], "")
        # A sum over all rows, which kernels add up in several ways.
        limit = LARGEST_EXPLAINED_OF_CODE
        taken = network.dtypes.get(Boundary(module, 0, "in", 0))
        chosen_by = {"LayerNorm": taken, "Embedding": dtype}.get(network.kinds.get(module, ""))
        is_known = network.is_on_cpu and module in network.layers and chosen_by == "bfloat16"
        position = outputs.get(module, 0)
        yield module, AddedError(name, error, expected, dtype, position, limit, True, "", is_known)


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


def first_divergence(rows: Sequence[ModuleErrors]) -> Divergence | None:
    """Return where the executions part first; None where rounding explains every error.

    The forward comes first, in its order, then the backward in its order, from the loss on. What is
    known of torch's kernels comes last.
    """
    forward, backward = [], []
    for row in rows:
        if row.added is not None and row.added.is_unexplained:
            forward.append(Divergence(row, row.added, False))
        if row.gradient_added is not None and row.gradient_added.is_unexplained:
            backward.append(Divergence(row, row.gradient_added, True))
    if forward:
        return min(forward, key=lambda divergence: divergence.added.position)
    news = [divergence for divergence in backward if not divergence.added.is_known_sum]
    return max(news or backward, key=lambda divergence: divergence.added.position, default=None)
