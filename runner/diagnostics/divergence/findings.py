"""Decide from measured errors in which module two executions part."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from runner.core import fmt, module_tape, tensor_facts
from runner.diagnostics.divergence.boundaries import CHOICES, LOSS, WRITTEN, Boundary
from runner.diagnostics.divergence.reference import Reference
from runner.diagnostics.divergence.substitution import Execution, PassErrors, Roundoffs
from runner.diagnostics.divergence.tensor_error import TensorError
from runner.diagnostics.module_tensors import named_modules
from runner.precision.conversion import is_converted

LARGEST_EXPLAINED = 2.0
"""Error that rounding explains, as a multiple of the expected error, of a layer of torch.nn or a
converted one: operands and result are rounded once, as the expected error has it."""
LARGEST_EXPLAINED_OF_CODE = 5.0
"""The same for any other code, which may round several times on its way."""
LARGEST_EXPLAINED_OF_INTEGERS = 4.0
"""The same of integers and truth values, for the number of elements that differ."""
_FEW_ELEMENTS = 32
_FLOAT32_ROUNDOFF = 2.0**-24
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
        position: number of the tensor in the order in which its pass computes them.
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

    @property
    def is_news(self) -> bool:
        """Return whether neither rounding nor KNOWN_SUM explains the error."""
        return self.is_unexplained and not self.is_known_sum


class Network:
    """Facts about the compared model, by which its errors are judged.

    Args:
        execution: is compared.
        reference: with which.
        free: tensors of the execution.
        added: errors of what it computes from the reference's tensors.
        roundoffs: with which the wider of the two executions computes.

    Attributes:
        kinds: class of each module, by name, in the order of the first calls.
        owners: by boundary, the module whose own code computed the tensor; in the forward's order.
        users: by boundary, the module whose own code takes it.
        dtypes: by boundary, parameter or buffer, name of the dtype in the execution.
        roundoffs: as given.
        widths: by module, the most elements of an example of the tensors that it takes and
            returns; 1 where it takes none.
        rows: by module, the largest number of rows of their last dimension.
        layers: names of the layers of torch.nn and of converted ones, which round once.
        positions: by boundary, its number in the order of the forward.
        is_on_cpu: whether the execution computes on a CPU.
    """

    def __init__(
        self,
        execution: Execution,
        reference: Reference,
        free: Reference,
        added: PassErrors,
        roundoffs: Roundoffs,
    ) -> None:
        model = execution.state.plain_model
        classes: dict[str, str] = {}
        self.layers: set[str] = set()
        for name, module in named_modules(model):
            classes[name] = type(module).__name__
            is_plain = type(module).__module__.startswith("torch.nn.")
            if is_converted(module) or (is_plain and next(module.children(), None) is None):
                self.layers.add(name)
        self.kinds = {name: classes.get(name, "") for name, _ in reference.generators}
        self.kinds[LOSS] = "loss"
        self.widths: defaultdict[str, int] = defaultdict(lambda: 1)
        self.rows: defaultdict[str, int] = defaultdict(lambda: 1)
        for boundary, value in reference.values.items():
            # A product of no sizes is 1.
            width = value.numel() // max(math.prod(value.shape[:1]), 1)
            height = value.numel() // max(math.prod(value.shape[-1:]), 1)
            for name in (reference.owners[boundary], reference.users[boundary]):
                self.widths[name] = max(self.widths[name], width)
                self.rows[name] = max(self.rows[name], height)
        self.owners = {**reference.owners}
        # What only this execution writes into is no boundary of the reference.
        for boundary in added.forward:
            self.owners.setdefault(boundary, boundary.module)
        self.users = reference.users
        self.positions = {boundary: number for number, boundary in enumerate(self.owners)}
        tensors = {**free.values, **dict(model.named_parameters()), **dict(model.named_buffers())}
        self.dtypes = {key: tensor_facts.dtype_name(t.dtype) for key, t in tensors.items()}
        self.roundoffs = roundoffs
        self.is_on_cpu = execution.device.type == "cpu"

    def limit(self, module: str) -> float:
        """Return the error that rounding explains in a module, as a multiple of the expected."""
        return LARGEST_EXPLAINED if module in self.layers else LARGEST_EXPLAINED_OF_CODE


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
    arrived = _largest_arriving(free.forward, "in")
    gradient_arrived = _largest_arriving(free.backward, "out")
    forward = fmt.grouped(_forward_errors(network, added, explained))
    backward = fmt.grouped(_backward_errors(network, added, explained))
    rows = []
    for name, kind in network.kinds.items():
        computed, gradients = forward.get(name, []), backward.get(name, [])
        if not (computed or gradients):
            continue
        row = ModuleErrors(name, kind, arrived[name], gradient_arrived[name])
        row.added = max(computed, key=_severity, default=None)
        row.gradient_added = max(gradients, key=_severity, default=None)
        for one in gradients:
            _, bracket, number = one.tensor.rpartition("[")
            if bracket and one.is_unexplained:
                row.experts.add(bracket + number)
        # Buffers, as the counter of a batch norm, say nothing of the output beside them; an
        # attention mask of zeros is usual beside other tensors, and a gradient of zeros is not.
        if _are_compared(computed, of_state=False) == {False}:
            row.uncompared.add("output")
        inputs = _are_compared(gradients, of_state=False)
        if False in inputs or _are_compared(gradients, of_state=True) == {False}:
            row.uncompared.add("backward")
        rows.append(row)
    return rows


def _largest_arriving(errors: Mapping[Boundary, TensorError], side: str) -> defaultdict[str, float]:
    """Return by module the largest relative error on one side of its first call; 0 without any."""
    largest: defaultdict[str, float] = defaultdict(float)
    for boundary, error in errors.items():
        if boundary.side == side and boundary.call == 0:
            largest[boundary.module] = max(largest[boundary.module], error.relative)
    return largest


def _are_compared(errors: Sequence[AddedError], of_state: bool) -> set[bool]:
    """Return the answers of is_compared of the errors of a state, or of the others."""
    return {one.is_compared for one in errors if one.is_state == of_state}


def _severity(added: AddedError) -> tuple[bool, bool, int, float]:
    """Return by what an error stands for a module: the first that rounding does not explain, for
    what comes after it may follow from it; else the largest."""
    position = added.position if added.is_unexplained else 0
    return added.is_news, added.is_unexplained, -position, added.ratio / added.largest_ratio


def _forward_errors(
    network: Network, added: PassErrors, explained: PassErrors
) -> Iterator[tuple[str, AddedError]]:
    """Yield each tensor that a module computes and each buffer after the step, as running
    statistics, with the module."""
    roundoffs, positions = network.roundoffs, network.positions
    for boundary, error in added.forward.items():
        owner = network.owners[boundary]
        roundoff = roundoffs.tensors[boundary]
        drawn = explained.forward.get(boundary)
        expected = _with_rounding(drawn, roundoff, network.widths[owner])
        limit = network.limit(owner)
        if error.is_discrete:
            # No draw of few shows that rounding never changes one element.
            expected += 1 / max(error.elements, 1)
            limit = LARGEST_EXPLAINED_OF_INTEGERS
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
        dtype = network.dtypes.get(buffer, "")
        # The trial has ended, and with it buffers that the forward made.
        roundoff = tensor_facts.unit_roundoff(getattr(torch, dtype)) if dtype else 0.0
        # Rounding does not change a counter.
        if not error.is_discrete:
            roundoff = max(roundoff, roundoffs.code[module])
        drawn = explained.buffers.get(buffer)
        expected = _with_rounding(drawn, roundoff, network.widths[module])
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
        outputs[network.owners[boundary]] = -positions[boundary]
        error = added.backward.get(boundary)
        if error is None:
            continue
        roundoff = roundoffs.tensor_gradients[boundary]
        drawn = explained.backward.get(boundary)
        expected = _with_rounding(drawn, roundoff, network.widths[user])
        name = f"gradient of the output of {boundary.module}"
        if boundary.module == user:
            name = "gradient of its input"
        dtype = network.dtypes.get(boundary, "")
        limit = network.limit(user)
        yield user, AddedError(name, error, expected, dtype, -positions[boundary], limit)
    for parameter, error in added.gradients.items():
        prefix, _, own_name = parameter.rpartition(".")
        module = prefix or module_tape.ROOT
        roundoff = max(roundoffs.code[module], roundoffs.parameters)
        drawn = explained.gradients.get(parameter)
        expected = _with_rounding(drawn, roundoff, network.rows[module])
        name = f"gradient of its {own_name}"
        dtype = network.dtypes.get(parameter.partition("[")[0], "")
        # A sum over all rows, which kernels add up in several ways.
        limit = LARGEST_EXPLAINED_OF_CODE
        taken = network.dtypes.get(Boundary(module, 0, "in", 0))
        chosen_by = {"LayerNorm": taken, "Embedding": dtype}.get(network.kinds.get(module, ""))
        is_known = network.is_on_cpu and module in network.layers and chosen_by == "bfloat16"
        position = outputs.get(module, 0)
        yield module, AddedError(name, error, expected, dtype, position, limit, True, "", is_known)


def _with_rounding(drawn: TensorError | None, roundoff: float, terms: int) -> float:
    """Return an expected relative error, with those of adding up and of rounding the result.

    A uniform error in [-u, u] has the standard deviation u / sqrt(3). Sums may be rounded after
    each term, in float32 or wider: the partial sums of terms of random signs grow as the square
    root of their number, and so does their error.

    Args:
        drawn: what the operands' rounding causes; None for nothing.
        roundoff: of the result.
        terms: that are added to one element of the result.
    """
    rounding = roundoff / math.sqrt(3)
    summation = min(roundoff, _FLOAT32_ROUNDOFF) * math.sqrt(terms / 3)
    return math.hypot(drawn.relative if drawn else 0.0, rounding, summation)


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
    found = []
    for row in rows:
        for is_backward, added in enumerate((row.added, row.gradient_added)):
            if added is not None and added.is_unexplained:
                found.append(Divergence(row, added, bool(is_backward)))
    return min(
        found,
        key=lambda one: (one.added.is_known_sum, one.is_backward, one.added.position),
        default=None,
    )
