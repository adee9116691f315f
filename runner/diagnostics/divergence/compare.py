"""Compare two executions of one model on one batch, module by module."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.core import Batch, Precision, backpropagate, loss_of, module_tape, module_tree
from runner.diagnostics.divergence.boundaries import (
    WRITTEN,
    Boundary,
    FunctionListener,
    comparable_modules,
    functions_are_seen,
    is_choice_of_experts,
    visited_modules,
)
from runner.diagnostics.divergence.findings import (
    ModuleErrors,
    Network,
    first_divergence,
    module_errors,
)
from runner.diagnostics.divergence.reference import (
    NarrowCode,
    Overwritten,
    Recorder,
    Reference,
    set_generator_states,
)
from runner.diagnostics.divergence.substitution import (
    Execution,
    PassErrors,
    Perturber,
    Substitution,
    find_roundoffs,
    narrow_dtype,
    other_weights,
    state_errors,
)
from runner.diagnostics.divergence.tensor_error import (
    LogProbabilityError,
    TensorError,
    log_probability_error,
    measure_error,
)
from runner.diagnostics.module_tensors import tensors_in
from runner.precision.layers.expert_weight import ExpertWeight
from runner.precision.layers.experts import stack_names
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
        step: number of the optimizer step whose forward and backward were compared.
        rows: a row for every module that computes something, in the order of the forward.
        losses: of the reference, and of the other execution.
        output_error: largest relative error of the model's outputs in a free execution; NaN where
            all are 0 in both.
        gradient_error: relative error of all parameters' gradients together, in a free execution;
            NaN likewise.
        log_probabilities: how far apart those of the targets are; None where the task predicts no
            class.
        scale: loss scale of the other execution.
        is_exact: whether both computed the same bits when they ran freely.
        same_format: whether both compute in the same precision.
        flips: by layer of experts, share of the tokens that go to other experts when the execution
            runs freely.
        uneven_calls: by module, how often the other execution and the reference call it, where
            that is not the same.
        other_weights: modules whose parameters differ by more than their formats' rounding.
    """

    step: int
    rows: list[ModuleErrors]
    losses: tuple[float, float]
    output_error: float
    gradient_error: float
    log_probabilities: LogProbabilityError | None
    scale: float
    is_exact: bool
    same_format: bool
    flips: dict[str, float]
    uneven_calls: dict[str, tuple[int, int]]
    other_weights: list[str]


class _Pass(NamedTuple):
    """What every pass over a model begins with.

    Attributes:
        execution: whose model computes; its buffers and its gradients are left as they were.
        batch: inputs and target on the device.
        generators: states that the random generators begin with.
        names: of the modules whose boundaries are visited; None for all whose calls can be seen.
    """

    execution: Execution
    batch: Batch
    generators: list[Tensor]
    names: Collection[str] | None = None

    @property
    def model(self) -> nn.Module:
        """Return the model."""
        return self.execution.state.plain_model

    def loss(self) -> Tensor:
        """Return the loss of the batch."""
        return loss_of(self.execution.state, *self.batch)

    def backpropagate(self, loss: Tensor) -> None:
        """Compute the gradients of the loss at the execution's loss scale."""
        backpropagate(self.execution.state, loss * self.execution.scale)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return the context of one forward and backward in training mode, from no gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        set_generator_states(self.generators, self.execution.device)
        module_tree.set_training(self.model)
        with self.execution.precision.session(self.model, self.execution.device):
            yield

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Return the context of one forward and backward, which leaves the model as it was."""
        with saved_state(self.execution.state), self.computing():
            yield


def record_reference(
    execution: Execution,
    batch: Batch,
    generators: list[Tensor],
    names: Collection[str] | None = None,
    receive: Callable[[Boundary, Tensor], None] | None = None,
) -> Reference:
    """Run the forward and backward of a batch, and record what crosses the modules' boundaries.

    See _Pass for the other arguments.

    Args:
        receive: is given the gradient at each boundary, times the loss scale, in place of the
            reference, which then holds none.
    """
    one = _Pass(execution, batch, generators, names)
    model = one.model
    if names is None:
        names = comparable_modules(model)
    # Copies at once where a module says that it overwrites its input, else where one does.
    overwrites = any(getattr(module, "inplace", False) for module in model.modules())
    for copies in (overwrites, True):
        recorder = Recorder(execution.device, copies, receive)
        narrow_code = NarrowCode(narrow_dtype(execution.precision))
        if functions_are_seen(model):
            recorder.reference.narrow_code = narrow_code
        with one.trial():
            with visited_modules(model, names, recorder, narrow_code) as calls:
                loss = calls.cross_loss(one.loss())
            one.backpropagate(loss)
            try:
                return recorder.finish(model, loss, execution.scale)
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
    model = execution.state.plain_model
    reference_model = reference_execution.state.plain_model
    names = comparable_modules(model) & comparable_modules(reference_model)
    first = _with_settled_scale(_Pass(reference_execution, batches[0], generators, names))
    second = _with_settled_scale(_Pass(execution, batches[1], generators, names))
    same_format = reference_execution.precision.name == execution.precision.name
    if not same_format:
        _settle_own_scales(second)
        _settle_own_scales(first)
    reference = recorded or record_reference(*first)
    free, free_errors = _run_freely(second, reference)
    own = module_tape.ROOT
    outputs = {
        b: error for b, error in free_errors.forward.items() if b.module == own and b.side == "out"
    }
    log_probabilities = _log_probabilities(second, reference, free, outputs)
    flips = _flips(model, reference, free)
    # Dtypes alone are read below: the passes to come need the memory.
    dtypes = {b: torch.empty(0, dtype=t.dtype, device="meta") for b, t in free.values.items()}
    free = replace(free, values=dtypes, parameter_gradients={})
    roundoffs = find_roundoffs(first.execution, second.execution, reference, free)
    copies = reference.writes_in_place or free.writes_in_place
    added = _added_errors(second, reference, copies)
    network = Network(second.execution, reference, free, added, roundoffs)
    rows: list[ModuleErrors] = []
    explained = PassErrors({}, {}, {}, {})
    # What rounding explains is measured in the reference's own execution.
    for draw in range(_KINK_DRAWS):
        perturber = Perturber(roundoffs, reference, first.execution.device, draw)
        with perturber.perturbed_parameters(reference_model):
            explained = explained.larger(_added_errors(first, reference, copies, perturber))
        rows = module_errors(network, free_errors, added, explained)
        divergence = first_divergence(rows)
        if divergence is None or divergence.added.found.peak < _KINK_PEAK:
            break
    rows = _with_operation(rows, (first, second), reference)
    every_error = [error for errors in free_errors for error in errors.values()]
    return BatchComparison(
        reference_execution.state.step + 1,
        rows,
        (reference.loss, free.loss),
        max((one.relative for one in outputs.values() if one.norm or one.error), default=math.nan),
        _joined_error([*free_errors.gradients.values()]),
        log_probabilities,
        second.execution.scale,
        not any(error.error or error.nonfinite for error in every_error),
        same_format,
        flips,
        _uneven_calls(reference, free),
        other_weights(model, reference_model),
    )


def _run_freely(one: _Pass, reference: Reference) -> tuple[Reference, PassErrors]:
    """Return what a free execution computes, without gradients at boundaries, and its errors."""
    gradient_errors: dict[Boundary, TensorError] = {}

    def compare_gradient(boundary: Boundary, gradient: Tensor) -> None:
        # Compared as it arrives, so that the gradients of two executions are never held at once.
        expected = reference.gradients.get(boundary)
        if expected is not None:
            gradient_errors[boundary] = measure_error(gradient, expected, one.execution.scale)

    free = record_reference(*one, receive=compare_gradient)
    errors = _tensor_errors(free.values, reference.values)
    state = state_errors(one.model, reference, free.parameter_gradients, free.buffers)
    return free, PassErrors(errors, gradient_errors, *state)


def _tensor_errors(
    tensors: Mapping[Boundary, Tensor], expected: Mapping[Boundary, Tensor]
) -> dict[Boundary, TensorError]:
    """Return the errors of the tensors, or of the gradients, of a free execution."""
    errors = {}
    # What modules only pass on in both executions is measured once.
    measured: dict[tuple[int, int], TensorError] = {}
    for boundary, other in expected.items():
        tensor = tensors.get(boundary)
        if tensor is None and boundary.side == WRITTEN:
            # The reference alone writes into this input.
            tensor = tensors.get(boundary._replace(side="in"))
        if tensor is not None:
            pair = (id(tensor), id(other))
            if pair not in measured:
                measured[pair] = measure_error(tensor, other)
            errors[boundary] = measured[pair]
    return errors


def _uneven_calls(reference: Reference, free: Reference) -> dict[str, tuple[int, int]]:
    """Return how often both call a module where that is not the same, in the reference's order."""
    counts = Counter(module for module, _ in free.generators)
    expected = Counter(module for module, _ in reference.generators)
    calls = {name: (counts[name], expected[name]) for name in {**expected, **counts}}
    return {name: pair for name, pair in calls.items() if pair[0] != pair[1]}


def _flips(model: nn.Module, reference: Reference, free: Reference) -> dict[str, float]:
    """Return by layer of experts, in its first call, the share of the tokens that go to other
    experts in a free execution than in the reference."""
    layers = {name.rpartition(".")[0] or module_tape.ROOT for name in stack_names(model)}
    flips = {}
    for boundary, chosen in free.values.items():
        expected = reference.values.get(boundary)
        if expected is None or boundary.module not in layers or boundary.call > 0:
            continue
        if is_choice_of_experts(boundary, chosen) and chosen.shape == expected.shape:
            # A set of experts: their order changes nothing.
            flipped = chosen.sort(-1).values != expected.to(chosen.device).sort(-1).values
            flips[boundary.module] = flipped.any(-1).float().mean().item()
    return flips


def _added_errors(
    one: _Pass,
    reference: Reference,
    copies: bool,
    perturber: Perturber | None = None,
    listeners: Sequence[FunctionListener] = (),
) -> PassErrors:
    """Return the errors of what each module computes from the reference's tensors; see
    Substitution for the arguments."""
    execution, model = one.execution, one.model
    visitor = Substitution(reference, execution, copies, perturber)
    with one.trial():
        with visited_modules(model, one.names or (), visitor, *listeners) as calls:
            calls.cross_loss(one.loss())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        buffers = dict(model.named_buffers())
        state = state_errors(model, reference, gradients, buffers, execution.scale)
        return PassErrors(visitor.forward, visitor.backward, *state)


def _with_operation(
    rows: list[ModuleErrors], passes: tuple[_Pass, _Pass], reference: Reference
) -> list[ModuleErrors]:
    """Return the rows with the operation in which the first divergence begins, where that is in
    the forward of a module's own code: both executions run once more for it."""
    first = first_divergence(rows)
    if first is None or first.is_backward:
        return rows
    module = first.row.module
    traces: list[list[tuple[str, Tensor]]] = []
    for one in passes:
        traces.append([])
        listener = partial(_record, module, traces[-1])
        _added_errors(one, reference, copies=True, listeners=[listener])
    name = ""
    error = first.added.found.relative
    for (operation, expected), (other, result) in zip(*traces, strict=False):
        if operation != other or result.shape != expected.shape:
            break  # the two run other operations
        measured = measure_error(result, expected)
        # The first one that is not finite where the reference is, or off by half the error.
        if measured.nonfinite or measured.relative > error / 2 > 0:
            name = operation
            break
    added = replace(first.added, operation=name)
    return [replace(row, added=added) if row.module == module else row for row in rows]


def _record(
    module: str, trace: list[tuple[str, Tensor]], running: str, name: str, _: Any, result: Any
) -> None:
    """Record the floating tensors that a function of torch returns in one module's own code."""
    if running == module:
        for tensor in tensors_in(result):
            if not isinstance(tensor, ExpertWeight) and tensor.is_floating_point():
                trace.append((name, tensor.detach()))


def _settle_own_scales(one: _Pass) -> None:
    """Let a precision that scales by past steps, and has seen none, see the batch once: its first
    scales of 1 would lose what later ones keep."""
    precision = one.execution.precision
    has_state = type(precision).state_dict is not Precision.state_dict
    if has_state and not precision.state_dict(one.model):
        with one.computing():
            one.backpropagate(one.loss())


def _with_settled_scale(one: _Pass) -> _Pass:
    """Return the pass at a loss scale at which no gradient overflows, as a run's loss scale is
    after its first steps; at its own, where none does."""
    settled = one
    while settled.execution.scale > 1.0:
        with settled.trial():
            settled.backpropagate(settled.loss())
            gradients = [p.grad for p in one.model.parameters() if p.grad is not None]
            if all(gradient.isfinite().all() for gradient in gradients):
                return settled
        execution = settled.execution
        settled = settled._replace(execution=replace(execution, scale=execution.scale / 2))
    return one


def _joined_error(errors: Sequence[TensorError]) -> float:
    """Return the relative error of several tensors taken as one."""
    error = sum(one.error**2 for one in errors) ** 0.5
    norm = sum(one.norm**2 for one in errors) ** 0.5
    return error / norm if norm else math.nan


def _log_probabilities(
    one: _Pass, reference: Reference, free: Reference, outputs: Iterable[Boundary]
) -> LogProbabilityError | None:
    """Return how far apart the targets' log-probabilities are, by the first output of more than
    one dimension: a model that returns its loss returns that first."""
    for boundary in outputs:
        expected = reference.values[boundary]
        if expected.ndim > 1 and expected.is_floating_point():
            logits = (expected, free.values[boundary])
            return log_probability_error(one.execution.state.task, logits, one.batch[1])
    return None
