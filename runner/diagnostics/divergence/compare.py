"""Compare two executions of one model on one batch, module by module."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from runner.core import Batch, Precision, backpropagate, loss_of, module_tree
from runner.diagnostics.divergence.boundaries import (
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
    ComparingVisitor,
    PassErrors,
    Substitution,
    other_weights,
    pass_errors,
)
from runner.diagnostics.divergence.reference import (
    NarrowCode,
    Overwritten,
    Recorder,
    Reference,
    set_generator_states,
)
from runner.diagnostics.divergence.roundoffs import (
    Execution,
    Perturber,
    find_roundoffs,
    narrow_dtype,
)
from runner.diagnostics.divergence.tensor_error import TensorError, measure_error
from runner.precision.layers.expert_weight import ExpertWeight
from runner.training.own_state import saved_state

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
        output_error: largest relative error of the model's outputs in a free execution; NaN where
            all are 0 in both.
        gradient_error: relative error of all parameters' gradients together, in a free execution;
            NaN likewise.
        outputs: what the model returned in each; None where it is no floating tensor.
        scale: loss scale of the other execution.
        is_exact: whether both computed the same bits when they ran freely.
        same_format: whether both compute in the same precision.
        flips: by layer of experts, share of the tokens that go to other experts when the execution
            runs freely.
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
    flips: dict[str, float]
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
    # Copies at once where a module says that it overwrites its input, else where one does.
    overwrites = any(getattr(module, "inplace", False) for module in model.modules())
    for copies in (overwrites, True):
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
    arrival = Arrival(reference, execution)
    narrow_code = NarrowCode(narrow_dtype(execution.precision))
    free, loss = _run(arrival, second, narrow_code)
    # Nothing is noted where functions are not seen.
    noted = narrow_code if functions_are_seen(execution.state.plain_model) else None
    roundoffs = find_roundoffs(reference_execution, execution, reference, arrival.dtypes, noted)
    copies = reference.writes_in_place or arrival.writes_in_place
    added, _ = _run(Substitution(reference, execution, copies), second)
    network = build_network(execution, reference, arrival, added, roundoffs)
    rows: list[ModuleErrors] = []
    explained = PassErrors({}, {}, {}, {})
    # What rounding explains is measured in the reference's own execution.
    for draw in range(_KINK_DRAWS):
        perturber = Perturber(roundoffs, reference, reference_execution.device, draw)
        visitor = Substitution(reference, reference_execution, copies, perturber)
        with perturber.perturbed_parameters(reference_execution.state.plain_model):
            drawn, _ = _run(visitor, first)
        explained = explained.larger(drawn)
        rows = module_errors(network, free, added, explained)
        divergence = first_divergence(rows)
        if divergence is None or divergence.added.found.peak < _KINK_PEAK:
            break
    rows = _with_operation(rows, (reference_execution, execution), reference, (first, second))
    outputs = arrival.outputs
    output_errors = [free.forward[b] for b in outputs if b in free.forward]
    # In the order of the reference.
    counts = Counter(module for module, _ in arrival.calls)
    expected = Counter(module for module, _ in reference.generators)
    calls = {name: (counts[name], expected[name]) for name in {**expected, **counts}}
    every_error = [error for errors in free for error in errors.values()]
    return BatchComparison(
        rows,
        (reference.loss, loss),
        max((one.relative for one in output_errors if one.norm or one.error), default=math.nan),
        _joined_error([*free.gradients.values()]),
        _logits(reference, outputs),
        execution.scale,
        not any(error.error or error.nonfinite for error in every_error),
        reference_execution.precision.name == execution.precision.name,
        arrival.flips,
        {name: pair for name, pair in calls.items() if pair[0] != pair[1]},
        other_weights(execution.state.plain_model, reference_execution.state.plain_model),
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
        trace: list[tuple[str, Tensor]] = []
        _run(Substitution(reference, execution, copies=True), one, partial(_record, module, trace))
        traces.append(trace)
    name = _first_different_operation(traces[1], traces[0], first.added.found.relative)
    added = replace(first.added, operation=name)
    return [replace(row, added=added) if row.module == module else row for row in rows]


def _record(
    module: str, trace: list[tuple[str, Tensor]], running: str, name: str, _: Any, result: Any
) -> None:
    """Record the floating tensors that a function of torch returns in one module's own code."""
    if running == module:
        for leaf in tree_leaves(result):
            has_numbers = isinstance(leaf, Tensor) and not isinstance(leaf, ExpertWeight)
            if has_numbers and leaf.is_floating_point():
                trace.append((name, leaf.detach()))


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


def _run(
    visitor: ComparingVisitor, one: _Pass, *listeners: FunctionListener
) -> tuple[PassErrors, float]:
    """Run a batch past a visitor; return all errors, and the loss."""
    execution = visitor.execution
    model = execution.state.plain_model
    with _trial_run(execution, one.generators):
        with visited_modules(model, one.names, visitor, *listeners) as calls:
            loss = calls.cross_loss(loss_of(execution.state, *one.batch))
        # A substitution computes the backward of each call at the call's end.
        if isinstance(visitor, Arrival):
            backpropagate(execution.state, loss * execution.scale)
        return pass_errors(visitor), loss.item()


@contextmanager
def _trial_run(execution: Execution, generators: list[Tensor]) -> Iterator[None]:
    """Return the context of one forward and backward, which leaves the model as it was."""
    with saved_state(execution.state), _computing(execution, generators):
        yield


@contextmanager
def _computing(execution: Execution, generators: list[Tensor]) -> Iterator[None]:
    """Return the context of one forward and backward in training mode, from no gradients."""
    model = execution.state.plain_model
    for parameter in model.parameters():
        parameter.grad = None
    set_generator_states(generators, execution.device)
    module_tree.set_training(model)
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


def _joined_error(errors: Sequence[TensorError]) -> float:
    """Return the relative error of several tensors taken as one."""
    error = sum(one.error**2 for one in errors) ** 0.5
    norm = sum(one.norm**2 for one in errors) ** 0.5
    return error / norm if norm else math.nan


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
