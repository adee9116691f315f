"""Check the data, and what a task makes of the model's output for the first batch, before training.

Data may hold values that are not finite, labels outside the classes, no label that counts, and
inputs that are all alike.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from runner.core import (
    Batch,
    ConfigError,
    RunContext,
    Task,
    TrainState,
    batch_layout,
    loss_of,
    module_tape,
    step_records,
    tensor_facts,
)
from runner.data.splits import label_remedy
from runner.data.stream_loader import DatasetLoader, StepSamples, StreamLoader, targets_of_steps
from runner.diagnostics.module_tensors import tensors_in
from runner.training.tasks.detection import Detection

ROWS_PER_PIECE = 4096
"""Rows of data in memory that are checked in one piece; the time is read after each."""
MAX_CHECKED_BATCHES = 8
"""Batches of data that is not in memory, the rest of which is not checked."""
MAX_CHECK_SECONDS = 2.0
"""Seconds after which the check of a set ends, with what it has found."""
_LOSS_TOLERANCE = 1e-4
"""Relative difference of a batch's loss from that of its halves above rounding, of one output."""
_MODEL_TOLERANCE = 5e-3
"""The same where a model computes the loss, perhaps in half precision."""
_LEFT_OUT = f"cross entropy leaves {batch_layout.IGNORED_LABEL} out"


def data_problems(
    loader: DatasetLoader, split: str, task: Task, classes: int | None, notes: list[str]
) -> Iterator[str]:
    """Yield what is wrong with a data set, a message for each kind of problem.

    Data in memory is checked whole, other data in its first MAX_CHECKED_BATCHES batches, both for
    MAX_CHECK_SECONDS at most.

    Args:
        loader: of the set.
        split: "train" or "val", for the message.
        task: knows which targets are labels.
        classes: number of classes; None where the data set does not say.
        notes: gets what is suspicious and not wrong: inputs that are all alike.
    """
    first_inputs: dict[str, Tensor | None] = {}
    not_finite: dict[str, list[int]] = {"inputs": [], "targets": []}
    mislabelled: list[int] = []
    first_mislabelled: Any = None
    lowest_labels: list[int] = []  # of each portion
    checked = 0
    labelled = False
    deadline = perf_counter() + MAX_CHECK_SECONDS
    for indices, (inputs, target) in _portions(loader):
        count = len(indices)
        checked += count
        labelled = labelled or _has_labels(task, target)
        _note_same(first_inputs, inputs, count)
        for name, nest in (("inputs", inputs), ("targets", target)):
            not_finite[name] += indices[_not_finite(nest, count)].tolist()
        # Only tensors and boxes have labels, and a collator may have made another number of rows.
        has_classes = isinstance(target, Tensor) or isinstance(task, Detection)
        wrong = None
        if classes and has_classes and len(target) == count:
            wrong = task.misplaced(target, classes)
        if wrong is not None and isinstance(target, Tensor) and target.numel():
            counted = target.masked_fill(target == batch_layout.IGNORED_LABEL, classes or 0)
            lowest_labels.append(int(counted.min()))
        if wrong is not None and wrong.any():
            if first_mislabelled is None:
                first = target[int(wrong.nonzero()[0])]
                # In detection a sample's target has the labels beside boxes.
                first_mislabelled = first["labels"] if isinstance(first, Mapping) else first
            mislabelled += indices[wrong.cpu()].tolist()
        # After a portion, not before it: one is checked however slow the data is.
        if perf_counter() > deadline:
            break
    looked_at = f"samples of the {split} set that were looked at"
    notes += _same_inputs(first_inputs, checked, looked_at)
    for name, samples in not_finite.items():
        if samples:
            yield f"{_whose(samples, split, checked)}: its {name} are not finite."
    if mislabelled:
        problem = label_problem(first_mislabelled, classes or 0, min(lowest_labels, default=0))
        yield f"{_whose(mislabelled, split, checked)}: {problem}"
    if not labelled:
        text = f"data: no label of the {checked} {looked_at} counts ({_LEFT_OUT})"
        yield f"{text}: the loss would be NaN."


def _note_same(first: dict[str, Tensor | None], inputs: Any, count: int) -> None:
    """Keep the first sample of each input as long as all samples are the same, else None.

    Args:
        first: by the names of the inputs; is changed.
        inputs: of a portion, a nest of tensors [count, ...].
        count: samples of the portion.
    """
    for path, value in tree_flatten_with_path(inputs)[0]:
        is_dense = isinstance(value, Tensor) and value.layout is torch.strided
        if not is_dense or value.shape[:1] != (count,):
            continue
        name = keystr(path).strip("[]'")
        earlier = first.setdefault(name, value[:1])
        if earlier is not None:
            is_same = value.shape[1:] == earlier.shape[1:] and bool((value == earlier).all())
            first[name] = earlier if is_same else None


def _same_inputs(first: Mapping[str, Tensor | None], checked: int, looked_at: str) -> Iterator[str]:
    """Yield which inputs are the same in all samples; a mask of integers may be so."""
    same = {name: value for name, value in first.items() if value is not None}
    # A grid of times or places may be the same in all; of one number, it was cut off.
    names = [n for n, v in same.items() if v.is_floating_point() and v.unique().numel() < 2]
    if same and len(same) == len(first):
        names = [""]
    if names and checked > 1:
        what = f"the inputs {', '.join(names)}".rstrip()
        where = f"in all {checked} {looked_at}"
        yield f"data: {what} are the same {where}. Were they cut off at a limit?"


def explain_uncounted_labels(loader: DatasetLoader, samples: StepSamples, task: Task) -> str | None:
    """Return what to do about a step none of whose labels counts; None where one does, and for a
    stream.

    Args:
        loader: of the training set.
        samples: of the step.
        task: counts the labels.
    """
    portions = targets_of_steps(loader, [samples])
    if isinstance(loader, StreamLoader) or any(_has_labels(task, target) for _, target in portions):
        return None
    count = len(samples.indices)
    return (
        f"No label of its {count} samples counts ({_LEFT_OUT}), and a mean over none is "
        "NaN. Leave such samples out of the data, or type a larger train.batch_size"
    )


def labels_of(task: Task, target: Any) -> Tensor | None:
    """Return how many labels of a target count, as `task.labels` says, after a check of its type.

    Raises:
        ConfigError: the task returned something else than None or a scalar tensor.
    """
    count = task.labels(target)
    if count is None or (isinstance(count, Tensor) and not count.ndim):
        return count
    shape = f"a tensor {list(count.shape)}" if isinstance(count, Tensor) else repr(count)
    raise ConfigError(
        f"task={type(task).__name__}: labels() returned {shape}. It returns a scalar tensor, the "
        "number of labels that the mean loss divides by, or None. Type return mask.sum()."
    )


def _has_labels(task: Task, target: Any) -> bool:
    """Return whether a label counts; also True where the task does not count labels."""
    labels = labels_of(task, target) if isinstance(target, Tensor) else None
    return labels is None or bool(labels)


def label_problem(target: Tensor, classes: int, least: int = 0) -> str:
    """Return what is wrong with one sample's label, or with one of its tokens.

    Args:
        target: of the sample.
        classes: number of classes.
        least: the smallest label of the set.
    """
    wrong = target[((target < 0) & (target != batch_layout.IGNORED_LABEL)) | (target >= classes)]
    # The largest: that many classes hold all labels of this sample.
    label = int(wrong.max())
    keys = label_remedy(label, is_mask=target.ndim > 1)
    remedy = f"Fix it, or type {keys}" if label >= classes else "Fix it"
    if (least, label) == (1, classes):
        remedy = "No label is 0: subtract 1 from all"
    return (
        f"label {label} is outside the {classes} classes (0 to {classes - 1}) of "
        f"data.meta.classes. {remedy}."
    )


def _whose(samples: list[int], split: str, checked: int) -> str:
    """Return words that name the first of the samples and count the others."""
    more = f", and {len(samples) - 1} more of the {checked} looked at" if len(samples) > 1 else ""
    return f"data: sample {samples[0]} of the {split} set{more}"


def _portions(loader: DatasetLoader) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the indices of samples and their batch."""
    dataset: Any = loader.dataset
    if isinstance(loader, StreamLoader):
        yield from loader.first_batches(MAX_CHECKED_BATCHES)
        return
    if loader.slices_tensors:
        for indices in torch.arange(loader.examples).split(ROWS_PER_PIECE):
            part = slice(int(indices[0]), int(indices[-1]) + 1)
            yield indices, loader.options.layout.split([tensor[part] for tensor in dataset.tensors])
        return
    # In an epoch's order, so that shuffled data is checked at random places.
    chosen = loader.order(1).split(loader.batch_size)[:MAX_CHECKED_BATCHES]
    yield from zip(chosen, loader.batches(chosen), strict=True)


def _not_finite(nest: Any, count: int) -> Tensor:
    """Return which samples of a nest of tensors [count, ...] are not finite: bool [count], CPU."""
    wrong = torch.zeros(count, dtype=torch.bool)
    for value in tensors_in(nest):
        if value.shape[:1] != (count,):
            continue
        real = tensor_facts.real_view(value)
        if not real.is_floating_point() or not real.numel():
            continue
        # Almost all data passes this cheap test, which makes no copy: the samples are looked for
        # only where it fails. A NaN is both the least and the greatest.
        low, high = real.aminmax()
        if not (low.isfinite() & high.isfinite()):
            wrong |= ~real.isfinite().reshape(count, -1).all(1).cpu()
    return wrong


@contextmanager
def checked_losses(task: Task) -> Iterator[None]:
    """Return a context in which what a task's loss() returns is checked; see check_loss_terms.

    The context is that of the first batch that is tried, and of the first step. Later a task that
    returns something else fails with an error of torch or Python, but where it returns values of
    other names, see RecordBuffer.add.
    """
    compute = task.loss

    def checked(output: Any, target: Any) -> Any:
        returned = compute(output, target)
        check_loss_terms(returned, task)
        return returned

    with module_tape.ModuleTape() as tape:
        tape.replace_forward(task, checked, "loss")  # type: ignore[arg-type]
        yield


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
    is_recorded = task.additions.metrics or task.additions.hook or task.additions.quality
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
    if parts == 1 or task.whole_batch:
        return
    labels_of(task, batch[1])  # by whose number the parts weigh
    if not run.spec.trains or task.additions.whole_batch is False:
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
