"""Check the data before training: values that are not finite, labels outside the classes, and
sets in which no label counts."""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from runner.data.loader import Batch, Loader
from runner.data.step_samples import targets_of_samples
from runner.training.tasks.task import IGNORED, Task, labels_of

ROWS = 4096
"""Rows of data in memory that are checked in one piece."""
BATCHES = 8
SECONDS = 2.0
_LEFT_OUT = f"cross entropy leaves {IGNORED} out"


def data_problems(loader: Loader, split: str, task: Task, classes: int | None) -> Iterator[str]:
    """Yield what is wrong with a data set, a message for each kind of problem.

    Data in memory is checked whole, other data in its first BATCHES batches, both for SECONDS at
    most.

    Args:
        loader: of the set.
        split: "train" or "val", for the message.
        task: knows which targets are labels.
        classes: number of classes; None where the data set does not say.
    """
    found: dict[str, list[int]] = {"inputs": [], "targets": [], "label": []}
    first: Any = None
    seen, until = 0, perf_counter() + SECONDS
    labelled = False
    for indices, (inputs, target) in _portions(loader):
        seen += len(indices)
        labelled = labelled or _has_labels(task, target)
        for name, nest in (("inputs", inputs), ("targets", target)):
            found[name] += indices[_not_finite(nest, len(indices))].tolist()
        wrong = task.misplaced(target, classes) if classes and isinstance(target, Tensor) else None
        if wrong is not None and wrong.any():
            first = target[wrong][0] if first is None else first
            found["label"] += indices[wrong.cpu()].tolist()
        if perf_counter() > until:
            break
    for name in ("inputs", "targets"):
        if found[name]:
            yield f"{_whose(found[name], split, seen)}: its {name} are not finite."
    if found["label"]:
        assert classes is not None
        yield f"{_whose(found['label'], split, seen)}: {label_problem(first, classes)}"
    if not labelled:
        which = f"the {seen} samples of the {split} set that were looked at"
        yield f"data: no label of {which} counts ({_LEFT_OUT}): the loss would be NaN."


def explain_uncounted_labels(loader: Loader, samples: Sequence[int], task: Task) -> str | None:
    """Return what to do about a step none of whose labels counts; None where one does.

    Args:
        loader: of the training set.
        samples: indices of the samples of the step.
        task: counts the labels.
    """
    if _has_labels(task, targets_of_samples(loader.dataset, samples)):
        return None
    return (
        f"No label of its {len(samples)} samples counts ({_LEFT_OUT}), and a mean over none is "
        "NaN. Leave such samples out of the data, or type a larger train.batch_size"
    )


def _has_labels(task: Task, target: Any) -> bool:
    """Return whether a label counts; also True where the task does not count labels."""
    labels = labels_of(task, target) if isinstance(target, Tensor) else None
    return labels is None or bool(labels)


def label_problem(target: Tensor, classes: int) -> str:
    """Return what is wrong with one sample's label, or with one of its tokens."""
    wrong = target[((target < 0) & (target != IGNORED)) | (target >= classes)]
    label = int(wrong.max())
    widen = f", or type data.meta.classes={label + 1}" if label >= classes else ""
    return (
        f"label {label} is outside the {classes} classes (0 to {classes - 1}) of "
        f"data.meta.classes. Fix it{widen}."
    )


def _whose(samples: list[int], split: str, seen: int) -> str:
    more = f", and {len(samples) - 1} more of the {seen} looked at" if len(samples) > 1 else ""
    return f"data: sample {samples[0]} of the {split} set{more}"


def _portions(loader: Loader) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the indices of samples and their batch."""
    dataset = loader.dataset
    if type(dataset) is TensorDataset:
        for indices in torch.arange(loader.examples).split(ROWS):
            part = slice(int(indices[0]), int(indices[-1]) + 1)
            inputs, target = (tensor[part] for tensor in dataset.tensors)
            yield indices, (inputs, target)
        return
    chosen = loader.order(1).split(loader.batch_size)[:BATCHES]
    yield from zip(chosen, loader.batches(chosen), strict=True)


def _not_finite(nest: Any, count: int) -> Tensor:
    """Return which samples of a nest of tensors [count, ...] are not finite: bool [count], CPU."""
    wrong = torch.zeros(count, dtype=torch.bool)
    for value in tree_leaves(nest):
        if not isinstance(value, Tensor) or value.shape[:1] != (count,):
            continue
        real = torch.view_as_real(value) if value.is_complex() else value
        if real.is_floating_point() and real.numel() and not _all_finite(real):
            wrong |= ~real.isfinite().reshape(count, -1).all(1).cpu()
    return wrong


def _all_finite(values: Tensor) -> bool:
    """Return whether all values are finite, in one pass that makes no copy."""
    # A NaN is returned as both the least and the greatest.
    low, high = values.aminmax()
    return bool(low.isfinite() & high.isfinite())
