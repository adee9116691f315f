"""One optimizer step: forward, backward, clipping, update.

Nothing here reads a value on the device (`item()`, `float()`, `if tensor:`): the host would wait
for the device in every step, and the device for the host's next launch. The values of a step stay
on the device until RecordBuffer copies a block of them.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import nan
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from runner.core.base.errors import ConfigError
from runner.core.base.fmt import now_ms
from runner.core.base.tensor_facts import cast_gradients, widest_float
from runner.core.loop.batch_layout import Batch, examples_in
from runner.core.loop.model_call import call_model
from runner.core.loop.step_records import TERM_PREFIX, DeviceStepRecord, measure_step
from runner.core.loop.train_state import TrainState
from runner.core.policy.gradients import (
    any_found_inf,
    clip_gradients,
    finish_gradients,
    grad_norms,
    gradients_of,
    round_gradients,
)

Terms = Mapping[str, Tensor]
"""What a task returns beside its loss, and records by these names: detached scalars."""


def train_step(
    state: TrainState, micros: Sequence[Batch], sizes: Sequence[int] | None = None
) -> DeviceStepRecord:
    """Train on the micro-batches of one step; gradients add up to those of one large batch.

    Args:
        state: changed in place.
        micros: this process's part of each.
        sizes: their examples in all processes; None where there is one.

    Returns:
        The step's values. The loss is the mean over all labels of the step; with several processes
        each has a number of its own, and their average is the mean.
    """
    state.step += 1
    strategy = state.strategy
    examples = sizes or [examples_in(micro) for micro in micros]
    scale = state.scale.value  # in force in this step; the update at its end may change it
    state.hooks.begin(state.step)

    def backward() -> tuple[Tensor, Terms]:
        shares, no_label_counts = micro_batch_shares(state, micros, examples)
        losses, weights, terms = [], [], []
        # The optimizers step outside of it: what they write is no write of a forward.
        with state.hooks.around_forwards():
            for i, (inputs, target) in enumerate(micros):
                # In 16 bits, each further one would lose half a unit in the last place of the sum.
                if i == 1:
                    cast_gradients(state.widened, torch.float32)
                # The last backward of a step reduces the gradients over the processes.
                with strategy.accumulating(last=i == len(micros) - 1):
                    loss, further = loss_and_terms(state, inputs, target, examples[i])
                    weight = None if shares is None else _scalar_like(loss, shares[i])
                    backpropagate(state, state.scale.multiply(loss), weight)
                losses.append(loss.detach())
                weights.append(weight)
                terms.append(further)
        finish_gradients([*state.sparse_gradient_parameters, *state.complex_parameters])
        # The loss of one micro-batch in one process is the mean already.
        if shares is None:
            return losses[0], terms[0]
        return _step_means(losses, terms, torch.stack(weights), no_label_counts)

    if state.takes_closure:
        found_infs: list[Tensor | None] = [None]
        lr, rates = state.optimizers[0].lr, state.named_rates()
        loss, terms, norms = _step_with_closure(state, backward, len(micros) > 1)
    else:
        loss, terms = backward()
        grads = [strategy.local_shards(gradients_of(part.params)) for part in state.optimizers]
        # Unscaled first, in place: the norms that are clipped and recorded are the gradients' own.
        # A flag per optimizer, and over all processes, which must skip a step together.
        found_infs = [strategy.reduce_found_inf(state.scale.unscale(part)) for part in grads]
        # The norms of this process's shards.
        every = [*chain(*grads)]
        norms = clip_gradients(every, state.clip_norm, state.clip_value, strategy.reduce_norms)
        # The schedule of the step before waits for its found-inf flag until here, where the device
        # has long passed it. It must advance before the learning rate is recorded and used.
        for part in state.optimizers:
            part.advance_schedule()
        lr, rates = state.optimizers[0].lr, state.named_rates()
        state.hooks.before_update()
        optimizers = [part.optimizer for part in state.optimizers]
        if len(micros) > 1:
            round_gradients(optimizers, state.widened)
        # Optimizers whose gradients overflowed skip the step; then the scale grows or backs off.
        state.scale.step_all(optimizers, found_infs)
    state.hooks.end(found_infs)
    for part, found_inf in zip(state.optimizers, found_infs, strict=True):
        part.end_step(found_inf)
    measured = measure_step(state)  # before the gradients are dropped
    for name, value in terms.items():
        measured[f"{TERM_PREFIX}{name}"] = value
    # They are dropped, not zeroed: the next backward then writes gradients, and adds to none.
    for p in state.trainable_parameters:
        p.grad = None
    return DeviceStepRecord(
        step=state.step,
        time_ms=now_ms(),
        epoch=state.epoch,
        lr=lr,
        ended_at=perf_counter(),
        examples=sum(examples),
        loss=loss,
        norms=norms,
        scale=scale,
        found_inf=any_found_inf(found_infs),
        measured=measured,
        rates=rates,
    )


def _step_with_closure(
    state: TrainState, backward: Callable[[], tuple[Tensor, Terms]], is_summed: bool
) -> tuple[Tensor, Terms, Tensor]:
    """Take a step of an optimizer that evaluates the loss by itself, as LBFGS and SAM do.

    Args:
        state: of one optimizer, without a loss scale and without clipping.
        backward: computes the gradients, and returns the loss and the further values.
        is_summed: the gradients are those of several micro-batches.

    Returns:
        The loss, the further values and the norms of the gradients of the first evaluation: later
        ones are at points of the line search, not at the weights of this step.
    """
    scheduled = state.optimizers[0]
    evaluations: list[tuple[Tensor, Terms, Tensor]] = []

    def closure() -> Tensor:
        for p in scheduled.params:
            p.grad = None
        loss, terms = backward()
        if not evaluations:
            evaluations.append((loss, terms, grad_norms(gradients_of(scheduled.params))))
        if is_summed:
            round_gradients([scheduled.optimizer], state.widened)
        return loss

    if scheduled.reads_gradients:
        closure()
    state.hooks.before_update()
    scheduled.optimizer.step(closure)  # type: ignore[arg-type]
    return evaluations[0]


def loss_of(state: TrainState, inputs: Any, target: Any) -> Tensor:
    """Return the mean loss of a micro-batch, computed under the precision's contexts and casts."""
    return loss_and_terms(state, inputs, target)[0]


def loss_and_terms(
    state: TrainState, inputs: Any, target: Any, size: int | None = None
) -> tuple[Tensor, Terms]:
    """Return the mean loss of a micro-batch and the further values that are recorded with it.

    Args:
        state: its model is called.
        inputs: of this process's share of the micro-batch.
        target: of this share.
        size: examples of the micro-batch in all processes, which join them where the task's loss
            is of the batch as a whole; None for a loss of this share alone.
    """
    precision = state.precision
    with precision.forward(state.device, state.plan):
        output = call_model(state.model, state.cast(inputs))
        # Within this context autocast chooses the dtypes of the loss, too.
        if precision.autocast_loss:
            return _task_loss(state, output, precision.cast_target(target), size)
    return _task_loss(state, *precision.loss_pair(output, target), size)


def _task_loss(
    state: TrainState, output: Any, target: Any, size: int | None
) -> tuple[Tensor, Terms]:
    """Return the loss of a model's output and the further values; see loss_and_terms."""
    task = state.task
    if task.whole_batch and size is not None and state.strategy.rank.world_size > 1:
        output, target = join_batch(state, output, target, size)
    # The names and the kinds of what a task returns are checked with the first batch and in the
    # first step, see diagnostics/data_checks.py.
    returned = task.loss(output, target)
    loss, terms = returned if isinstance(returned, tuple) else (returned, {})
    # What has no gradient is no part of a loss that is minimised, but a value to look at.
    added = {
        name: value for name, value in task.added_losses(output).items() if value.requires_grad
    }
    if added:
        terms = {"main_loss": loss, **added, **terms}
    for name, value in added.items():
        if name not in state.loss_weights:
            state.loss_weights[name] = added_loss_weight(state.plain_model, name)
        loss = loss + state.loss_weights[name] * value.reshape(()).to(loss.dtype)
    return loss, {name: value.detach().reshape(()) for name, value in terms.items()}


def backpropagate(state: TrainState, loss: Tensor, weight: Tensor | None = None) -> None:
    """Add the gradients of a loss, times a weight, to those of the parameters.

    Args:
        state: its parameters' gradients are changed.
        loss: scalar, already multiplied by the loss scale.
        weight: scalar in the dtype of the loss; None for 1.
    """
    # Activation checkpointing computes forwards again here, in the precision of the first ones.
    with state.precision.backward(state.device, state.plan):
        loss.backward(weight)


def micro_batch_shares(
    state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]
) -> tuple[Sequence[float | Tensor] | None, Tensor | None]:
    """Return how the micro-batches of a step are weighed. Labels are counted on the device.

    Returns:
        The share that each has of the labels of the step in all processes, and bool [], whether no
        label of the whole step counts. Where the task counts no labels, the shares are those of the
        examples, and the flag is None. Both are None for the only micro-batch of one process, so
        that this common case skips the kernels that count labels.
    """
    rank = state.strategy.rank
    if len(micros) == rank.world_size == 1:
        return None, None
    if state.task.whole_batch:
        return [1.0] * len(micros), None  # the loss of every process is that of the whole batch
    examples = [rank.batch_share(size) for size in sizes]
    counts = [state.task.labels(target) for _, target in micros]
    labels = [count for count in counts if count is not None]
    # Strategies average the gradients over the processes, where a sum is wanted: hence the factor
    # world_size in both cases.
    if len(labels) < len(counts):
        all_examples = sum(sizes)
        return [count * rank.world_size / all_examples for count in examples], None
    own = torch.stack(labels).to(widest_float(state.device))
    for i, count in enumerate(examples):
        # A process without an example of a micro-batch got another process's, only to have a batch.
        if count == 0:
            own[i] = 0
    total = own.sum()
    if rank.world_size > 1:
        total = state.strategy.sum(total)
    no_label_counts = total == 0
    shares = (own * rank.world_size / total).masked_fill(no_label_counts, 0).unbind()
    return shares, no_label_counts


def _scalar_like(loss: Tensor, value: float | Tensor) -> Tensor:
    """Return a number as a scalar of a loss's dtype and device, without a wait for the device."""
    if isinstance(value, Tensor):
        return value.to(loss.dtype)
    return loss.new_full((), value)


def _step_means(
    losses: Sequence[Tensor],
    terms: Sequence[Terms],
    weights: Tensor,
    no_label_counts: Tensor | None,
) -> tuple[Tensor, Terms]:
    """Return the means over a step of the losses and further values of its micro-batches.

    Args:
        losses: of the micro-batches, scalars.
        terms: their further values.
        weights: of the micro-batches, [micro-batches].
        no_label_counts: bool [], see micro_batch_shares.

    Raises:
        KeyError: a micro-batch lacks a value that another one has.
    """

    def mean(values: Sequence[Tensor]) -> Tensor:
        # A micro-batch without a label adds nothing: its mean is NaN, and NaN times 0 is NaN.
        total = (torch.stack([*values]) * weights).masked_fill(weights == 0, 0).sum()
        # A step without any label has no mean; a loss of 0 would look like a perfect model.
        return total if no_label_counts is None else total.masked_fill(no_label_counts, nan)

    means: dict[str, Tensor] = {}
    for name in dict.fromkeys(chain(*terms)):
        means[name] = mean([further[name].to(weights.dtype) for further in terms])
    return mean(losses), means


def added_loss_weight(model: nn.Module, name: str) -> float:
    """Return what a loss that a model returns is multiplied by.

    That is the coefficient by which the model multiplies it where it is given labels (transformers'
    router_aux_loss_coef and router_z_loss_coef), or else 1.

    Args:
        model: that returns it.
        name: of the loss in the model's output.
    """
    # encoder_z_loss is the z_loss of an encoder.
    kind = "_".join(name.split("_")[-2:])
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for key in (f"router_{kind}_coef", f"{kind}_coef"):
                value = getattr(owner, key, None)
                if isinstance(value, int | float):
                    return value
    return 1.0


def join_batch(state: TrainState, output: Any, target: Any, size: int) -> tuple[Any, Any]:
    """Return a model's output and the target of the examples of all processes.

    Tensors whose first dimension is that of the process's examples are joined, others are equal in
    all processes, as a learned temperature is.

    Raises:
        ConfigError: the output holds no tensor with dimensions where pytree finds it.
    """
    own = examples_in((output, target))
    tensors = 0

    def join(leaf: Any) -> Any:
        nonlocal tensors
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            return leaf
        tensors += 1
        return state.strategy.join_examples(leaf, size) if len(leaf) == own else leaf

    joined = tree_map(join, output)
    if not tensors:
        raise ConfigError(
            f"task.whole_batch: several processes cannot join the examples of a "
            f"{type(output).__name__}. Have the model return tensors, or a dict or tuple of them."
        )
    return joined, tree_map(join, target)
