"""What a data target must return, and what is wrong with what it returns."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

_RETURN = "return (train, val), two map-style data sets"
_DOCS = "See docs/own-code.md."


def splits_problems(made: Any, target: str) -> Iterator[str]:
    """Yield what is wrong with what a data target returned, one message for each data set."""
    if isinstance(made, Mapping):
        keys = ", ".join(map(str, made))
        yield f"data: {target} returned a dict with the keys {keys}; it must {_RETURN}. {_DOCS}"
    elif isinstance(made, tuple) and len(made) > 2:
        yield (
            f"data: {target} returned {len(made)} values; it must {_RETURN}. Leave a third set "
            "out: evaluate a checkpoint on it with a data config of its own, mode=evaluate "
            "checkpoint=<run> data=<yours>."
        )
    elif not (isinstance(made, tuple) and len(made) == 2):
        what = type(made).__name__
        yield f"data: {target} must {_RETURN}; it returned a {what}. {_DOCS}"
    else:
        for name, dataset in zip(("train", "val"), made, strict=True):
            if problem := _problem(name, dataset):
                yield problem


def _problem(name: str, dataset: Any) -> str | None:
    """Return why a data set cannot be one of the two; None for one that can."""
    kind = type(dataset)
    if isinstance(dataset, Mapping):
        return (
            f"data: the {name} set is a dict with the keys {', '.join(map(str, dataset))}; the "
            "runner takes one data set. Return one of them, or "
            "torch.utils.data.ConcatDataset(list of them); for numbers of each, evaluate a "
            "checkpoint on each: mode=evaluate checkpoint=<run> data=<yours>."
        )
    if isinstance(dataset, IterableDataset):
        return (
            f"data: the {name} set is a {kind.__name__}, an IterableDataset, which gives no "
            "example by its index; orders, resume and the look at samples need that. Make it a "
            "torch.utils.data.Dataset with __len__ and __getitem__(index) that returns "
            "(input, target), or read it into one first."
        )
    has_item = hasattr(dataset, "__getitem__")
    if has_item and getattr(kind, "__getitem__", None) is not Dataset.__getitem__:
        if hasattr(dataset, "__len__"):
            return None
        lacking = "__len__"
    else:
        lacking = "__getitem__" if hasattr(dataset, "__len__") else "__len__ and __getitem__"
    return (
        f"data: the {name} set is a {kind.__name__}; it needs __len__ and __getitem__ that yields "
        f"(input, target), and lacks {lacking}."
    )


def first_samples(dataset: Any, count: int) -> Dataset[Any]:
    """Return the first examples of a data set, with its `batch(indices)` where it has that."""
    few = range(min(count, len(dataset)))
    return _Batches(dataset, few) if hasattr(dataset, "batch") else Subset(dataset, few)


class _Batches(Subset[Any]):
    """A subset whose batches its data set makes."""

    def batch(self, indices: Tensor) -> Any:
        """Return the batch of these examples of the subset."""
        dataset: Any = self.dataset
        return dataset.batch(torch.as_tensor(self.indices)[indices])
