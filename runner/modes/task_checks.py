"""Check what a task makes of the model's output for the first batch, before anything trains."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from runner.core import (
    ConfigError,
    RunContext,
    Task,
    TrainState,
    batch_layout,
    loss_of,
    step_records,
)
from runner.diagnostics.data_checks import labels_of

_LOSS_TOLERANCE = 1e-4
"""Relative difference of a batch's loss from that of its halves above rounding, of one output."""
_MODEL_TOLERANCE = 5e-3
"""The same where a model computes the loss, perhaps in half precision."""


@contextmanager
def checked_losses(task: Task) -> Iterator[None]:
    """Return a context in which what a task's loss() returns is checked; see check_loss_terms.

    The context is that of the first batch that is tried, and of the first step. Later a task that
    returns something else fails with an error of torch or Python, but where it returns values of
    other names, see RecordBuffer.add.
    """
    attributes = vars(task)
    own = {name: value for name, value in attributes.items() if name == "loss"}
    compute = task.loss

    def checked(output: Any, target: Any) -> Any:
        returned = compute(output, target)
        check_loss_terms(returned, task)
        return returned

    attributes["loss"] = checked
    try:
        yield
    finally:
        del attributes["loss"]
        attributes.update(own)


def check_loss_terms(returned: Any, task: Task) -> None:
    """Raise ConfigError where a task's loss() returns values that cannot be recorded.

    Args:
        returned: the loss, or the pair (loss, {name: scalar tensor}).
        task: named in messages.
    """
    if not isinstance(returned, tuple):
        return
    where = f"task={type(task).__name__}: loss()"
    if len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise ConfigError(
            f"{where} returned a tuple of {len(returned)}. It returns the loss, or (loss, values) "
            'with values by name, as in return loss, {"kl": kl.mean()}.'
        )
    loss, terms = returned
    for name, value in terms.items():
        problem = step_records.name_problem(name)
        if problem:
            raise ConfigError(f"{where} returned a value named {name!r}. {problem}")
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


def check_totals(state: TrainState, output: Any, target: Any) -> None:
    """Raise ConfigError where a task's totals or metrics are of another kind than Task says."""
    task = state.task
    totals = task.evaluation_totals(*state.precision.loss_pair(output, target))
    name = type(task).__name__
    if not isinstance(totals, Tensor) or totals.ndim != 1:
        raise ConfigError(
            f"task={name}: totals() returned a {type(totals).__name__}. It returns a tensor [K], "
            "sums that are added over all batches. Type return torch.stack([loss * count, count])."
        )
    metrics = task.evaluation_metrics(totals.tolist())
    is_recorded = task.added_metrics or task.additions.hook or task.additions.quality
    if not isinstance(metrics, dict) or not (is_recorded or task.quality in metrics):
        raise ConfigError(
            f"task={name}: summarise() returned {metrics!r}. It returns a dict of metrics by name, "
            f"with {task.quality}, the task's quality, among them."
        )


def output_lines(
    run: RunContext, state: TrainState, batch: tuple[Any, Any], output: Any
) -> Iterator[str]:
    """Yield what the task does with a model's output that a user may not expect of it.

    The model, in evaluation mode and without gradients, may be called again.

    Raises:
        ConfigError: the target does not fit, or parts of a batch would train otherwise than the
            whole batch.
    """
    task = state.task
    task.check_target(batch[1])
    taken = task.describe_output(output)
    if taken:
        yield taken
    name = run.invocation.option_name("task", run.spec.task)
    if task.whole_batch and run.strategy.rank.world_size > 1:
        check_joinable(state, batch, output)
    parts = run.spec.train.accumulate * run.strategy.rank.world_size
    if parts > 1 and not task.whole_batch:
        labels_of(task, batch[1])  # by whose number the parts weigh
    is_known = task.whole_batch or task.additions.whole_batch is False
    if not run.spec.trains or parts == 1 or is_known:
        return
    whole, halves = _whole_and_halves(state, *batch, output)
    tolerance = _LOSS_TOLERANCE
    if task.passes_target:
        # Two units in the last place of the format that the model's own loss may have.
        tolerance = max(_MODEL_TOLERANCE, 2 * torch.finfo(state.precision.compute).eps)
    if abs(whole - halves) <= tolerance * abs(whole):
        return
    raise ConfigError(
        f"task={name}: the loss of a batch is {whole:.4g}, and the mean of those of its halves "
        f"{halves:.4g}, so train.accumulate and several processes do not train as one large batch. "
        "Type task.whole_batch=true where the loss is of the batch as a whole, as a "
        "contrastive one is; have the task's labels() return what its mean divides by; or type "
        "task.whole_batch=false to train on the mean of the parts' losses."
    )


def check_joinable(state: TrainState, batch: tuple[Any, Any], output: Any) -> None:
    """Raise ConfigError where the output compares the examples of a batch with each other, so that
    the outputs of several processes cannot be joined."""
    size = batch_layout.examples_in(batch)
    # All processes call the model, also one with an only example.
    half = tree_map(partial(_cut, size=size, part=slice(max(1, size // 2))), batch)
    part = state.call(half[0])
    for whole, own in zip(tree_leaves(output), tree_leaves(part), strict=False):
        are_tensors = isinstance(whole, Tensor) and isinstance(own, Tensor)
        if are_tensors and whole.shape[1:] != own.shape[1:]:
            raise ConfigError(
                f"task.whole_batch: the model returns {list(whole.shape)}, which compares the "
                "examples of one process. Compare them in the task's loss, not in the model."
            )


def packing_lines(state: TrainState, inputs: Any, output: Any) -> Iterator[str]:
    """Yield whether texts packed into one example see each other.

    A forward with another first token shows it: what the later texts compute changes with it.

    Args:
        state: its model is called.
        inputs: of a batch; its position_ids, int64 [B, T], are 0 where a text begins.
        output: of the model for these inputs.
    """
    if not isinstance(inputs, batch_layout.KeywordInputs) or "position_ids" not in inputs:
        return
    positions = inputs["position_ids"]
    tokens = inputs.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.shape != positions.shape:
        return
    changed = tokens.clone()
    high = tokens.max()
    changed[:, 0] = torch.where(tokens[:, 0] == high, tokens.min(), high)
    other = state.call(batch_layout.KeywordInputs({**inputs, "input_ids": changed}))
    before, after = (getattr(each, "logits", each) for each in (output, other))
    is_later = (positions == 0).cumsum(1) > 1
    if not (isinstance(before, Tensor) and before.shape[:2] == tokens.shape and is_later.any()):
        return
    change = (before - after).abs().amax(-1).float()
    # Another order of additions may change a logit, too.
    if change[is_later].max() <= 1e-3 * change[~is_later].max():
        yield "packed texts do not see each other"
    elif not state.precision.converts_layers:  # whose scales depend on all tokens of a batch
        yield (
            f"warning: packed texts see each other: {type(state.plain_model).__name__} does not "
            "separate them by position_ids. Type data.packing=false, or data.separate=false."
        )


def _cut(leaf: Any, size: int, part: slice | list[int]) -> Any:
    """Return a part of the examples of a tensor of a batch; what has none as it is."""
    has_examples = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size
    return leaf[part] if has_examples else leaf


def _whole_and_halves(
    state: TrainState, inputs: Any, target: Any, output: Any
) -> tuple[float, float]:
    """Return the loss of a batch and the mean of those of its halves, weighed as micro-batches are.

    Both are 0 where the loss draws random numbers, or takes no half. They are computed from one
    output, so that layers that mix the examples of a batch make no difference. A model that
    computes its loss is called with the first half twice: it may average over labels that it alone
    knows, of which the halves have other numbers.
    """
    task = state.task
    size = batch_layout.examples_in((inputs, target))

    def loss_and_weight(part: list[int]) -> tuple[float, float]:
        cut = partial(_cut, size=size, part=part)
        own = tree_map(cut, target)
        if task.passes_target:
            loss = loss_of(state, tree_map(cut, inputs), own)
        else:
            halved = state.precision.loss_pair(tree_map(cut, output), own)
            returned = task.loss(*halved)
            loss = returned[0] if isinstance(returned, tuple) else returned
        count = labels_of(task, own)
        return float(loss), len(part) if count is None else float(count)

    first, rest = [*range(size // 2)], [*range(size // 2, size)]
    batch = [first + first, first] if task.passes_target else [first + rest, first, rest]
    try:
        (whole, _), (again, _), *halves = map(loss_and_weight, [batch[0], *batch])
    except Exception:  # of whatever type: it takes whole batches only
        return 0.0, 0.0
    weights = sum(weight for _, weight in halves)
    if whole != again or size < 2 or not weights:
        return 0.0, 0.0
    return whole, sum(loss * weight for loss, weight in halves if weight) / weights
