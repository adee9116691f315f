"""Compare two executions of one model on one batch, module by module."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from runner.data.batch_layout import Batch
from runner.diagnostics.divergence.boundaries import (
    ROOT,
    Boundary,
    FunctionListener,
    comparable_modules,
    functions_are_seen,
    visited_modules,
)
from runner.diagnostics.divergence.expected_error import Perturber
from runner.diagnostics.divergence.findings import (
    MeasuredErrors,
    ModuleErrors,
    first_divergence,
    module_errors,
)
from runner.diagnostics.divergence.narrow_code import NarrowCode
from runner.diagnostics.divergence.network import Network, build_network
from runner.diagnostics.divergence.operations import (
    OperationTrace,
    first_different_operation,
)
from runner.diagnostics.divergence.passes import (
    Arrival,
    Substitution,
    buffer_errors,
    parameter_errors,
    weight_errors,
)
from runner.diagnostics.divergence.reference import (
    Overwritten,
    Recorder,
    Reference,
    writes_in_place,
)
from runner.diagnostics.divergence.roundoffs import Execution, find_roundoffs, narrow_dtype
from runner.diagnostics.divergence.tensor_error import TensorError, larger_errors
from runner.diagnostics.divergence.trial_runs import (
    settle_own_scales,
    trial_run,
    with_settled_scale,
)
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
        with trial_run(execution, generators):
            with visited_modules(model, names, recorder, narrow_code) as calls:
                loss = calls.cross_loss(loss_of(execution.state, *batch))
            backpropagate(execution.state, loss * scale)
            try:
                return recorder.finish(model, loss, scale)
            except Overwritten:
                continue
    raise AssertionError("copies are not overwritten")


class StateErrors(NamedTuple):
    """The errors of a model after a forward and backward.

    Attributes:
        gradients: of the parameters, by name.
        buffers: by name.
    """

    gradients: dict[str, TensorError]
    buffers: dict[str, TensorError]


class FreeRun(NamedTuple):
    """An execution without substitution.

    Attributes:
        arrival: errors of what crosses the boundaries.
        loss: of the batch.
        state: errors of gradients and buffers.
        narrow_code: which modules' own code computes in the precision's narrow dtype; None where
            its functions are not seen.
    """

    arrival: Arrival
    loss: float
    state: StateErrors
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
    execution = with_settled_scale(execution, batches[1], generators)
    reference_execution = with_settled_scale(reference_execution, batches[0], generators)
    if reference_execution.precision.name != execution.precision.name:
        settle_own_scales(execution, batches[1], generators)
        settle_own_scales(reference_execution, batches[0], generators)
    reference = recorded or record_reference(reference_execution, batches[0], generators, names)
    free = _run_freely(execution, reference, second)
    roundoffs = find_roundoffs(
        reference_execution, execution, reference, free.arrival.dtypes, free.narrow_code
    )
    copies = reference.writes_in_place or free.arrival.writes_in_place
    added = Substitution(reference, execution, copies)
    state_added = _substitute(execution, added, reference, second)
    network = build_network(execution, reference, free.arrival, added, roundoffs)
    errors = MeasuredErrors(
        arrived=free.arrival.forward,
        gradient_arrived=free.arrival.backward,
        added=added.forward,
        gradient_added=added.backward,
        parameters_added=state_added.gradients,
        buffers_added=state_added.buffers,
    )
    rows = _judged_rows(reference_execution, reference, network, errors, first, copies)
    rows = _with_operation(rows, (reference_execution, execution), reference, (first, second))
    outputs = free.arrival.outputs
    output_errors = [errors.arrived[b].relative for b in outputs if b in errors.arrived]
    return BatchComparison(
        rows,
        (reference.loss, free.loss),
        max(output_errors, default=0.0),
        _joined_error(free.state.gradients),
        _logits(reference, outputs),
        execution.scale,
        not any(error.error or error.nonfinite for error in _free_errors(free)),
        reference_execution.precision.name == execution.precision.name,
        _other_calls(reference, free.arrival),
        _other_weights(execution, reference_execution),
    )


def _judged_rows(
    execution: Execution,
    reference: Reference,
    network: Network,
    errors: MeasuredErrors,
    settings: _Pass,
    copies: bool,
) -> list[ModuleErrors]:
    """Return the rows of a comparison, after measuring in the reference's own execution what
    rounding explains."""
    rows: list[ModuleErrors] = []
    for draw in range(_KINK_DRAWS):
        perturber = Perturber(network.roundoffs, reference, execution.device, draw)
        expected = Substitution(reference, execution, copies, perturber)
        with perturber.perturbed_parameters(execution.state.plain_model):
            state_expected = _substitute(execution, expected, reference, settings)
        errors = replace(
            errors,
            expected=larger_errors(errors.expected, expected.forward),
            gradient_expected=larger_errors(errors.gradient_expected, expected.backward),
            parameters_expected=larger_errors(errors.parameters_expected, state_expected.gradients),
            buffers_expected=larger_errors(errors.buffers_expected, state_expected.buffers),
        )
        rows = module_errors(network, errors)
        found = first_divergence(rows)
        if found is None or found.added.found.peak < _KINK_PEAK:
            break
    return rows


def _other_calls(reference: Reference, arrival: Arrival) -> dict[str, tuple[int, int]]:
    """Return how often the execution and the reference call each module that they call unequally
    often, in order."""
    found = Counter(module for module, _ in arrival.calls)
    wanted = Counter(module for module, _ in reference.generators)
    modules = dict.fromkeys([*wanted, *found])
    return {m: (found[m], wanted[m]) for m in modules if found[m] != wanted[m]}


def _other_weights(execution: Execution, reference: Execution) -> list[str]:
    """Return the modules whose parameters differ by more than their formats' rounding, in order."""
    model, other = execution.state.plain_model, reference.state.plain_model
    wanted = dict(other.named_parameters())
    modules = []
    for name, error in weight_errors(model, other).items():
        dtypes = (model.get_parameter(name).dtype, wanted[name].dtype)
        if error.relative > max(unit_roundoff(dtype) for dtype in dtypes):
            modules.append(name.rpartition(".")[0] or ROOT)
    return [*dict.fromkeys(modules)]


def _free_errors(free: FreeRun) -> Iterator[TensorError]:
    """Yield all errors of an execution that ran freely."""
    yield from free.arrival.forward.values()
    yield from free.arrival.backward.values()
    yield from free.state.gradients.values()
    yield from free.state.buffers.values()


def _with_operation(
    rows: list[ModuleErrors],
    executions: tuple[Execution, Execution],
    reference: Reference,
    settings: tuple[_Pass, _Pass],
) -> list[ModuleErrors]:
    """Return the rows with the operation in which the first divergence begins, where that is in
    the forward of a module's own code: both executions run once more for it."""
    first = first_divergence(rows)
    if first is None or first.is_backward:
        return rows
    module = first.row.module
    traces = []
    for execution, one in zip(executions, settings, strict=True):
        visitor = Substitution(reference, execution, copies=True)
        trace = OperationTrace(module)
        _substitute(execution, visitor, reference, one, trace)
        traces.append(trace.operations)
    name = first_different_operation(traces[1], traces[0], first.added.found.relative)
    added = replace(first.added, operation=name)
    return [replace(row, added=added) if row.module == module else row for row in rows]


def _run_freely(execution: Execution, reference: Reference, settings: _Pass) -> FreeRun:
    """Run a batch without substitution."""
    model = execution.state.plain_model
    arrival = Arrival(reference, execution.scale)
    narrow_code = NarrowCode(narrow_dtype(execution.precision))
    with trial_run(execution, settings.generators):
        with visited_modules(model, settings.names, arrival, narrow_code) as calls:
            loss = calls.cross_loss(loss_of(execution.state, *settings.batch))
        backpropagate(execution.state, loss * execution.scale)
        state = _state_errors(execution, reference)
    seen = narrow_code if functions_are_seen(model) else None
    return FreeRun(arrival, loss.item(), state, seen)


def _substitute(
    execution: Execution,
    visitor: Substitution,
    reference: Reference,
    settings: _Pass,
    *listeners: FunctionListener,
) -> StateErrors:
    """Run a batch with the reference's tensors at every boundary; return the errors of gradients
    and buffers."""
    model = execution.state.plain_model
    with trial_run(execution, settings.generators):
        with visited_modules(model, settings.names, visitor, *listeners) as calls:
            calls.cross_loss(loss_of(execution.state, *settings.batch))
        return _state_errors(execution, reference)


def _state_errors(execution: Execution, reference: Reference) -> StateErrors:
    model = execution.state.plain_model
    gradients = parameter_errors(model, reference, execution.scale)
    return StateErrors(gradients, buffer_errors(model, reference))


def _logits(
    reference: Reference, outputs: Mapping[Boundary, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the first output of more than one dimension in both executions: a model that returns
    its loss returns that first."""
    for boundary, output in outputs.items():
        wanted = reference.values.get(boundary)
        if wanted is not None and wanted.ndim > 1 and wanted.is_floating_point():
            return wanted, output
    return None


def _joined_error(errors: Mapping[str, TensorError]) -> float:
    """Return the relative error of several tensors taken as one."""
    error = sum(found.error**2 for found in errors.values()) ** 0.5
    norm = sum(found.norm**2 for found in errors.values()) ** 0.5
    return error / norm if norm else 0.0
