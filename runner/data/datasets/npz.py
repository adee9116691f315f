"""Load arrays of NumPy's .npz files."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import psutil
import torch
from torch import Tensor

from runner.data.splits import Splits, TensorFields, held_out, split_fields
from runner.utils.errors import ConfigError


def npz(
    path: str,
    target: str = "y",
    inputs: Sequence[str] | Mapping[str, str] | None = None,
    val_path: str | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
) -> Splits:
    """Load arrays [N, ...] of a file as the fields of a batch, each under its own name.

    Args:
        path: the file that numpy.savez wrote.
        target: the array with the targets; the batch's field is `labels`.
        inputs: the arrays that are the model's inputs, or a mapping of fields' names to arrays;
            None for all others.
        val_path: file of the validation set; None takes val_fraction of path's examples.
        val_fraction: share for validation, between 0 and 1.
        seed: of the split.

    Returns:
        Floating arrays in float32, integers and booleans as they are, labels of integers in int64.

    Raises:
        ConfigError: a file or an array is missing, arrays differ in N, or do not fit into memory.
    """
    fields = _fields(path, target, inputs)
    if val_path is not None:
        return Splits(TensorFields(fields), TensorFields(_fields(val_path, target, inputs)))
    val = held_out(len(fields["labels"]), val_fraction, "npz")
    return split_fields(fields, val, seed)


def _fields(
    path: str, target: str, inputs: Sequence[str] | Mapping[str, str] | None
) -> dict[str, Tensor]:
    if not Path(path).is_file():
        raise ConfigError(f"data=npz: {path} is no file. Type data.path=<file.npz>.")
    with _opened(path) as file:
        # The headers alone: a small file may unpack to more than the memory holds.
        layouts = dict(_layouts(file))
        if inputs is None:
            inputs = [name for name in layouts if name != target]
        names = dict(inputs if isinstance(inputs, Mapping) else zip(inputs, inputs, strict=True))
        used = _checked_names(path, names, target, layouts)
        size = sum(prod(layouts[name][0]) * layouts[name][1].itemsize for name in used)
        if size > psutil.virtual_memory().available:
            raise ConfigError(
                f"data=npz: the arrays of {path} unpack to {size / 2**30:.1f} GiB, more than the "
                "memory that is free. Write smaller files, or a data set of your own that reads "
                "one example at a time (docs/own-code.md)."
            )
        arrays = {name: file[name] for name in used}
    fields = {field: as_input(arrays[name]) for field, name in names.items()}
    return fields | {"labels": as_target(arrays[target])}


def _checked_names(
    path: str, names: Mapping[str, str], target: str, layouts: Mapping[str, tuple[Any, np.dtype]]
) -> list[str]:
    """Return the arrays that are read.

    Args:
        path: of the file.
        names: the inputs' arrays by the names of their fields.
        target: array of the targets.
        layouts: shapes and dtypes of the file's arrays.

    Raises:
        ConfigError: one of them cannot be a field.
    """
    used = [*dict.fromkeys((*names.values(), target))]
    missing = [name for name in used if name not in layouts]
    if missing:
        raise ConfigError(
            f"data=npz: {path} has no array {', '.join(missing)}; it has {', '.join(layouts)}. "
            "Type data.target=<name> and data.inputs=[<names>]."
        )
    if "labels" in names and target != "labels":
        raise ConfigError(
            f"data=npz: {path} has an array labels, and data.target={target} becomes the field of "
            "that name. Type data.target=labels, or data.inputs=[<the others>]."
        )
    for name in used:
        shape, dtype = layouts[name]
        problem = ""
        if dtype.kind not in "biufc":
            problem = f"holds {dtype}, no numbers"
        elif not shape:
            problem = "is one number, not one for each example"
        if problem:
            advice = "data.target=<another>" if name == target else "data.inputs=[<the others>]"
            raise ConfigError(f"data=npz: array {name} of {path} {problem}. Type {advice}.")
    if len({layouts[name][0][0] for name in used}) != 1:
        counts = ", ".join(f"{name}: {layouts[name][0][0]}" for name in used)
        raise ConfigError(f"data=npz: the arrays of {path} differ in their length: {counts}.")
    return used


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Return the context of a file's arrays, in which damage to the file is a ConfigError."""
    try:
        with Path(path).open("rb") as file:
            # Without pickle: an array of objects could run code.
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise ConfigError(
                    f"data=npz: {path} holds one array without a name. Write it with "
                    "numpy.savez(path, x=..., y=...)."
                )
            yield loaded
    except (ValueError, OSError, EOFError, MemoryError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"data=npz: {path} cannot be read: {error}.") from error


def _layouts(file: Any) -> Iterator[tuple[str, tuple[tuple[int, ...], np.dtype]]]:
    """Yield the names of a file's arrays, with their shapes and dtypes, from the headers."""
    for name in file.files:
        with file.zip.open(f"{name}.npy") as stream:
            is_short = np.lib.format.read_magic(stream) == (1, 0)
            form = np.lib.format
            read = form.read_array_header_1_0 if is_short else form.read_array_header_2_0
            shape, _, dtype = read(stream)
            yield name, (shape, dtype)


def as_input(array: np.ndarray) -> Tensor:
    """Return an array as a tensor: floating numbers in float32, others as they are."""
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    # In the byte order of this machine, which torch asks for.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.ascontiguousarray(native))


def as_target(array: np.ndarray) -> Tensor:
    """Return an array as a tensor: floating and complex numbers as inputs, others in int64."""
    tensor = as_input(array)
    is_class = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.to(torch.int64) if is_class else tensor
