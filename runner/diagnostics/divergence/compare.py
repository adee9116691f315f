"""Compare two executions of one model on one batch, module by module."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.data.batch_layout import Batch
from runner.diagnostics.divergence.boundaries import (
    ROOT,
    Boundary,
    FunctionListener,
    comparable_modules,
    functions_are_seen,
    visited_modules,
)
from runner.diagnostics.divergence.findings import (
    ModuleErrors,
    build_network,
    first_divergence,
    module_errors,
)
from runner.diagnostics.divergence.passes import (
    Arrival,
    PassErrors,
    Substitution,
    pass_errors,
    weight_errors,
)
from runner.diagnostics.divergence.reference import (
    NarrowCode,
    Overwritten,
    Recorder,
    Reference,
    set_generator_states,
    writes_in_place,
)
from runner.diagnostics.divergence.roundoffs import (
    Execution,
    Perturber,
    find_roundoffs,
    narrow_dtype,
)
from runner.diagnostics.divergence.tensor_error import larger_errors, measure_error
from runner.precision.contract import Precision
from runner.training.state import saved_state
from runner.training.step import backpropagate, loss_of
from runner.utils.tensors import unit_roundoff

_KINK_PEAK = 0.05
"""Share of a tensor's squared error in one element from which on the error may be that of a kink:
where a ReLU's input is near 0, its gradient is all there or not at all."""
_KINK_DRAWS = 20
"""Perturbations whose largest error explains a kink's: in one alone no element may be near it."""


@dataclass(frozen=True)
class BatchComparison:
    """Two executions on one batch.

    Attributes:
        rows: a row for every module that computes something, in the order of the forward.
        losses: of the reference, and of the other execution.
        output_error: largest relative error of the model's outputs in a free execution.
        gradient_error: relative error of all parameters' gradients together, in a free execution.
        outputs: what the model returned in each; None where it is no floating tensor.
        scale: loss scale of the other execution.
        is_exact: whether both computed the same bits when they ran freely.
        same_format: whether both compute in the same precision.
        uneven_calls: by module, how often the other execution and the reference call it, where
            that is not the same.
        other_weights: modules whose parameters differ by more than their formats' rounding.
    """

    rows: list[ModuleErrors]
    losses: tuple[float, float]
    output_error: float
    gradient_error: float
    outputs: tuple[Tensor, Tensor] | None
    scale: float
    is_exact: bool
    same_format: bool
    uneven_calls: dict[str, tuple[int, int]]
    other_weights: list[str]


class _Pass(NamedTuple):
    """What every pass over a model begins with: the batch, the states of the random generators, and
    the names of the modules whose boundaries are visited."""

    batch: Batch
    generators: list[Tensor]
    names: Collection[str]


def record_reference(
    execution: Execution,
    batch: Batch,
    generators: list[Tensor],
    names: Collection[str] | None = None,
) -> Reference:
    """Run the forward and backward of a batch, and record what crosses the modules' boundaries.

    Args:
        execution: whose model computes; its buffers and its gradients are left as they were.
        batch: inputs and target on the device.
        generators: states that the random generators begin with.
        names: of the modules; None for all whose calls can be seen.
    """
    model = execution.state.plain_model
    names = comparable_modules(model) if names is None else names
    scale = execution.scale
    for copies in (writes_in_place(model), True):
        recorder = Recorder(execution.device, copies)
        narrow_code = NarrowCode(narrow_dtype(execution.precision))
        if functions_are_seen(model):
            recorder.reference.narrow_code = narrow_code
        with _trial_run(execution, generators):
            with visited_modules(model, names, recorder, narrow_code) as calls:
                loss = calls.cross_loss(loss_of(execution.state, *batch))
            backpropagate(execution.state, loss * scale)
            try:
                return recorder.finish(model, loss, scale)
            except Overwritten:
                continue
    raise AssertionError("copies are not overwritten")


class FreeRun(NamedTuple):
    """An execution without substitution.

    Attributes:
        arrival: its visitor.
        errors: of what crosses the boundaries, of gradients and of buffers.
        loss: of the batch.
        narrow_code: which modules' own code computes in the precision's narrow dtype; None where
            its functions are not seen.
    """

    arrival: Arrival
    errors: PassErrors
    loss: float
    narrow_code: NarrowCode | None


def compare_batch(
    reference_execution: Execution,
    execution: Execution,
    batches: tuple[Batch, Batch],
    generators: list[Tensor],
    recorded: Reference | None = None,
) -> BatchComparison:
    """Compare an execution with a reference on one batch.

    Args:
        reference_execution: computes the reference, and what rounding explains.
        execution: is compared.
        batches: the same one, on the device of each.
        generators: states that the random generators begin with.
        recorded: a reference of elsewhere; None records it here.
    """
    names = comparable_modules(execution.state.plain_model)
    names &= comparable_modules(reference_execution.state.plain_model)
    first, second = (_Pass(batch, generators, names) for batch in batches)
    execution = _with_settled_scale(execution, second)
    reference_execution = _with_settled_scale(reference_execution, first)
    if reference_execution.precision.name != execution.precision.name:
        _settle_own_scales(execution, second)
        _settle_own_scales(reference_execution, first)
    reference = recorded or record_reference(reference_execution, batches[0], generators, names)
    free = _run_freely(execution, reference, second)
    roundoffs = find_roundoffs(
        reference_execution, execution, reference, free.arrival.dtypes, free.narrow_code
    )
    copies = reference.writes_in_place or free.arrival.writes_in_place
    added = _substitute(Substitution(reference, execution, copies), second)
    network = build_network(execution, reference, free.arrival, added, roundoffs)
    rows: list[ModuleErrors] = []
    explained = PassErrors({}, {}, {}, {})
    # What rounding explains is measured in the reference's own execution.
    for draw in range(_KINK_DRAWS):
        perturber = Perturber(roundoffs, reference, execution.device, draw)
        visitor = Substitution(reference, reference_execution, copies, perturber)
        with perturber.perturbed_parameters(reference_execution.state.plain_model):
            drawn = _substitute(visitor, first)
        explained = PassErrors(*map(larger_errors, explained, drawn))
        rows = module_errors(network, free.errors, added, explained)
        divergence = first_divergence(rows)
        if divergence is None or divergence.added.found.peak < _KINK_PEAK:
            break
    rows = _with_operation(rows, (reference_execution, execution), reference, (first, second))
    outputs = free.arrival.outputs
    output_errors = [free.errors.forward[b].relative for b in outputs if b in free.errors.forward]
    every_error = [error for errors in free.errors for error in errors.values()]
    # The error of all gradients taken as one.
    gradients = free.errors.gradients.values()
    gradient_norm = sum(error.norm**2 for error in gradients) ** 0.5
    error_norm = sum(error.error**2 for error in gradients) ** 0.5
    gradient_error = error_norm / gradient_norm if gradient_norm else 0.0
    return BatchComparison(
        rows,
        (reference.loss, free.loss),
        max(output_errors, default=0.0),
        gradient_error,
        _logits(reference, outputs),
        execution.scale,
        not any(error.error or error.nonfinite for error in every_error),
        reference_execution.precision.name == execution.precision.name,
        _uneven_calls(reference, free.arrival),
        _other_weights(execution.state.plain_model, reference_execution.state.plain_model),
    )


def _with_operation(
    rows: list[ModuleErrors],
    executions: tuple[Execution, Execution],
    reference: Reference,
    passes: tuple[_Pass, _Pass],
) -> list[ModuleErrors]:
    """Return the rows with the operation in which the first divergence begins, where that is in
    the forward of a module's own code: both executions run once more for it."""
    first = first_divergence(rows)
    if first is None or first.is_backward:
        return rows
    module = first.row.module
    traces = []
    for execution, one in zip(executions, passes, strict=True):
        trace = _OperationTrace(module)
        _substitute(Substitution(reference, execution, copies=True), one, trace)
        traces.append(trace.operations)
    name = _first_different_operation(traces[1], traces[0], first.added.found.relative)
    added = replace(first.added, operation=name)
    return [replace(row, added=added) if row.module == module else row for row in rows]


class _OperationTrace:
    """A listener that records what the functions of torch return in one module's own code.

    Args:
        module: name of the module.

    Attributes:
        operations: names of the functions in the order of their calls, and the floating tensors
            that they returned.
    """

    def __init__(self, module: str) -> None:
        self.operations: list[tuple[str, Tensor]] = []
        self._module = module

    def __call__(self, module: str, name: str, arguments: Any, result: Any) -> None:
        """Record the floating tensors among a function's results."""
        if module != self._module:
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.operations.append((name, leaf.detach()))


def _first_different_operation(
    operations: Sequence[tuple[str, Tensor]], reference: Sequence[tuple[str, Tensor]], error: float
) -> str:
    """Return the name of the operation in which two executions of a module's code part.

    Args:
        operations: of the execution.
        reference: of the reference.
        error: relative error of the module's result.

    Returns:
        The first operation whose result is not finite where the reference's is, or is off by half
        the module's error; empty where there is none, or the two run other operations.
    """
    for (name, result), (other, expected) in zip(operations, reference, strict=False):
        if name != other or result.shape != expected.shape:
            return ""
        measured = measure_error(result, expected)
        if measured.nonfinite or measured.relative > error / 2 > 0:
            return name
    return ""


def _uneven_calls(reference: Reference, arrival: Arrival) -> dict[str, tuple[int, int]]:
    """Return how often the execution and the reference call each module that they call unequally
    often, in order."""
    counts = Counter(module for module, _ in arrival.calls)
    expected = Counter(module for module, _ in reference.generators)
    modules = dict.fromkeys([*expected, *counts])
    return {m: (counts[m], expected[m]) for m in modules if counts[m] != expected[m]}


def _other_weights(model: nn.Module, reference: nn.Module) -> list[str]:
    """Return the modules whose parameters differ by more than their formats' rounding, in order."""
    modules = []
    for name, error in weight_errors(model, reference).items():
        dtypes = (model.get_parameter(name).dtype, reference.get_parameter(name).dtype)
        if error.relative > max(unit_roundoff(dtype) for dtype in dtypes):
            modules.append(name.rpartition(".")[0] or ROOT)
    return [*dict.fromkeys(modules)]


def _run_freely(execution: Execution, reference: Reference, one: _Pass) -> FreeRun:
    """Run a batch without substitution."""
    model = execution.state.plain_model
    arrival = Arrival(reference, execution.scale)
    narrow_code = NarrowCode(narrow_dtype(execution.precision))
    with _trial_run(execution, one.generators):
        with visited_modules(model, one.names, arrival, narrow_code) as calls:
            loss = calls.cross_loss(loss_of(execution.state, *one.batch))
        backpropagate(execution.state, loss * execution.scale)
        errors = pass_errors(arrival, execution, reference)
    return FreeRun(arrival, errors, loss.item(), narrow_code if functions_are_seen(model) else None)


def _substitute(visitor: Substitution, one: _Pass, *listeners: FunctionListener) -> PassErrors:
    """Run a batch with the reference's tensors at every boundary; return all errors."""
    execution = visitor.execution
    with _trial_run(execution, one.generators):
        model = execution.state.plain_model
        with visited_modules(model, one.names, visitor, *listeners) as calls:
            calls.cross_loss(loss_of(execution.state, *one.batch))
        return pass_errors(visitor, execution, visitor.reference)


@contextmanager
def _trial_run(execution: Execution, generators: list[Tensor]) -> Iterator[None]:
    """Return the context of one forward and backward, which leaves the model as it was."""
    restore = saved_state(execution.state)
    try:
        with _computing(execution, generators):
            yield
    finally:
        restore()


@contextmanager
def _computing(execution: Execution, generators: list[Tensor]) -> Iterator[None]:
    """Return the context of one forward and backward in training mode, from no gradients."""
    model = execution.state.plain_model
    for parameter in model.parameters():
        parameter.grad = None
    set_generator_states(generators, execution.device)
    model.train()
    with execution.precision.session(model, execution.device):
        yield


def _settle_own_scales(execution: Execution, one: _Pass) -> None:
    """Let a precision that scales by past steps, and has seen none, see the batch once: its first
    scales of 1 would lose what later ones keep."""
    precision, state = execution.precision, execution.state
    has_state = type(precision).state_dict is not Precision.state_dict
    if has_state and not precision.state_dict(state.plain_model):
        with _computing(execution, one.generators):
            backpropagate(state, loss_of(state, *one.batch) * execution.scale)


def _with_settled_scale(execution: Execution, one: _Pass) -> Execution:
    """Return the execution at a loss scale at which no gradient overflows, as a run's loss scale
    is after its first steps; at its own, where none does."""
    state, settled = execution.state, execution
    while settled.scale > 1.0:
        with _trial_run(settled, one.generators):
            backpropagate(state, loss_of(state, *one.batch) * settled.scale)
            gradients = [p.grad for p in state.plain_model.parameters() if p.grad is not None]
            if all(gradient.isfinite().all() for gradient in gradients):
                return settled
        settled = replace(settled, scale=settled.scale / 2)
    return execution


def _logits(
    reference: Reference, outputs: Mapping[Boundary, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the first output of more than one dimension in both executions: a model that returns
    its loss returns that first."""
    for boundary, output in outputs.items():
        expected = reference.values.get(boundary)
        if expected is not None and expected.ndim > 1 and expected.is_floating_point():
            return expected, output
    return None
