"""One optimizer step: forward, backward, clipping, update.

Nothing here reads a value of the device, which would make the host wait for it: the values of a
step stay there until record_buffer.py copies a block of them.
"""

from collections.abc import Sequence
from itertools import chain
from math import nan
from time import perf_counter, time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.precision.casting import cast_nest
from runner.precision.loss_scale import HostFlag
from runner.training.records import DeviceStepRecord
from runner.training.sparse_gradients import coalesce_gradients, gradient_values
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.step_metrics import measure_step
from runner.training.tasks.task import labels_of
from runner.utils.tensors import widest_float

Batch = tuple[Any, Any]


def examples_in(batch: Batch) -> int:
    """Return the examples of a batch: the first dimension of its target, or of its inputs."""
    target = batch[1]
    first = target if isinstance(target, Tensor) else batch[0]
    return first.shape[0] if isinstance(first, Tensor) and first.ndim else 1  # len() costs 3 µs


def loss_of(state: TrainState, inputs: Any, target: Any) -> Tensor:
    """Return the mean loss of a micro-batch, computed under the precision's contexts and casts."""
    precision, task = state.precision, state.task
    with precision.forward(state.device):
        output = state.model(precision.cast(inputs))
        if precision.autocast_loss:
            return task.loss(output, precision.cast(target))
    dtype = precision.loss_dtype
    return task.loss(cast_nest(output, dtype), cast_nest(target, dtype))


def backpropagate(state: TrainState, loss: Tensor, weight: Tensor | None = None) -> None:
    """Add the gradients of a loss, times a weight, to those of the parameters.

    What the model computes again in the backward (activation checkpointing) is computed in the
    precision of its forward.
    """
    with state.precision.backward(state.device):
        loss.backward(weight)


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
    strategy = state.strategy
    sizes = sizes or [examples_in(micro) for micro in micros]
    if state.takes_closure:
        lr = state.optimizers[0].lr
        loss, norms, scale, found = _closure_step(state, micros, sizes)
    else:
        scale = state.scale.value
        loss = _backward(state, micros, sizes)
        grads = [strategy.local_shards(_grads(d)) for d in state.optimizers]
        founds = [strategy.reduce_found_inf(state.scale.unscale(part)) for part in grads]
        norms = _clip(state, grads[0] if len(grads) == 1 else [*chain(*grads)])
        for d in state.optimizers:
            if d.pending_found_inf is not None:
                d.advance_schedule()
        lr = state.optimizers[0].lr
        state.run_update_hook()
        _optimizer_step(state, founds)
        found = founds[0] if len(founds) == 1 else _any(founds)
    measured = measure_step(state)  # before the gradients are dropped
    for p in state.trainable_parameters:
        p.grad = None
    return DeviceStepRecord(
        state.step,
        int(time() * 1000),
        state.epoch,
        lr,
        perf_counter(),
        sum(sizes),
        loss,
        norms,
        scale,
        found,
        measured,
    )


def _backward(state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]) -> Tensor:
    """Accumulate the gradients of the mean over all labels and return that mean, detached.

    With several processes each returns a number of its own; their average is the mean.
    """
    if len(micros) == state.strategy.place.world_size == 1:
        loss = loss_of(state, *micros[0])
        backpropagate(state, state.scale.multiply(loss))
        total = loss.detach()
    else:
        total = _accumulate(state, micros, sizes)
    coalesce_gradients(state.sparse_gradient_parameters)
    for (
        p
    ) in state.complex_parameters:  # autograd leaves lazy conjugates, which optimizers cannot read
        p.grad = None if p.grad is None else p.grad.resolve_conj()
    return total


class _Shares(NamedTuple):
    """What the mean loss of each micro-batch is multiplied by; and bool [], whether no label of
    the whole step counts (None where examples are counted)."""

    each: Sequence[float | Tensor]
    none: Tensor | None


def _accumulate(state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]) -> Tensor:
    shares = _shares(state, micros, sizes)
    losses: list[Tensor] = []
    weights: list[Tensor] = []
    for i, (micro, share) in enumerate(zip(micros, shares.each, strict=True), 1):
        with state.strategy.accumulating(last=i == len(micros)):
            loss = loss_of(state, *micro)
            mean = loss.detach()
            weight = share.to(mean.dtype) if isinstance(share, Tensor) else mean.new_full((), share)
            backpropagate(state, state.scale.multiply(loss), weight)
        losses.append(mean)
        weights.append(weight)
    shown = torch.stack(weights)
    # A micro-batch without a label adds nothing: its mean is NaN.
    total = (torch.stack(losses) * shown).masked_fill(shown == 0, 0).sum()
    return total if shares.none is None else total.masked_fill(shares.none, nan)


def _shares(state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]) -> _Shares:
    """Return the share that each micro-batch has of the labels of the step, in all processes; of
    its examples where the task counts no labels. Labels are counted on the device.

    Gradients are averaged over the processes, so a share is multiplied by their number.
    """
    place = state.strategy.place
    examples = [place.examples(size) for size in sizes]
    counts = [labels_of(state.task, target) for _, target in micros]
    labels = [count for count in counts if count is not None]
    if len(labels) < len(counts):
        whole = sum(sizes)
        return _Shares([count * place.world_size / whole for count in examples], None)
    own = torch.stack(labels).to(widest_float(state.device))
    for i, count in enumerate(examples):
        if not count:
            own[i] = 0  # it got another process's example, only to have a batch
    total = own.sum()
    if place.world_size > 1:
        total = state.strategy.sum(total)
    none = total == 0
    return _Shares((own * place.world_size / total).masked_fill(none, 0).unbind(), none)


def _grads(scheduled: ScheduledOptimizer) -> list[Tensor]:
    return [gradient_values(p.grad) for p in scheduled.params if p.grad is not None]


def _clip(state: TrainState, grads: list[Tensor]) -> Tensor:
    """Clip the gradients and return the norm of each before that: [len(grads)].

    The norms are those of this process's shards. An overflow makes one infinite and never raises.
    """
    norms = grad_norms(grads)
    if state.clip_norm is not None:
        # What overflowed is skipped, and must not scale another optimizer's gradients to nought.
        total = torch.linalg.vector_norm(norms.nan_to_num(nan=0.0, posinf=0.0))
        total = state.strategy.reduce_norms(total)
        factor = (state.clip_norm / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor)
    return norms


_WIDE = ({torch.float32}, {torch.float64})


def grad_norms(grads: list[Tensor]) -> Tensor:
    """Return the 2-norm of each gradient, [len(grads)], accumulated in float32 at least.

    Raises:
        RuntimeError: no parameter received a gradient.
    """
    if not grads:
        raise RuntimeError("no parameter received a gradient: the loss does not depend on any")
    dtypes = {grad.dtype for grad in grads}
    if dtypes in _WIDE:
        return torch.stack(torch._foreach_norm(grads))
    double = bool(dtypes & {torch.float64, torch.complex128})
    wide = torch.float64 if double else torch.float32
    real = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
    return torch.stack(torch._foreach_norm(real, 2.0, dtype=wide))


def _optimizer_step(state: TrainState, founds: Sequence[Tensor | None]) -> None:
    for d, found in zip(state.optimizers, founds, strict=True):
        state.scale.step(d.optimizer, found)
        if d.scheduler is not None:
            if found is None:
                d.scheduler.step()
            else:
                d.pending_found_inf = HostFlag(found)
    state.scale.update(founds)


def _any(founds: Sequence[Tensor | None]) -> Tensor | None:
    flags = [flag for flag in founds if flag is not None]
    return torch.stack(flags).amax() if flags else None


def _closure_step(
    state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]
) -> tuple[Tensor, Tensor, None, None]:
    """Take a step of an optimizer that evaluates the loss itself; record its first evaluation."""
    scheduled = state.optimizers[0]
    first: list[tuple[Tensor, Tensor]] = []

    def closure() -> Tensor:
        for p in scheduled.params:
            p.grad = None
        loss = _backward(state, micros, sizes)
        if not first:
            first.append((loss, grad_norms(_grads(scheduled))))
        return loss

    state.run_update_hook()
    scheduled.optimizer.step(closure)  # type: ignore[arg-type]
    if scheduled.scheduler is not None:
        scheduled.scheduler.step()
    return (*first[0], None, None)
