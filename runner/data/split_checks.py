"""Check what a data target returned: data sets with __len__ and __getitem__, or streams."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from runner.data.collate import makes_batches
from runner.data.stream import first_examples, is_stream

_RETURN = "return (train, val), two map-style data sets, or (train, val, test)"
_DOCS = "See docs/own-code.md."
_KINDS = ("train", "val", "test")
_SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_METRIC_NAMES = ("loss", "accuracy", "perplexity", "iou")


def splits_problems(returned: Any, target: str) -> Iterator[str]:
    """Yield what is wrong with what a data target returned, one message for each data set.

    Args:
        returned: by the target; anything, if it is a user's.
        target: its dotted path, for the messages.
    """
    if isinstance(returned, Mapping):
        keys = ", ".join(map(str, returned))
        yield f"data: {target} returned a dict with the keys {keys}; it must {_RETURN}. {_DOCS}"
    elif isinstance(returned, tuple) and len(returned) > 3:
        yield (
            f"data: {target} returned {len(returned)} values; it must {_RETURN}. Several sets of "
            "one kind go into a dict: (train, {name: set, ...}, {name: set, ...})."
        )
    elif not (isinstance(returned, tuple) and len(returned) > 1):
        kind = type(returned).__name__
        yield f"data: {target} must {_RETURN}; it returned a {kind}. {_DOCS}"
    else:
        for kind, found in zip(_KINDS, returned, strict=False):
            yield from _set_problems(kind, found)


def _set_problems(kind: str, found: Any) -> Iterator[str]:
    """Yield what is wrong with the train, val or test set, or with a dict of such sets."""
    if kind == "train" or not isinstance(found, Mapping):
        problem = _dataset_problem(kind, found)
        if problem:
            yield problem
        return
    if not found:
        yield f"data: the dict of {kind} sets is empty. Return at least one set in it."
    for name, dataset in found.items():
        if not _is_set_name(name):
            yield (
                f"data: a {kind} set is called {name!r}, which cannot be part of a metric's name. "
                "Allowed: letters, digits, _, - and ., and no name of a metric, such as loss."
            )
        problem = _dataset_problem(f"{kind}/{name}", dataset)
        if problem:
            yield problem


def _is_set_name(name: Any) -> bool:
    """Return whether metrics can be called `val/<name>/loss` beside `val/loss`."""
    return isinstance(name, str) and bool(_SET_NAME.fullmatch(name)) and name not in _METRIC_NAMES


def named_sets(found: Any) -> dict[str, Any]:
    """Return the val or test sets of a data target by name; the name of an only one is empty."""
    return dict(found) if isinstance(found, Mapping) else {"": found}


def _dataset_problem(name: str, dataset: Any) -> str | None:
    """Return why a data set cannot be the train, val or test set; None where it can."""
    kind = type(dataset)
    if isinstance(dataset, Mapping):
        return (
            f"data: the {name} set is a dict with the keys {', '.join(map(str, dataset))}; it must "
            "be one data set. Return one of them, or torch.utils.data.ConcatDataset(list of them). "
            "Only validation and test sets may be dicts."
        )
    if is_stream(dataset):
        return None
    # torch's Dataset defines a __getitem__ that only raises NotImplementedError.
    has_getitem = hasattr(dataset, "__getitem__") and (
        getattr(kind, "__getitem__", None) is not Dataset.__getitem__
    )
    has_len = hasattr(dataset, "__len__")
    if has_getitem and has_len:
        return None
    if has_getitem:
        missing = "__len__"
    elif has_len:
        missing = "__getitem__"
    else:
        missing = "__len__ and __getitem__"
    return (
        f"data: the {name} set is a {kind.__name__}; it needs __len__ and __getitem__ that yields "
        f"(input, target), and lacks {missing}. A stream is a torch.utils.data.IterableDataset."
    )


def first_samples(dataset: Any, count: int) -> Dataset[Any]:
    """Return the first examples of a data set, with its `batch(indices)` where it has that."""
    if is_stream(dataset):
        return _Examples(first_examples(dataset, count))
    few = range(min(count, len(dataset)))
    return _BatchSubset(dataset, few) if makes_batches(dataset) else Subset(dataset, few)


class _Examples(Dataset[Any]):
    """Examples in a list."""

    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


class _BatchSubset(Subset[Any]):
    """A subset whose batches its data set gathers."""

    def batch(self, indices: Tensor) -> Any:
        """Return the batch of these examples of the subset, indices int64 [B]."""
        dataset: Any = self.dataset
        return dataset.batch(torch.as_tensor(self.indices)[indices])
