"""Load arrays of NumPy's .npz files."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from runner.data.splits import Splits, TensorFields, held_out, split_fields
from runner.utils.errors import ConfigError


def npz(
    path: str,
    target: str = "y",
    inputs: Sequence[str] | None = None,
    val_path: str | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
) -> Splits:
    """Load arrays [N, ...] of a file as the fields of a batch, each under its own name.

    Args:
        path: the file that numpy.savez wrote.
        target: the array with the targets; the batch's field is `labels`.
        inputs: the arrays that are the model's inputs; None for all others.
        val_path: file of the validation set; None takes val_fraction of path's examples.
        val_fraction: share for validation, between 0 and 1.
        seed: of the split.

    Returns:
        Floating arrays in float32, integers and booleans as they are, labels of integers in int64.

    Raises:
        ConfigError: a file or an array is missing, or arrays differ in N.
    """
    fields = _fields(path, target, inputs)
    if val_path is not None:
        return Splits(TensorFields(fields), TensorFields(_fields(val_path, target, inputs)))
    val = held_out(len(fields["labels"]), val_fraction, "npz")
    return split_fields(fields, val, seed)


def _fields(path: str, target: str, inputs: Sequence[str] | None) -> dict[str, Tensor]:
    if not Path(path).is_file():
        raise ConfigError(f"data=npz: {path} is no file. Type data.path=<file.npz>.")
    arrays = _arrays(path)
    names = [name for name in arrays if name != target] if inputs is None else [*inputs]
    used = (*names, target)
    missing = [name for name in used if name not in arrays]
    if missing:
        raise ConfigError(
            f"data=npz: {path} has no array {', '.join(missing)}; it has {', '.join(arrays)}. "
            "Type data.target=<name> and data.inputs=[<names>]."
        )
    if "labels" in names and target != "labels":
        raise ConfigError(
            f"data=npz: {path} has an array labels, and data.target={target} becomes the field of "
            "that name. Type data.target=labels, or data.inputs=[<the others>]."
        )
    for name in used:
        problem = ""
        if arrays[name].dtype.kind not in "biufc":
            problem = f"holds {arrays[name].dtype}, no numbers"
        elif arrays[name].ndim == 0:
            problem = "is one number, not one for each example"
        if problem:
            advice = "data.target=<another>" if name == target else "data.inputs=[<the others>]"
            raise ConfigError(f"data=npz: array {name} of {path} {problem}. Type {advice}.")
    if len({len(arrays[name]) for name in used}) != 1:
        counts = ", ".join(f"{name}: {len(arrays[name])}" for name in dict.fromkeys(used))
        raise ConfigError(f"data=npz: the arrays of {path} differ in their length: {counts}.")
    return {name: as_input(arrays[name]) for name in names} | {"labels": as_target(arrays[target])}


def _arrays(path: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name."""
    try:
        with Path(path).open("rb") as file:
            # Without pickle: an array of objects could run code.
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.ndarray):
                return {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, EOFError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"data=npz: {path} cannot be read: {error}.") from error
    raise ConfigError(
        f"data=npz: {path} holds one array without a name. Write it with numpy.savez(path, x=..., "
        "y=...)."
    )


def as_input(array: np.ndarray) -> Tensor:
    """Return an array as a tensor: floating numbers in float32, others as they are."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.float() if tensor.is_floating_point() else tensor


def as_target(array: np.ndarray) -> Tensor:
    """Return an array as a tensor: floating numbers in float32, others in int64."""
    tensor = as_input(array)
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)
