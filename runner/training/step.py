"""One optimizer step: forward, backward, clipping, update.

Nothing here reads a value on the device (`item()`, `float()`, `if tensor:`): the host would wait
for the device in every step, and the device for the host's next launch. The values of a step stay
on the device until record_buffer.py copies a block of them.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import nan
from time import perf_counter, time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from runner.data.batch_layout import Batch
from runner.precision.casting import cast_nest
from runner.precision.gradients import (
    clip_elements,
    coalesce_gradients,
    grad_norms,
    gradient_values,
    scale_to_norm,
    total_norm,
)
from runner.precision.loss_scale import HostFlag
from runner.training.loss_terms import (
    NO_TERMS,
    note_names,
    recorded_terms,
    split_loss,
    weighted_terms,
)
from runner.training.model_call import call_model
from runner.training.records import DeviceStepRecord
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.step_metrics import measure_step
from runner.training.tasks.task import labels_of
from runner.utils.tensors import widest_float


def examples_in(batch: Batch) -> int:
    """Return the examples of a batch: the first dimension of its target, or else of its inputs.

    A target that is a list has one member for each example. A batch that holds a tensor in neither
    place counts as one example.
    """
    inputs, target = batch
    if isinstance(target, list):
        return len(target)
    counted = target if isinstance(target, Tensor) else _first_tensor(inputs)
    if counted is None or counted.ndim == 0:
        return 1
    return counted.shape[0]  # len() of a tensor costs 3 µs more, in every step


def _first_tensor(nest: Any) -> Tensor | None:
    if isinstance(nest, Tensor):
        return nest
    return next((leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)), None)


def loss_of(state: TrainState, inputs: Any, target: Any) -> Tensor:
    """Return the mean loss of a micro-batch, computed under the precision's contexts and casts."""
    return _loss_and_terms(state, inputs, target)[0]


def _loss_and_terms(
    state: TrainState, inputs: Any, target: Any
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the mean loss of a micro-batch and the further values that the task returns."""
    precision = state.precision
    task = state.task
    with precision.forward(state.device):
        output = call_model(state.model, precision.cast(inputs))
        # Within these contexts autocast chooses the dtypes of the loss, too.
        if precision.autocast_loss:
            return split_loss(task.loss(output, precision.cast(target)), task)
    dtype = precision.loss_dtype
    return split_loss(task.loss(cast_nest(output, dtype), cast_nest(target, dtype)), task)


def backpropagate(state: TrainState, loss: Tensor, weight: Tensor | None = None) -> None:
    """Add the gradients of a loss, times a weight, to those of the parameters.

    Args:
        state: its parameters' gradients are changed.
        loss: scalar, already multiplied by the loss scale.
        weight: scalar in the dtype of the loss; None for 1.
    """
    # Activation checkpointing computes forwards again here, in the precision of the first ones.
    with state.precision.backward(state.device):
        loss.backward(weight)


class StepMean(NamedTuple):
    """The mean loss of a step over its labels, and those of the task's further values; detached."""

    loss: Tensor
    terms: Mapping[str, Tensor]


def compute_gradients(state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]) -> StepMean:
    """Accumulate the gradients of the mean over all labels and return that mean, detached.

    With several processes each returns a number of its own; their average is the mean.
    """
    # One micro-batch in one process needs no weights: its loss is the mean already. This common
    # case skips the kernels that count labels.
    if len(micros) == state.strategy.place.world_size == 1:
        loss, terms = _loss_and_terms(state, *micros[0])
        note_names(state, terms)
        backpropagate(state, state.scale.multiply(loss))
        total = StepMean(loss.detach(), terms)
    else:
        total = _accumulate(state, micros, sizes)
    coalesce_gradients(state.sparse_gradient_parameters)
    # Autograd leaves lazy conjugates in complex gradients, which optimizers cannot read.
    for p in state.complex_parameters:
        if p.grad is not None:
            p.grad = p.grad.resolve_conj()
    return total


def train_step(
    state: TrainState, micros: Sequence[Batch], sizes: Sequence[int] | None = None
) -> DeviceStepRecord:
    """Train on the micro-batches of one step; gradients add up to those of one large batch.

    Args:
        state: changed in place.
        micros: this process's part of each.
        sizes: their examples in all processes; None where there is one.
    """
    state.step += 1
    sizes = sizes or [examples_in(micro) for micro in micros]
    if state.takes_closure:
        values = _closure_step(state, micros, sizes)
    else:
        values = _plain_step(state, micros, sizes)
    measured = measure_step(state)  # before the gradients are dropped
    if values.terms:
        measured = {**measured, **recorded_terms(values.terms)}
    # None and not zero: the next backward then writes the gradients instead of adding to them.
    for p in state.trainable_parameters:
        p.grad = None
    return DeviceStepRecord(
        state.step,
        int(time() * 1000),
        state.epoch,
        values.lr,
        perf_counter(),
        sum(sizes),
        values.loss,
        values.norms,
        values.scale,
        values.found_inf,
        measured,
        values.rates,
    )


class _StepValues(NamedTuple):
    """What a step computes for its record; see DeviceStepRecord."""

    lr: float
    loss: Tensor
    norms: Tensor
    scale: Tensor | None
    found_inf: Tensor | None
    rates: Mapping[str, float]
    terms: Mapping[str, Tensor] = NO_TERMS


def _plain_step(state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]) -> _StepValues:
    """Take a step of optimizers that use gradients alone."""
    strategy = state.strategy
    scale = state.scale.value  # in force in this step; the update at its end may change it
    mean = compute_gradients(state, micros, sizes)
    grads = [strategy.local_shards(_gradients(scheduled)) for scheduled in state.optimizers]
    # Unscaled first, in place: the norms that are clipped and recorded are the gradients' own. A
    # flag per optimizer, and over all processes, which must skip a step together.
    found_infs = [strategy.reduce_found_inf(state.scale.unscale(part)) for part in grads]
    every_grad = grads[0] if len(grads) == 1 else [*chain(*grads)]
    norms = _clip(state, every_grad)
    # The schedule of the step before waits for its found-inf flag until here, where the device has
    # long passed it. It must advance before the learning rate is recorded and used.
    for scheduled in state.optimizers:
        if scheduled.pending_found_inf is not None:
            scheduled.advance_schedule()
    lr = state.optimizers[0].lr
    rates = state.named_rates()
    state.run_update_hook()
    _optimizer_step(state, found_infs)
    found_inf = found_infs[0] if len(found_infs) == 1 else _any_found_inf(found_infs)
    return _StepValues(lr, mean.loss, norms, scale, found_inf, rates, mean.terms)


class _Weights(NamedTuple):
    """How the micro-batches of a step are weighed.

    Attributes:
        factors: what the mean loss of each micro-batch is multiplied by.
        no_label_counts: bool [], whether no label of the whole step counts; None where examples are
            counted and not labels.
    """

    factors: Sequence[float | Tensor]
    no_label_counts: Tensor | None


def _accumulate(state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]) -> StepMean:
    weighing = _weights(state, micros, sizes)
    losses: list[Tensor] = []
    weights: list[Tensor] = []
    parts: list[Mapping[str, Tensor]] = []
    for i, (micro, factor) in enumerate(zip(micros, weighing.factors, strict=True), 1):
        with state.strategy.accumulating(last=i == len(micros)):
            loss, terms = _loss_and_terms(state, *micro)
            note_names(state, terms)
            mean = loss.detach()
            if isinstance(factor, Tensor):
                weight = factor.to(mean.dtype)
            else:
                weight = mean.new_full((), factor)
            backpropagate(state, state.scale.multiply(loss), weight)
        losses.append(mean)
        weights.append(weight)
        parts.append(terms)
    stacked = torch.stack(weights)
    # A micro-batch without a label adds nothing: its mean is NaN, and NaN times 0 is NaN.
    total = (torch.stack(losses) * stacked).masked_fill(stacked == 0, 0).sum()
    means = weighted_terms(parts, stacked, weighing.no_label_counts)
    if weighing.no_label_counts is None:
        return StepMean(total, means)
    # A step without any label has no mean; a loss of 0 would look like a perfect model.
    return StepMean(total.masked_fill(weighing.no_label_counts, nan), means)


def _weights(state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]) -> _Weights:
    """Return the share that each micro-batch has of the labels of the step, in all processes; of
    its examples where the task counts no labels. Labels are counted on the device.
    """
    place = state.strategy.place
    examples = [place.batch_share(size) for size in sizes]
    counts = [labels_of(state.task, target) for _, target in micros]
    labels = [count for count in counts if count is not None]
    # Strategies average the gradients over the processes, where a sum is wanted: hence the factor
    # world_size in both cases.
    if len(labels) < len(counts):
        all_examples = sum(sizes)
        return _Weights([count * place.world_size / all_examples for count in examples], None)
    own = torch.stack(labels).to(widest_float(state.device))
    for i, count in enumerate(examples):
        # A process without an example of a micro-batch got another process's, only to have a batch.
        if count == 0:
            own[i] = 0
    total = own.sum()
    if place.world_size > 1:
        total = state.strategy.sum(total)
    no_label_counts = total == 0
    factors = (own * place.world_size / total).masked_fill(no_label_counts, 0).unbind()
    return _Weights(factors, no_label_counts)


def _gradients(scheduled: ScheduledOptimizer) -> list[Tensor]:
    # Sparse gradients are worked on by their values, which share the gradients' memory.
    return [gradient_values(p.grad) for p in scheduled.params if p.grad is not None]


def _clip(state: TrainState, grads: list[Tensor]) -> Tensor:
    """Clip the gradients and return the norm of each before that: [len(grads)].

    The norms are those of this process's shards. An overflow makes one infinite and never raises.
    """
    norms = grad_norms(grads)
    if state.clip_value is not None:
        clip_elements(grads, state.clip_value)
    if state.clip_norm is None:
        return norms
    total = state.strategy.reduce_norms(total_norm(norms))
    scale_to_norm(grads, total, state.clip_norm)
    return norms


def _optimizer_step(state: TrainState, found_infs: Sequence[Tensor | None]) -> None:
    for scheduled, found_inf in zip(state.optimizers, found_infs, strict=True):
        state.scale.step(scheduled.optimizer, found_inf)
        if scheduled.scheduler is None:
            continue
        # Without a flag the step was applied for certain. With one the schedule waits for the flag,
        # which is copied to the host in the background.
        if found_inf is None:
            scheduled.scheduler.step()
        else:
            scheduled.pending_found_inf = HostFlag(found_inf)
    if state.average is not None:
        state.average.update(found_infs)
    # One scale for all optimizers, so it changes once, after the last of them has used it.
    state.scale.update(found_infs)


def _any_found_inf(found_infs: Sequence[Tensor | None]) -> Tensor | None:
    flags = [flag for flag in found_infs if flag is not None]
    return torch.stack(flags).amax() if flags else None


def _closure_step(state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]) -> _StepValues:
    """Take a step of an optimizer that evaluates the loss itself; record its first evaluation."""
    scheduled = state.optimizers[0]
    lr = scheduled.lr
    first: list[tuple[StepMean, Tensor]] = []

    def closure() -> Tensor:
        for p in scheduled.params:
            p.grad = None
        mean = compute_gradients(state, micros, sizes)
        # Later evaluations are at points of the line search, not at the weights of this step.
        if not first:
            first.append((mean, grad_norms(_gradients(scheduled))))
        return mean.loss

    state.run_update_hook()
    scheduled.optimizer.step(closure)  # type: ignore[arg-type]
    if scheduled.scheduler is not None:
        scheduled.scheduler.step()
    if state.average is not None:
        state.average.update([None])
    mean, norms = first[0]
    return _StepValues(lr, mean.loss, norms, None, None, {}, mean.terms)
