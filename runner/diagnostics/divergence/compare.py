"""Compare two executions of one model on one batch, module by module."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from runner.data.batch_layout import Batch
from runner.diagnostics.divergence.boundaries import (
    LOSS,
    ROOT,
    Boundary,
    comparable_modules,
    visited_modules,
)
from runner.diagnostics.divergence.expected_error import Perturber, Roundoffs
from runner.diagnostics.divergence.findings import (
    MeasuredErrors,
    ModuleErrors,
    Network,
    first_divergence,
    module_errors,
)
from runner.diagnostics.divergence.operations import (
    OperationTrace,
    first_different_operation,
)
from runner.diagnostics.divergence.passes import Arrival, Substitution, parameter_errors
from runner.diagnostics.divergence.reference import (
    Overwritten,
    Recorder,
    Reference,
    set_generator_states,
    writes_in_place,
)
from runner.diagnostics.divergence.roundoffs import Execution, find_roundoffs
from runner.diagnostics.divergence.tensor_error import TensorError, larger_errors
from runner.precision.contract import Precision
from runner.precision.conversion import is_converted
from runner.training.step import backpropagate, loss_of
from runner.training.step_replay import saved_state
from runner.utils.tensors import dtype_name

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
        uneven_calls: modules that one execution calls more often than the other.
    """

    rows: list[ModuleErrors]
    losses: tuple[float, float]
    output_error: float
    gradient_error: float
    outputs: tuple[Tensor, Tensor] | None
    scale: float
    is_exact: bool
    same_format: bool
    uneven_calls: list[str]


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
        with _context(execution, generators):
            with visited_modules(model, names, recorder) as calls:
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
        arrival: errors of what crosses the boundaries.
        loss: of the batch.
        parameters: errors of the parameters' gradients.
    """

    arrival: Arrival
    loss: float
    parameters: dict[str, TensorError]


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
    execution = _with_settled_scale(execution, batches[1], generators)
    reference_execution = _with_settled_scale(reference_execution, batches[0], generators)
    if reference_execution.precision.name != execution.precision.name:
        _settle_own_scales(execution, batches[1], generators)
        _settle_own_scales(reference_execution, batches[0], generators)
    reference = recorded or record_reference(reference_execution, batches[0], generators, names)
    free = _run_freely(execution, reference, second)
    roundoffs = find_roundoffs(reference_execution, execution, reference, free.arrival.dtypes)
    copies = reference.writes_in_place or free.arrival.writes_in_place
    added = Substitution(reference, execution, copies)
    parameters_added = _substitute(execution, added, reference, second)
    network = _network(execution, reference, free.arrival, roundoffs)
    errors = MeasuredErrors(
        arrived=free.arrival.forward,
        gradient_arrived=free.arrival.backward,
        added=added.forward,
        gradient_added=added.backward,
        parameters_added=parameters_added,
    )
    rows = _judged_rows(reference_execution, reference, network, errors, first, copies)
    rows = _with_operation(rows, (reference_execution, execution), reference, (first, second))
    outputs = free.arrival.outputs
    output_errors = [errors.arrived[b].relative for b in outputs if b in errors.arrived]
    return BatchComparison(
        rows,
        (reference.loss, free.loss),
        max(output_errors, default=0.0),
        _joined_error(free.parameters),
        _logits(reference, outputs),
        execution.scale,
        not any(error.error or error.nonfinite for error in _free_errors(free)),
        reference_execution.precision.name == execution.precision.name,
        _other_calls(reference, free.arrival),
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
            parameters_expected = _substitute(execution, expected, reference, settings)
        errors = replace(
            errors,
            expected=larger_errors(errors.expected, expected.forward),
            gradient_expected=larger_errors(errors.gradient_expected, expected.backward),
            parameters_expected=larger_errors(errors.parameters_expected, parameters_expected),
        )
        rows = module_errors(network, errors)
        found = first_divergence(rows)
        if found is None or found.added.found.peak < _KINK_PEAK:
            break
    return rows


def _other_calls(reference: Reference, arrival: Arrival) -> list[str]:
    """Return the modules that one execution calls more often than the other, in order."""
    calls = dict.fromkeys([*reference.generators, *arrival.calls])
    other = reference.generators.keys() ^ arrival.calls
    return [*dict.fromkeys(module for module, call in calls if (module, call) in other)]


def _free_errors(free: FreeRun) -> Iterator[TensorError]:
    """Yield all errors of an execution that ran freely."""
    yield from free.arrival.forward.values()
    yield from free.arrival.backward.values()
    yield from free.parameters.values()


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
        trace = OperationTrace(module, visitor)
        with trace:
            _substitute(execution, visitor, reference, one)
        traces.append(trace.operations)
    name = first_different_operation(traces[1], traces[0], first.added.found.relative)
    added = replace(first.added, operation=name)
    return [replace(row, added=added) if row.module == module else row for row in rows]


def _settle_own_scales(execution: Execution, batch: Batch, generators: list[Tensor]) -> None:
    """Let a precision that scales by past steps, and has seen none, see the batch once: its first
    scales of 1 would lose what later ones keep."""
    precision, model = execution.precision, execution.state.plain_model
    has_state = type(precision).state_dict is not Precision.state_dict
    if has_state and not precision.state_dict(model):
        with _computing(execution, generators):
            backpropagate(execution.state, loss_of(execution.state, *batch) * execution.scale)


def _with_settled_scale(execution: Execution, batch: Batch, generators: list[Tensor]) -> Execution:
    """Return the execution at a loss scale at which no gradient overflows, as a run's loss scale
    is after its first steps; at its own, where none is found."""
    model = execution.state.plain_model
    settled = execution
    while settled.scale > 1.0:
        with _context(settled, generators):
            backpropagate(settled.state, loss_of(settled.state, *batch) * settled.scale)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if all(gradient.isfinite().all() for gradient in gradients):
                return settled
        settled = replace(settled, scale=settled.scale / 2)
    return execution


def _run_freely(execution: Execution, reference: Reference, settings: _Pass) -> FreeRun:
    """Run a batch without substitution."""
    model = execution.state.plain_model
    arrival = Arrival(reference, execution.scale)
    with _context(execution, settings.generators):
        with visited_modules(model, settings.names, arrival) as calls:
            loss = calls.cross_loss(loss_of(execution.state, *settings.batch))
        backpropagate(execution.state, loss * execution.scale)
        parameters = parameter_errors(model, reference, execution.scale)
    return FreeRun(arrival, loss.item(), parameters)


def _substitute(
    execution: Execution, visitor: Substitution, reference: Reference, settings: _Pass
) -> dict[str, TensorError]:
    """Run a batch with the reference's tensors at every boundary; return the parameters' errors."""
    model = execution.state.plain_model
    with _context(execution, settings.generators):
        with visited_modules(model, settings.names, visitor) as calls:
            calls.cross_loss(loss_of(execution.state, *settings.batch))
        return parameter_errors(model, reference, execution.scale)


@contextmanager
def _context(execution: Execution, generators: list[Tensor]) -> Iterator[None]:
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


def _network(
    execution: Execution, reference: Reference, arrival: Arrival, roundoffs: Roundoffs
) -> Network:
    """Return the facts about the compared model that its errors are judged by."""
    model = execution.state.plain_model
    widths, rows = _sizes(reference)
    return Network(
        kinds=_kinds(model, reference),
        owners=reference.owners,
        users=reference.users,
        dtypes={boundary: dtype_name(dtype) for boundary, dtype in arrival.dtypes.items()},
        parameter_dtypes={name: dtype_name(p.dtype) for name, p in model.named_parameters()},
        roundoffs=roundoffs,
        widths=widths,
        rows=rows,
        layers=_layers(model),
    )


def _kinds(model: nn.Module, reference: Reference) -> dict[str, str]:
    """Return the class of each called module, in the order of the first calls; the loss last."""
    modules = dict(model.named_modules())
    called = dict.fromkeys(name for name, _ in reference.generators)
    kinds = {}
    for name in called:
        module = modules.get("" if name == ROOT else name)
        kinds[name] = type(module).__name__ if module is not None else ""
    return {**kinds, LOSS: "loss"}


def _logits(
    reference: Reference, outputs: Mapping[Boundary, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the first output of more than one dimension in both executions: a model that returns
    its loss returns that first."""
    for boundary, output in outputs.items():
        wanted = reference.values.get(boundary)
        if wanted is not None and wanted.ndim > 1:
            return wanted, output
    return None


def _sizes(reference: Reference) -> tuple[dict[str, int], dict[str, int]]:
    """Return by module the most elements of an example, and the most rows, of its tensors."""
    widths: dict[str, int] = {}
    rows: dict[str, int] = {}
    for boundary, value in reference.values.items():
        width = value[0].numel() if value.ndim > 1 else 1
        height = value.numel() // max(value.shape[-1], 1) if value.ndim else 1
        for module in (reference.owners[boundary], reference.users[boundary]):
            widths[module] = max(widths.get(module, 1), width)
            rows[module] = max(rows.get(module, 1), height)
    return widths, rows


def _layers(model: nn.Module) -> frozenset[str]:
    """Return the names of the layers of torch.nn without modules of their own, and of converted
    layers."""
    names = []
    for name, module in model.named_modules():
        is_plain = type(module).__module__.startswith("torch.nn.")
        if is_converted(module) or (is_plain and next(module.children(), None) is None):
            names.append(name or ROOT)
    return frozenset(names)


def _joined_error(errors: Mapping[str, TensorError]) -> float:
    """Return the relative error of several tensors taken as one."""
    error = sum(found.error**2 for found in errors.values()) ** 0.5
    norm = sum(found.norm**2 for found in errors.values()) ** 0.5
    return error / norm if norm else 0.0
