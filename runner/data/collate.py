"""Examples to batches, and what is wrong with examples that make no batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import default_collate

_PARTS = ("input", "target")


@dataclass(frozen=True)
class WholeBatch:
    """A batch that a data set's `batch(indices)` has made."""

    batch: Any


@dataclass(frozen=True)
class CollateFailure:
    """What a loading process returns in place of a batch: an exception would lose its type."""

    problem: str


def collate(examples: Any) -> Any:
    """Return the batch of a list of (input, target), or an Uncollated that says why there is none.

    A Whole is returned as its batch.
    """
    if isinstance(examples, WholeBatch):
        return examples.batch
    try:
        return default_collate(examples)
    except Exception as error:  # of whatever type the examples' own classes raise
        return CollateFailure(collate_problem(examples, error))


def collate_problem(examples: Sequence[Any], error: Exception) -> str:
    """Return why examples do not make a batch, and what to change."""
    pairs = [e if isinstance(e, tuple | list) and len(e) == 2 else (e, None) for e in examples]
    told = next(filter(None, (_differing(pairs, i) for i in range(2))), None)
    if told:
        return (
            f"data: the examples of a batch do not go together: {told}. Pad or crop them to one "
            "size in __getitem__, or give the data set a method batch(indices) that returns "
            "(inputs, targets) of a whole batch, padded (docs/own-code.md)."
        )
    if told := next(filter(None, (_foreign(pairs, i) for i in range(2))), None):
        return (
            f"data: the examples of a batch are no tensors: {told}. Return tensors from "
            "__getitem__ (torch.as_tensor(...)), or give the data set a method batch(indices) "
            "(docs/own-code.md)."
        )
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else ""
    return (
        f"data: the examples of a batch do not go together: {type(error).__name__}: {reason}. "
        "Return (input, target) with the same structure for every index, or give the data set a "
        "method batch(indices) that returns a whole batch (docs/own-code.md)."
    )


def _differing(pairs: Sequence[Any], part: int) -> str | None:
    """Return two different shapes or lengths at one place of the examples; None for none."""
    first = dict(_sizes(pairs[0][part]))
    for pair in pairs[1:]:
        sizes = dict(_sizes(pair[part]))
        if sizes.keys() != first.keys():
            return f"{_PARTS[part]}s of different structure ({_names(first)} and {_names(sizes)})"
        for place, size in sizes.items():
            if size != first[place]:
                return f"{_PARTS[part]}s{place} of the shapes {first[place]} and {size}"
    return None


def _names(sizes: dict[str, list[int]]) -> str:
    return ", ".join(place or "one value" for place in sizes) or "nothing"


def _sizes(nest: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield the place and the shape of each value of an example's part."""
    for path, leaf in tree_flatten_with_path(nest)[0]:
        yield keystr(path), list(getattr(leaf, "shape", []))


def _foreign(pairs: Sequence[Any], part: int) -> str | None:
    """Return the first value that makes no tensor; None where all do."""
    for path, leaf in tree_flatten_with_path(pairs[0][part])[0]:
        if not isinstance(leaf, Tensor | np.ndarray | np.number | int | float | complex | str):
            kind = type(leaf)
            return f"{_PARTS[part]}{keystr(path)} is a {kind.__module__}.{kind.__qualname__}"
    return None
