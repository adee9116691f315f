"""Make batches of examples, by stacking or by data.collate, and explain why one cannot be made.

Loading processes return a CollateFailure instead of raising: an exception that crosses a process
boundary loses its type, and the explanation with it.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import default_collate

from runner.utils.errors import RunnerError
from runner.utils.stop_signals import Stopped

_PARTS = ("input", "target")
_OWN_COLLATOR = (
    "type data.collate=runner.data.padding.pad or a function of your own that takes the list of "
    "examples, or give the data set a method batch(indices) (docs/own-code.md)."
)
_STACKABLE = Tensor | np.ndarray | np.number | int | float | complex | str


@dataclass(frozen=True)
class WholeBatch:
    """A batch that a data set's `batch(indices)` has made, which needs no stacking."""

    batch: Any


@dataclass(frozen=True)
class CollateFailure:
    """The message of a batch that could not be made, in place of the batch."""

    problem: str


@dataclass(frozen=True)
class Collator:
    """A function that makes a batch of a list of examples, in place of stacking them.

    Attributes:
        name: dotted path that data.collate names.
        function: takes the list of examples as the data set yields them, and returns their batch.
    """

    name: str
    function: Callable[[list[Any]], Any]

    def __call__(self, examples: Any) -> Any:
        """Return the batch of a list of examples, or a CollateFailure that explains."""
        examples = list(examples)
        try:
            batch = self.function(examples)
        except Stopped:
            raise  # a signal, which is no failure of the function
        except Exception as error:  # of whatever type the function raises
            return CollateFailure(self._problem(len(examples), _reason(error)))
        if batch is None:
            return CollateFailure(self._problem(len(examples), "it returns None"))
        return batch

    def _problem(self, count: int, reason: str) -> str:
        return (
            f"data.collate={self.name} fails on {count} examples: {reason}. It is called with a "
            "list of examples, each as the data set yields it, and returns their batch "
            "(docs/own-code.md)."
        )


def _reason(error: Exception) -> str:
    """Return an error's type and text, and the line of code that raised it."""
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, RunnerError):
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}, line {place.lineno})"


def makes_batches(dataset: Any) -> bool:
    """Return whether a data set has a method batch(indices) that makes a whole batch."""
    method = getattr(dataset, "batch", None)
    if not callable(method):
        return False
    try:
        names = [*signature(method).parameters]
    except (TypeError, ValueError):
        return True
    # Dataset.batch(batch_size) of Hugging Face's datasets groups rows, and takes no indices.
    return names[:1] != ["batch_size"]


def collate(examples: Any) -> Any:
    """Return the batch of a list of examples (input, target), or a CollateFailure that explains.

    A WholeBatch is returned as its batch.
    """
    if isinstance(examples, WholeBatch):
        return examples.batch
    try:
        return default_collate(examples)
    except Stopped:
        raise
    except Exception as error:  # of whatever type the examples' own classes raise
        return CollateFailure(collate_problem(examples, error))


def collate_problem(examples: Sequence[Any], error: Exception) -> str:
    """Return why examples cannot be stacked into a batch, and what to change.

    Args:
        examples: of one batch.
        error: that torch's default_collate raised for them.
    """
    pairs = [_pair(example) for example in examples]
    if isinstance(pairs[0][1], Mapping) and "boxes" in pairs[0][1]:
        return (
            "data: images with boxes are not stacked: they differ in the number of boxes. Type "
            "data.collate=runner.data.detection.collate_detection (docs/own-code.md)."
        )
    for part in range(2):
        mismatch = _shape_mismatch(pairs, part)
        if mismatch:
            return (
                f"data: the examples of a batch cannot be stacked: {mismatch}. Pad or crop them to "
                f"one size in __getitem__, or pad them in each batch: {_OWN_COLLATOR}"
            )
    for part in range(2):
        value = _unstackable_value(pairs[0][part], _PARTS[part])
        if value:
            return (
                f"data: the examples of a batch are not tensors: {value}. Return tensors from "
                f"__getitem__ (torch.as_tensor(...)), or make them in each batch: {_OWN_COLLATOR}"
            )
    text = str(error).strip()
    reason = text.splitlines()[0].rstrip(".") if text else ""
    return (
        f"data: the examples of a batch cannot be stacked: {type(error).__name__}: {reason}. "
        "Return (input, target) with the same structure for every index, or make the batch "
        f"yourself: {_OWN_COLLATOR}"
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
