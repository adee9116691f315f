"""One optimizer step: forward, backward, clipping, update.

Nothing here reads a value on the device (`item()`, `float()`, `if tensor:`): the host would wait
for the device in every step, and the device for the host's next launch. The values of a step stay
on the device until RecordBuffer copies a block of them.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from math import nan
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from runner.data.batch_layout import Batch
from runner.precision.gradients import (
    any_found_inf,
    clip_gradients,
    finish_gradients,
    grad_norms,
    gradients_of,
    round_gradients,
)
from runner.precision.loss_scale import HostFlag
from runner.training.model_call import call_model
from runner.training.records import (
    FORBIDDEN_CHARACTERS,
    STEP_METRICS,
    TERM_PREFIX,
    DeviceStepRecord,
    measure_step,
)
from runner.training.state import TrainState
from runner.training.tasks.task import labels_of
from runner.utils.errors import ConfigError
from runner.utils.formatting import now_ms
from runner.utils.tensors import cast_gradients, widest_float

_PLAIN = nullcontext()


def examples_in(batch: Batch) -> int:
    """Return the examples of a batch: the first dimension of its target, or else of its inputs.

    A target that is a list has one member for each example. A batch that holds a tensor in neither
    place counts as one example.
    """
    inputs, target = batch
    if isinstance(target, list):
        return len(target)
    counted = target
    if not isinstance(counted, Tensor):
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        counted = tensors[0] if tensors else None
    if counted is None or counted.ndim == 0:
        return 1
    return counted.shape[0]  # len() of a tensor costs 3 µs more, in every step


def loss_of(state: TrainState, inputs: Any, target: Any) -> Tensor:
    """Return the mean loss of a micro-batch, computed under the precision's contexts and casts."""
    return _loss_and_terms(state, inputs, target)[0]


def _loss_and_terms(
    state: TrainState, inputs: Any, target: Any, size: int | None = None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the mean loss of a micro-batch and the further values that are recorded with it.

    Args:
        state: its model is called.
        inputs: of this process's share of the micro-batch.
        target: of this share.
        size: examples of the micro-batch in all processes, which join them where the task's loss
            is of the batch as a whole; None where this process has them all.
    """
    precision = state.precision
    with state.forward_context():
        output = call_model(state.model, state.cast(inputs))
        # Within these contexts autocast chooses the dtypes of the loss, too.
        if precision.autocast_loss:
            return _task_loss(state, output, precision.cast_target(target), size)
    return _task_loss(state, *precision.loss_pair(output, target), size)


def _task_loss(
    state: TrainState, output: Any, target: Any, size: int | None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the loss of a model's output and what is recorded with it; see _loss_and_terms."""
    task = state.task
    if size is not None and task.whole_batch:
        output, target = join_batch(state, output, target, size)
    loss, terms = split_loss(task.loss(output, target), task)
    # What has no gradient is no part of a loss that is minimised, but a value to look at.
    added = {
        name: value for name, value in task.added_losses(output).items() if value.requires_grad
    }
    if not added:
        return loss, terms
    total = loss
    for name, value in added.items():
        if name not in state.loss_weights:
            state.loss_weights[name] = added_loss_weight(state.plain_model, name)
        total = total + state.loss_weights[name] * value.reshape(()).to(loss.dtype)
    return total, split_loss((loss, {"main_loss": loss, **added, **terms}), task)[1]


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
        ConfigError: the output holds no such tensor where pytree finds it.
    """
    own = examples_in((output, target))

    def join(leaf: Any) -> Any:
        is_part = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == own
        return state.strategy.join_examples(leaf, size) if is_part else leaf

    if not any(isinstance(leaf, Tensor) and leaf.ndim for leaf in tree_leaves(output)):
        raise ConfigError(
            f"task.whole_batch: several processes cannot join the examples of a "
            f"{type(output).__name__}. Have the model return tensors, or a dict or tuple of them."
        )
    return tree_map(join, output), tree_map(join, target)


def backpropagate(state: TrainState, loss: Tensor, weight: Tensor | None = None) -> None:
    """Add the gradients of a loss, times a weight, to those of the parameters.

    Args:
        state: its parameters' gradients are changed.
        loss: scalar, already multiplied by the loss scale.
        weight: scalar in the dtype of the loss; None for 1.
    """
    # Activation checkpointing computes forwards again here, in the precision of the first ones.
    with state.backward_context():
        loss.backward(weight)


def compute_gradients(
    state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Accumulate the gradients of the mean loss over all labels of a step.

    With several processes each returns numbers of its own; their average is the mean.

    Returns:
        That mean, and those of the task's further values by name; detached.
    """
    # The optimizers step outside of it: what they write is no write of a forward.
    with state.wide_forward or _PLAIN:
        # One micro-batch in one process needs no weights: its loss is the mean already. This common
        # case skips the kernels that count labels.
        if len(micros) == state.strategy.rank.world_size == 1:
            loss, terms = _loss_and_terms(state, *micros[0])
            note_names(state, terms)
            backpropagate(state, state.scale.multiply(loss))
            loss = loss.detach()
        else:
            loss, terms = _accumulate(state, micros, sizes)
    finish_gradients([*state.sparse_gradient_parameters, *state.complex_parameters])
    return loss, terms


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
    take_step = _closure_step if state.takes_closure else _plain_step
    if state.wide_forward is not None:
        state.wide_forward.seed(state.seed, state.step)
    values, terms = take_step(state, micros, sizes)
    measured = measure_step(state)  # before the gradients are dropped
    for name, value in terms.items():
        measured[f"{TERM_PREFIX}{name}"] = value
    # None and not zero: the next backward then writes the gradients instead of adding to them.
    for p in state.trainable_parameters:
        p.grad = None
    return DeviceStepRecord(
        step=state.step,
        time_ms=now_ms(),
        epoch=state.epoch,
        ended_at=perf_counter(),
        examples=sum(sizes),
        measured=measured,
        **values,
    )


def _plain_step(
    state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]
) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Take a step of optimizers that use gradients alone.

    Returns:
        Values of its record by field, and the task's further values by name.
    """
    strategy = state.strategy
    skipped_steps = state.skipped_steps
    if skipped_steps is not None:
        skipped_steps.begin()
    scale = state.scale.value  # in force in this step; the update at its end may change it
    loss, terms = compute_gradients(state, micros, sizes)
    grads = [strategy.local_shards(gradients_of(part.params)) for part in state.optimizers]
    # Unscaled first, in place: the norms that are clipped and recorded are the gradients' own. A
    # flag per optimizer, and over all processes, which must skip a step together.
    found_infs = [strategy.reduce_found_inf(state.scale.unscale(part)) for part in grads]
    # The norms of this process's shards.
    every = [*chain(*grads)]
    norms = clip_gradients(every, state.clip_norm, state.clip_value, strategy.reduce_norms)
    # The schedule of the step before waits for its found-inf flag until here, where the device has
    # long passed it. It must advance before the learning rate is recorded and used.
    for scheduled in state.optimizers:
        scheduled.advance_schedule()
    values = {
        "lr": state.optimizers[0].lr,
        "rates": state.named_rates(),
        "loss": loss,
        "norms": norms,
        "scale": scale,
        "found_inf": any_found_inf(found_infs),
    }
    state.run_update_hook()
    optimizers = [part.optimizer for part in state.optimizers]
    if len(micros) > 1:
        round_gradients(optimizers, state.widened)
    state.scale.step_all(optimizers, found_infs)
    # Before the average, which has running statistics, too.
    if skipped_steps is not None:
        skipped_steps.end(values["found_inf"])
    for scheduled, found_inf in zip(state.optimizers, found_infs, strict=True):
        # Without a flag the step was applied for certain. With one the schedule waits for the flag,
        # which is copied to the host in the background.
        if scheduled.scheduler is not None and found_inf is not None:
            scheduled.pending_found_inf = HostFlag(found_inf)
        elif scheduled.scheduler is not None:
            scheduled.scheduler.step()
    if state.average is not None:
        state.average.update(found_infs)
    return values, terms


def _accumulate(
    state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Accumulate the gradients of several micro-batches; see compute_gradients."""
    factors, no_label_counts = _weights(state, micros, sizes)
    losses: list[Tensor] = []
    weights: list[Tensor] = []
    parts: list[Mapping[str, Tensor]] = []
    for i, (micro, factor, size) in enumerate(zip(micros, factors, sizes, strict=True), 1):
        # In 16 bits, half a unit in the last place of the sum is lost with each further one.
        if i == 2:
            cast_gradients(state.widened, torch.float32)
        with state.strategy.accumulating(last=i == len(micros)):
            loss, terms = _loss_and_terms(state, *micro, size)
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
    total = _weighted_mean(losses, stacked, no_label_counts)
    means = {}
    for name in parts[0]:
        values = [part[name].to(stacked.dtype) for part in parts]
        means[name] = _weighted_mean(values, stacked, no_label_counts)
    return total, means


def _weighted_mean(
    means: Sequence[Tensor], weights: Tensor, no_label_counts: Tensor | None
) -> Tensor:
    """Return the mean over a step of the means of its micro-batches, a scalar."""
    # A micro-batch without a label adds nothing: its mean is NaN, and NaN times 0 is NaN.
    total = (torch.stack([*means]) * weights).masked_fill(weights == 0, 0).sum()
    # A step without any label has no mean; a loss of 0 would look like a perfect model.
    return total if no_label_counts is None else total.masked_fill(no_label_counts, nan)


def _weights(
    state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]
) -> tuple[Sequence[float | Tensor], Tensor | None]:
    """Return how the micro-batches of a step are weighed. Labels are counted on the device.

    Returns:
        The share that each has of the labels of the step in all processes, and bool [], whether no
        label of the whole step counts. Where the task counts no labels, the shares are those of the
        examples, and the flag is None.
    """
    rank = state.strategy.rank
    if state.task.whole_batch:
        return [1.0] * len(micros), None  # the loss of every process is that of the whole batch
    examples = [rank.batch_share(size) for size in sizes]
    counts = [labels_of(state.task, target) for _, target in micros]
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
    factors = (own * rank.world_size / total).masked_fill(no_label_counts, 0).unbind()
    return factors, no_label_counts


def _closure_step(
    state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]
) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Take a step of an optimizer that evaluates the loss itself; record its first evaluation.

    Returns:
        See _plain_step.
    """
    scheduled = state.optimizers[0]
    values: dict[str, Any] = {"lr": scheduled.lr, "scale": None, "found_inf": None}
    first_terms: list[Mapping[str, Tensor]] = []

    def closure() -> Tensor:
        for p in scheduled.params:
            p.grad = None
        loss, terms = compute_gradients(state, micros, sizes)
        # Later evaluations are at points of the line search, not at the weights of this step.
        if not first_terms:
            first_terms.append(terms)
            values["loss"] = loss
            values["norms"] = grad_norms(gradients_of(scheduled.params))
        if len(micros) > 1:
            round_gradients([scheduled.optimizer], state.widened)
        return loss

    if scheduled.reads_gradients:
        closure()
    state.run_update_hook()
    scheduled.optimizer.step(closure)  # type: ignore[arg-type]
    if scheduled.scheduler is not None:
        scheduled.scheduler.step()
    if state.average is not None:
        state.average.update([None])
    return values, first_terms[0]


def split_loss(returned: Any, task: object) -> tuple[Any, Mapping[str, Tensor]]:
    """Return the loss and the terms of what a task's `loss` returned, detached and by name.

    Args:
        returned: the loss, or the pair (loss, {name: scalar tensor}).
        task: named in messages.

    Raises:
        ConfigError: the second of the pair is no mapping, or a name or a value does not fit.
    """
    if not isinstance(returned, tuple):
        return returned, {}
    where = f"task={type(task).__name__}: loss()"
    if len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise ConfigError(
            f"{where} returned a tuple of {len(returned)}. It returns the loss, or (loss, values) "
            'with values by name, as in return loss, {"kl": kl.mean()}.'
        )
    loss, terms = returned
    recorded = [entry.metric.removeprefix("train/") for entry in STEP_METRICS]
    for name, value in terms.items():
        is_text = isinstance(name, str) and name and not FORBIDDEN_CHARACTERS.search(name)
        if not is_text or name in recorded:
            raise ConfigError(
                f"{where} returned a value named {name!r}. Allowed: text of letters, digits, "
                f"spaces and _ - . : /, but not {', '.join(recorded)}, which the runner records."
            )
        kind = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            # What a loss that is no tensor should have been, the check of the loss says.
            if value.numel() == 1 and getattr(loss, "device", value.device) == value.device:
                continue
            kind = f"a tensor {list(value.shape)} on {value.device}"
        raise ConfigError(
            f"{where} returned as {name} {kind}. Allowed: a tensor of one number on the loss's "
            "device; no .item(), which makes every step wait. Type value.mean()."
        )
    return loss, {name: value.detach().reshape(()) for name, value in terms.items()}


def note_names(state: TrainState, terms: Mapping[str, Tensor]) -> None:
    """Note the names of a step's terms in the state, where later steps are held to them.

    Raises:
        ConfigError: an earlier micro-batch had other names.
    """
    names = tuple(terms)
    if state.term_names is None:
        state.term_names = names
    elif {*state.term_names} != {*names}:
        before = ", ".join(state.term_names) or "none"
        raise ConfigError(
            f"task={type(state.task).__name__}: loss() returned the values {before} before, and "
            f"in step {state.step} {', '.join(names) or 'none'}. Return the same names in every "
            "step; where there is nothing to measure, loss.new_zeros(())."
        )
