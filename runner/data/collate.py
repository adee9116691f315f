"""Stack examples into batches, and explain why examples cannot be stacked.

Loading processes return a CollateFailure instead of raising: an exception that crosses a process
boundary loses its type, and the explanation with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import default_collate

_PARTS = ("input", "target")
_STACKABLE = Tensor | np.ndarray | np.number | int | float | complex | str


@dataclass(frozen=True)
class WholeBatch:
    """A batch that a data set's `batch(indices)` has made, which needs no stacking."""

    batch: Any


@dataclass(frozen=True)
class CollateFailure:
    """The message of a batch that could not be stacked, in place of the batch."""

    problem: str


def collate(examples: Any) -> Any:
    """Return the batch of a list of examples (input, target), or a CollateFailure that explains.

    A WholeBatch is returned as its batch.
    """
    if isinstance(examples, WholeBatch):
        return examples.batch
    try:
        return default_collate(examples)
    except Exception as error:  # of whatever type the examples' own classes raise
        return CollateFailure(collate_problem(examples, error))


def collate_problem(examples: Sequence[Any], error: Exception) -> str:
    """Return why examples cannot be stacked into a batch, and what to change.

    Args:
        examples: of one batch.
        error: that torch's default_collate raised for them.
    """
    pairs = [_pair(example) for example in examples]
    for part in range(2):
        mismatch = _shape_mismatch(pairs, part)
        if mismatch:
            return (
                f"data: the examples of a batch cannot be stacked: {mismatch}. Pad or crop them to "
                "one size in __getitem__, or give the data set a method batch(indices) that "
                "returns (inputs, targets) of a whole batch, padded (docs/own-code.md)."
            )
    for part in range(2):
        value = _unstackable_value(pairs[0][part], _PARTS[part])
        if value:
            return (
                f"data: the examples of a batch are not tensors: {value}. Return tensors from "
                "__getitem__ (torch.as_tensor(...)), or give the data set a method batch(indices) "
                "(docs/own-code.md)."
            )
    text = str(error).strip()
    reason = text.splitlines()[0].rstrip(".") if text else ""
    return (
        f"data: the examples of a batch cannot be stacked: {type(error).__name__}: {reason}. "
        "Return (input, target) with the same structure for every index, or give the data set a "
        "method batch(indices) that returns a whole batch (docs/own-code.md)."
    )


def _pair(example: Any) -> Any:
    """Return an example as (input, target); target is None where it is no pair."""
    if isinstance(example, tuple | list) and len(example) == 2:
        return example
    return example, None


def _shape_mismatch(pairs: Sequence[Any], part: int) -> str | None:
    """Return two different shapes or structures of the examples' inputs (0) or targets (1)."""
    first = dict(_leaf_shapes(pairs[0][part]))
    for pair in pairs[1:]:
        shapes = dict(_leaf_shapes(pair[part]))
        if shapes.keys() != first.keys():
            structures = f"{_leaf_names(first)} and {_leaf_names(shapes)}"
            return f"{_PARTS[part]}s of different structure ({structures})"
        for path, shape in shapes.items():
            if shape != first[path]:
                return f"{_PARTS[part]}s{path} of the shapes {first[path]} and {shape}"
    return None


def _leaf_names(shapes: dict[str, list[int]]) -> str:
    return ", ".join(path or "one value" for path in shapes) or "nothing"


def _leaf_shapes(nest: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield the path and the shape of each value of a nested input or target."""
    for path, leaf in tree_flatten_with_path(nest)[0]:
        yield keystr(path), list(getattr(leaf, "shape", []))


def _unstackable_value(nest: Any, name: str) -> str | None:
    """Return the path and the type of the first value that cannot become a tensor."""
    for path, leaf in tree_flatten_with_path(nest)[0]:
        if not isinstance(leaf, _STACKABLE):
            kind = type(leaf)
            return f"{name}{keystr(path)} is a {kind.__module__}.{kind.__qualname__}"
    return None
