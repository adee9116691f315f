"""Make batches of examples, by stacking or by data.collate, and explain why one cannot be made.

Loading processes return a CollateFailure instead of raising: an exception that crosses a process
boundary loses its type, and the explanation with it.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import default_collate

from runner.core import RunnerError, errors, random_streams, stop_signals
from runner.data.value_hash import is_dense_tensor

_PARTS = ("input", "target")
_OWN_COLLATOR = (
    "type data.collate=runner.data.padding.pad or a function of your own that takes the list of "
    "examples, or give the data set a method batch(indices) (docs/own-code.md)."
)
_STACKABLE = Tensor | np.ndarray | np.number | int | float | complex | str


@dataclass(frozen=True)
class CollateFailure:
    """The message of a batch that could not be made, in place of the batch."""

    problem: str


@dataclass
class Collator:
    """A function that makes a batch of a list of examples, in place of stacking them.

    The loader seeds torch's generator for each batch; the function's own `generator` gets the same
    seed. The first batch of each process is made again, to see that the seed alone decides it.

    Attributes:
        name: dotted path that data.collate names.
        function: takes the list of examples as the data set yields them, and returns their batch.
    """

    name: str
    function: Callable[[list[Any]], Any]
    _is_checked: bool = field(default=False, init=False)

    def __call__(self, examples: Any) -> Any:
        """Return the batch of a list of examples, or a CollateFailure that explains."""
        examples = list(examples)
        batch = None
        reason = "it returns None"
        try:
            batch = self._made(examples) if self._is_checked else self._compared(examples)
        except stop_signals.Stopped:
            raise  # a signal, which is no failure of the function
        except Exception as error:  # of whatever type the function raises
            reason = " ".join(str(error).split()).rstrip(".")
            if not isinstance(error, RunnerError):
                reason = error_with_line(error)
        if batch is not None:
            self._is_checked = True
            return batch
        return CollateFailure(
            f"data.collate={self.name} fails on {len(examples)} examples: {reason}. It is called "
            "with a list of examples, each as the data set yields it, and returns their batch."
        )

    def _made(self, examples: list[Any]) -> Any:
        random_streams.seed_generator(
            getattr(self.function, "generator", None), torch.initial_seed()
        )
        return self.function(examples)

    def _compared(self, examples: list[Any]) -> Any:
        """Return the batch of examples, or a CollateFailure if the same seed makes another one."""
        try:
            # A collator may change its examples.
            copies = [deepcopy(examples) for _ in range(2)]
        except stop_signals.Stopped:
            raise
        except Exception:  # of whatever type the examples' own classes raise
            return self._made(examples)
        random_state = random_streams.host_rng_state()
        # Before its first batch an object may have no generator yet, and make one with a seed of
        # its own, as transformers.DataCollatorForLanguageModeling(seed=3) does.
        batches = [self._made(examples)]
        for copy in copies:
            if batches[-1] is None:
                return None
            random_streams.set_host_rng_state(random_state)
            batches.append(self._made(copy))
        if _is_same(batches[1], batches[2]):
            return batches[2]
        return CollateFailure(
            f"data.collate={self.name} makes another batch when it is called a second time with "
            "the same examples and the same seed, so that no run could be resumed. Draw random "
            "numbers from torch's, numpy's or Python's global generators, which are seeded for "
            "each batch, or from an attribute `generator`."
        )


def _is_same(first: Any, second: Any) -> bool:
    """Return whether the tensors and arrays of two batches are equal; NaN equals NaN."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return [*first] == [*second] and _is_same([*first.values()], [*second.values()])
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if not is_dense_tensor(first):
            return True  # not compared: few operations take such tensors
        return first.dtype is second.dtype and torch.equal(first.nan_to_num(), second.nan_to_num())
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
    return True


def error_with_line(error: Exception) -> str:
    """Return an error's type and text, and the innermost line of the user's code."""
    text = " ".join(str(error).split()).rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    others = [f for f in frames if "site-packages" not in f.filename]
    users = [frame for frame in others if not frame.filename.startswith(package)]
    frame = (users or others or frames)[-1]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}, line {frame.lineno})"


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
    """Return the batch of a list of examples (input, target), or a CollateFailure that explains."""
    try:
        return default_collate(examples)
    except stop_signals.Stopped:
        raise
    except Exception as error:  # of whatever type the examples' own classes raise
        return CollateFailure(collate_problem(examples, error))


def collate_problem(examples: Sequence[Any], error: Exception) -> str:
    """Return why examples cannot be stacked into a batch, and what to change.

    Args:
        examples: of one batch.
        error: that torch's default_collate raised for them.
    """
    pairs = [input_and_target(example) for example in examples]
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
    for name, nest in zip(_PARTS, pairs[0], strict=True):
        for path, leaf in tree_flatten_with_path(nest)[0]:
            if not isinstance(leaf, _STACKABLE):
                kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
                return (
                    f"data: the examples of a batch are not tensors: {name}{keystr(path)} is a "
                    f"{kind}. Return tensors (torch.as_tensor(...)), or {_OWN_COLLATOR}"
                )
    reason = f"{type(error).__name__}: {errors.first_line(error)}"
    return (
        f"data: the examples of a batch cannot be stacked: {reason}. "
        f"Return (input, target) of one structure, or make the batch yourself: {_OWN_COLLATOR}"
    )


def input_and_target(example: Any) -> Any:
    """Return an example as (input, target); target is None where it is no pair."""
    if isinstance(example, tuple | list) and len(example) == 2:
        return example
    return example, None


def _shape_mismatch(pairs: Sequence[Any], part: int) -> str | None:
    """Return two different shapes or structures of the examples' inputs (0) or targets (1)."""
    first = _leaf_shapes(pairs[0][part])
    for pair in pairs[1:]:
        shapes = _leaf_shapes(pair[part])
        if shapes.keys() != first.keys():
            structures = f"{_leaf_names(first)} and {_leaf_names(shapes)}"
            return f"{_PARTS[part]}s of different structure ({structures})"
        for path, shape in shapes.items():
            if shape != first[path]:
                return f"{_PARTS[part]}s{path} of the shapes {first[path]} and {shape}"
    return None


def _leaf_names(shapes: dict[str, list[int]]) -> str:
    return ", ".join(path or "one value" for path in shapes) or "nothing"


def _leaf_shapes(nest: Any) -> dict[str, list[int]]:
    """Return the shape of each value of a nested input or target by its path."""
    leaves = tree_flatten_with_path(nest)[0]
    return {keystr(path): list(getattr(leaf, "shape", [])) for path, leaf in leaves}
