"""Check what a data target returned: two map-style data sets with __len__ and __getitem__."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from runner.data.collate import makes_batches

_RETURN = "return (train, val), two map-style data sets"
_DOCS = "See docs/own-code.md."


def splits_problems(returned: Any, target: str) -> Iterator[str]:
    """Yield what is wrong with what a data target returned, one message for each data set.

    Args:
        returned: by the target; anything, if it is a user's.
        target: its dotted path, for the messages.
    """
    if isinstance(returned, Mapping):
        keys = ", ".join(map(str, returned))
        yield f"data: {target} returned a dict with the keys {keys}; it must {_RETURN}. {_DOCS}"
    elif isinstance(returned, tuple) and len(returned) > 2:
        yield (
            f"data: {target} returned {len(returned)} values; it must {_RETURN}. Leave a third set "
            "out: evaluate a checkpoint on it with a data config of its own, mode=evaluate "
            "checkpoint=<run> data=<yours>."
        )
    elif not (isinstance(returned, tuple) and len(returned) == 2):
        kind = type(returned).__name__
        yield f"data: {target} must {_RETURN}; it returned a {kind}. {_DOCS}"
    else:
        for name, dataset in zip(("train", "val"), returned, strict=True):
            problem = _dataset_problem(name, dataset)
            if problem:
                yield problem


def _dataset_problem(name: str, dataset: Any) -> str | None:
    """Return why a data set cannot be the train or val set; None where it can."""
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
            "example by its index; shuffling, resume and the checks of samples need that. Make it "
            "a torch.utils.data.Dataset with __len__ and __getitem__(index) that returns "
            "(input, target), or read it into one first."
        )
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
        f"(input, target), and lacks {missing}."
    )


def first_samples(dataset: Any, count: int) -> Dataset[Any]:
    """Return the first examples of a data set, with its `batch(indices)` where it has that."""
    few = range(min(count, len(dataset)))
    return _BatchSubset(dataset, few) if makes_batches(dataset) else Subset(dataset, few)


class _BatchSubset(Subset[Any]):
    """A subset whose batches its data set gathers."""

    def batch(self, indices: Tensor) -> Any:
        """Return the batch of these examples of the subset, indices int64 [B]."""
        dataset: Any = self.dataset
        return dataset.batch(torch.as_tensor(self.indices)[indices])
