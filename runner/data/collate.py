"""Make batches of examples, by stacking or by data.collate, and explain why one cannot be made.

Loading processes return a CollateFailure instead of raising: an exception that crosses a process
boundary loses its type, and the explanation with it.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from runner.core import RunnerError, errors, random_streams, stop_signals
from runner.data.value_hash import value_digest


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
        first, second = (value_digest([*_arrays(batch)]) for batch in batches[1:])
        if first == second:
            return batches[2]
        return CollateFailure(
            f"data.collate={self.name} makes another batch when it is called a second time with "
            "the same examples and the same seed, so that no run could be resumed. Draw random "
            "numbers from torch's, numpy's or Python's global generators, which are seeded for "
            "each batch, or from an attribute `generator`."
        )


def _arrays(nest: Any) -> Iterator[Any]:
    """Yield the tensors and arrays of a batch, nested in mappings and lists."""
    if isinstance(nest, Tensor | np.ndarray):
        yield nest
    elif isinstance(nest, Mapping):
        yield from _arrays([*nest.values()])
    elif isinstance(nest, list | tuple):
        for part in nest:
            yield from _arrays(part)


def error_with_line(error: Exception) -> str:
    """Return an error's type and text, and the line of code that raised it."""
    text = " ".join(str(error).split()).rstrip(".")
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
    """Return the batch of a list of examples (input, target), or a CollateFailure that explains."""
    try:
        return default_collate(examples)
    except stop_signals.Stopped:
        raise
    except Exception as error:  # of whatever type the examples' own classes raise
        reason = f"{type(error).__name__}: {errors.first_line(error)}"
    first = examples[0]
    target = first[1] if isinstance(first, tuple | list) and len(first) == 2 else None
    if isinstance(target, Mapping) and "boxes" in target:
        return CollateFailure(
            "data: images with boxes are not stacked: they differ in the number of boxes. Type "
            "data.collate=runner.data.detection.collate_detection (docs/own-code.md)."
        )
    return CollateFailure(
        f"data: the examples of a batch cannot be stacked: {reason}. Return (input, target) of one "
        "structure in tensors, padded or cropped to one size in __getitem__, or make the batch "
        "yourself: type data.collate=runner.data.padding.pad or a function of your own that takes "
        "the list of examples, or give the data set a method batch(indices) (docs/own-code.md)."
    )
