"""Check the data before training: values that are not finite, labels outside the classes, sets in
which no label counts, and inputs that are all alike."""

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from runner.core import Batch, ConfigError, Task, batch_layout
from runner.data.splits import label_remedy
from runner.data.stream_loader import DatasetLoader, StepSamples, StreamLoader, targets_of_steps
from runner.training.tasks.detection import Detection

ROWS_PER_PIECE = 4096
"""Rows of data in memory that are checked in one piece; the time is read after each."""
MAX_CHECKED_BATCHES = 8
"""Batches of data that is not in memory, the rest of which is not checked."""
MAX_CHECK_SECONDS = 2.0
"""Seconds after which the check of a set ends, with what it has found."""
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
        checked += len(indices)
        labelled = labelled or _has_labels(task, target)
        _note_same(first_inputs, inputs, len(indices))
        for name, nest in (("inputs", inputs), ("targets", target)):
            not_finite[name] += indices[_not_finite(nest, len(indices))].tolist()
        # Only tensors and boxes have labels, and a collator may have made another number of rows.
        has_classes = isinstance(target, Tensor) or isinstance(task, Detection)
        wrong = None
        if classes and has_classes and len(target) == len(indices):
            wrong = task.misplaced(target, classes)
        if wrong is not None and isinstance(target, Tensor) and target.numel():
            lowest_labels.append(
                int(target.masked_fill(target == batch_layout.IGNORED_LABEL, classes or 0).min())
            )
        if wrong is not None and wrong.any():
            if first_mislabelled is None:
                first = target[int(wrong.nonzero()[0])]
                # In detection a sample's target has the labels beside boxes.
                first_mislabelled = first["labels"] if isinstance(first, Mapping) else first
            mislabelled += indices[wrong.cpu()].tolist()
        # After a portion, not before it: one is checked however slow the data is.
        if perf_counter() > deadline:
            break
    notes += _same_inputs(first_inputs, checked, split)
    for name, samples in not_finite.items():
        if samples:
            yield f"{_whose(samples, split, checked)}: its {name} are not finite."
    if mislabelled:
        assert classes is not None
        problem = label_problem(first_mislabelled, classes, min(lowest_labels, default=0))
        yield f"{_whose(mislabelled, split, checked)}: {problem}"
    if not labelled:
        which = f"the {checked} samples of the {split} set that were looked at"
        yield f"data: no label of {which} counts ({_LEFT_OUT}): the loss would be NaN."


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


def _same_inputs(first: Mapping[str, Tensor | None], checked: int, split: str) -> Iterator[str]:
    """Yield which inputs are the same in all samples; a mask of integers may be so."""
    same = {name: value for name, value in first.items() if value is not None}
    # A grid of times or places may be the same in all; of one number, it was cut off.
    names = [n for n, v in same.items() if v.is_floating_point() and v.unique().numel() < 2]
    if same and len(same) == len(first):
        names = [""]
    if names and checked > 1:
        what = f"the inputs {', '.join(names)}".rstrip()
        where = f"in all {checked} samples of the {split} set that were looked at"
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
    for value in tree_leaves(nest):
        if not isinstance(value, Tensor) or value.shape[:1] != (count,):
            continue
        real = torch.view_as_real(value) if value.is_complex() else value
        if not real.is_floating_point() or not real.numel():
            continue
        # Almost all data passes this cheap test, which makes no copy: the samples are looked for
        # only where it fails. A NaN is both the least and the greatest.
        low, high = real.aminmax()
        if not (low.isfinite() & high.isfinite()):
            wrong |= ~real.isfinite().reshape(count, -1).all(1).cpu()
    return wrong
