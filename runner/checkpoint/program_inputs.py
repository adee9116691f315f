"""The inputs of an exported program: plain containers of tensors that need no class of the runner.

| inputs of a batch | arguments of the program |
| --- | --- |
| a tensor | the tensor |
| a dict, KeywordInputs | one plain dict |
| PositionalInputs | the tensors, by position |
"""

from typing import Any

import torch
from torch import Tensor

from runner.data.batch_layout import PositionalInputs
from runner.precision.contract import CPU_DEVICE
from runner.utils.files import os_error_reason

_MESSAGE_CHARACTERS = 300


TRACED_ROWS = 4
"""Rows of the batch that is traced and compared: torch.export takes one row for a constant."""


class ExportError(Exception):
    """A model that cannot be exported; one line says why."""


class InputError(Exception):
    """Inputs that an exported program cannot take; one line says why."""


def error_line(error: Exception) -> str:
    """Return the kind of an error and its first line; of an ExportError its message alone."""
    if isinstance(error, ExportError | InputError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return os_error_reason(error)
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0][:_MESSAGE_CHARACTERS]}"


def named_tensors(inputs: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch's inputs by name, in order.

    A single tensor has the name inputs; tensors by position are input_0, input_1, ...

    Raises:
        InputError: an input is no tensor with a batch of examples, or they differ in their number.
    """
    if isinstance(inputs, dict):
        named = {str(name): value for name, value in inputs.items()}
    elif type(inputs) is PositionalInputs:
        named = {f"input_{i}": value for i, value in enumerate(inputs)}
    else:
        named = {"inputs": inputs}
    if not named:
        raise InputError("its forward takes no field of a batch")
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or not len(value):
            which = "input" if value is inputs else f"input {name}"
            kind = type(value).__name__
            raise InputError(f"its {which} is no tensor with a batch of examples, but a {kind}")
    if len({len(value) for value in named.values()}) > 1:
        sizes = ", ".join(f"{name}: {len(value)}" for name, value in named.items())
        raise InputError(f"its inputs differ in their number of examples ({sizes})")
    return named


def first_rows(inputs: Any, count: int) -> Any:
    """Return `count` rows of each tensor, in the inputs' own container; a short batch is repeated.

    Raises:
        InputError: as named_tensors.
    """
    rows = [
        t[torch.arange(count, device=t.device) % len(t)] for t in named_tensors(inputs).values()
    ]
    if isinstance(inputs, dict):
        return type(inputs)(zip(inputs, rows, strict=True))
    return PositionalInputs(rows) if type(inputs) is PositionalInputs else rows[0]


def program_arguments(inputs: Any) -> tuple[Any, ...]:
    """Return the arguments of the program for inputs, on the CPU."""
    tensors = [tensor.to(CPU_DEVICE) for tensor in named_tensors(inputs).values()]
    if isinstance(inputs, dict):
        return (dict(zip(inputs, tensors, strict=True)),)
    return tuple(tensors)


def batch_of_arguments(kind: type, arguments: tuple[Any, ...]) -> Any:
    """Return the inputs of a batch, an object of `kind`, from the arguments of the program."""
    if issubclass(kind, dict):
        return kind(arguments[0])
    return PositionalInputs(arguments) if kind is PositionalInputs else arguments[0]


def token_names(inputs: Any) -> list[str]:
    """Return the names of inputs that look like sequences: whole numbers [N, T], T from 2."""
    named = named_tensors(inputs).items()
    return [
        name
        for name, tensor in named
        if tensor.ndim == 2 and tensor.shape[1] > 1 and not tensor.is_floating_point()
    ]


def shortened(inputs: Any, names: list[str]) -> Any:
    """Return a batch whose tensors [N, T] of these names are cut to half of their T, 2 and up."""
    tensors = named_tensors(inputs)
    for name in names:
        length = tensors[name].shape[1]
        # Contiguous, as the tensors of a batch are: some forwards view them in another shape.
        tensors[name] = tensors[name][:, : max(length // 2, 2)].contiguous()
    values = list(tensors.values())
    if isinstance(inputs, dict):
        return type(inputs)(zip(inputs, values, strict=True))
    return PositionalInputs(values) if type(inputs) is PositionalInputs else values[0]
