"""Pad examples of different lengths to one batch: data.collate=runner.data.padding.pad."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.core import ConfigError, batch_layout

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
        raise ConfigError(f"multiple_of={multiple_of} does not fit. Allowed: numbers from 1.")
    if examples is None:
        return partial(
            pad, input_value=input_value, target_value=target_value, multiple_of=multiple_of
        )

    first = examples[0]
    if isinstance(first, Mapping):
        fills = dict.fromkeys(batch_layout.TARGET_FIELDS, target_value) | dict.fromkeys(
            _MASK_FIELDS, 0
        )
        batch = {}
        for name in first:
            missing = [i for i, example in enumerate(examples) if name not in example]
            if missing:
                raise ConfigError(f"example {missing[0]} of the batch lacks the field {name}")
            values = [example[name] for example in examples]
            batch[name] = _stacked(name, values, fills.get(name, input_value), multiple_of)
        return batch
    if not isinstance(first, tuple | list) or len(first) < 2:
        kind = type(first).__name__
        raise ConfigError(f"an example is a {kind}. Yield (input, target), or a dict with labels")
    *inputs, targets = zip(*examples, strict=True)
    columns = [
        _stacked(f"input {i}", values, input_value, multiple_of) for i, values in enumerate(inputs)
    ]
    return (*columns, _stacked("the target", targets, target_value, multiple_of))


def _stacked(name: str, values: Sequence[Any], fill: float, multiple_of: int) -> Any:
    """Return the tensor of one field's values, [B, ...]; a list of values that are no numbers.

    Raises:
        ConfigError: the values differ in more than their length.
    """
    rows: list[Tensor] = []
    for value in values:
        if not isinstance(value, Tensor | np.ndarray | np.generic | int | float | list):
            return list(values)
        try:
            rows.append(torch.as_tensor(value))
        except (TypeError, ValueError, RuntimeError):
            return list(values)
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
