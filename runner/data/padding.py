"""Pad examples of different lengths to one batch: data.collate=runner.data.padding.pad."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.utils.errors import ConfigError

_LABEL_FIELDS = ("label", "labels", "target", "targets")
"""Fields of a dict that are padded as targets."""
_MASK_FIELDS = ("attention_mask", "token_type_ids")
"""Fields of a dict that are padded with 0, whatever input_value is."""


def pad(
    examples: Sequence[Any] | None = None,
    *,
    input_value: float = 0,
    target_value: float = -100,
    multiple_of: int = 1,
) -> Any:
    """Return the batch of examples whose tensors have different lengths.

    Tensors, arrays and lists of numbers [T, ...] of one field become [B, longest T, ...]; numbers
    become [B]. Sizes after the first must be equal. Other values, such as texts, become a list.

    Args:
        examples: pairs (input, target), tuples with the target last, or dicts, in which `labels`
            is the target. None returns the function with the options set, as a node with
            `_target_` calls it.
        input_value: fills inputs; masks in dicts are filled with 0.
        target_value: fills targets; cross entropy leaves -100 out.
        multiple_of: lengths are rounded up to a multiple of this, for tensor cores.

    Returns:
        A tuple for tuples, a dict for dicts.

    Raises:
        ConfigError: an option does not fit, or the examples differ in more than their length.
    """
    if not isinstance(multiple_of, int) or multiple_of < 1:
        raise ConfigError(
            f"multiple_of={multiple_of} does not fit. Allowed: a whole number, 1 or more."
        )
    if examples is None:
        return partial(
            pad, input_value=input_value, target_value=target_value, multiple_of=multiple_of
        )

    def column(name: str, values: Sequence[Any], fill: float) -> Any:
        return _stacked(name, values, fill, multiple_of)

    first = examples[0]
    if isinstance(first, Mapping):
        return _padded_fields(examples, column, input_value, target_value)
    if not isinstance(first, tuple | list) or len(first) < 2:
        kind = type(first).__name__
        raise ConfigError(
            f"an example is a {kind}. Yield (input, target), or a dict of fields with labels"
        )
    columns = list(zip(*examples, strict=True))
    inputs = [column(f"input {i}", values, input_value) for i, values in enumerate(columns[:-1])]
    return (*inputs, column("the target", columns[-1], target_value))


def _padded_fields(
    examples: Sequence[Mapping[str, Any]],
    column: Callable[[str, Sequence[Any], float], Any],
    input_value: float,
    target_value: float,
) -> dict[str, Any]:
    """Return a dict of the batch of each field.

    Args:
        examples: dicts with the same fields.
        column: makes the batch of one field, given its name, its values and what fills it.
        input_value: fills inputs.
        target_value: fills labels.
    """
    batch = {}
    for name in examples[0]:
        fill = input_value
        if name in _LABEL_FIELDS:
            fill = target_value
        elif name in _MASK_FIELDS:
            fill = 0
        missing = [i for i, example in enumerate(examples) if name not in example]
        if missing:
            raise ConfigError(f"example {missing[0]} of the batch lacks the field {name}")
        batch[name] = column(name, [example[name] for example in examples], fill)
    return batch


def _stacked(name: str, values: Sequence[Any], fill: float, multiple_of: int) -> Any:
    """Return the tensor of one field's values, [B, ...]; a list of values that are no numbers.

    Raises:
        ConfigError: the values differ in more than their length.
    """
    tensors = [_tensor(value) for value in values]
    if any(tensor is None for tensor in tensors):
        return list(values)
    rows = [tensor for tensor in tensors if tensor is not None]
    if len({(row.ndim, row.shape[1:]) for row in rows}) > 1:
        shapes = sorted({str(list(row.shape)) for row in rows})
        raise ConfigError(
            f"{name} has the shapes {' and '.join(shapes[:2])}, and only the first size may differ"
        )
    if rows[0].ndim == 0:
        return torch.stack(rows)
    longest = max(len(row) for row in rows)
    length = -(-longest // multiple_of) * multiple_of
    batch = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), fill)
    for padded, row in zip(batch, rows, strict=True):
        padded[: len(row)] = row
    return batch


def _tensor(value: Any) -> Tensor | None:
    """Return a tensor, array, number or list of numbers as a tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic | int | float | list):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            return None
    return None
