"""Load arrays of NumPy's .npz files."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from runner.core import ConfigError
from runner.data.splits import Splits, TensorFields, held_out, split_fields
from runner.data.unpacked_size import check_unpacked


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
        Floating arrays in float64 where the file has it, else in float32; integers and booleans as
        they are, labels of integers in int64. What a model gets of them is the precision's matter.

    Raises:
        ConfigError: a file or an array is missing, arrays differ in N, or do not fit into memory.
    """
    fields = _fields(path, target, inputs)
    if val_path is not None:
        return Splits(TensorFields(fields), TensorFields(_fields(val_path, target, inputs)))
    val = held_out(len(fields["labels"]), val_fraction, "npz")
    return split_fields(fields, val, seed)


def _fields(path: str, target: str, inputs: Sequence[str] | None) -> dict[str, Tensor]:
    if not Path(path).is_file():
        raise ConfigError(f"data=npz: {path} is no file. Type data.path=<file.npz>.")
    arrays = _arrays(path, target, inputs)
    names = [name for name in arrays if name != target] if inputs is None else [*inputs]
    if "labels" in names and target != "labels":
        raise ConfigError(
            f"data=npz: {path} has an array labels, and data.target={target} becomes the field of "
            "that name. Type data.target=labels, or data.inputs=[<the others>]."
        )
    for name, array in arrays.items():
        problem = ""
        if array.dtype.kind not in "biufc":
            problem = f"holds {array.dtype}, no numbers"
        elif array.ndim == 0:
            problem = "is one number, not one for each example"
        if problem:
            advice = "data.target=<another>" if name == target else "data.inputs=[<the others>]"
            raise ConfigError(f"data=npz: array {name} of {path} {problem}. Type {advice}.")
    if len({*map(len, arrays.values())}) != 1:
        counts = ", ".join(f"{name}: {len(array)}" for name, array in arrays.items())
        raise ConfigError(f"data=npz: the arrays of {path} differ in their length: {counts}.")
    return {name: as_input(arrays[name]) for name in names} | {"labels": as_target(arrays[target])}


def _arrays(path: str, target: str, inputs: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Return the arrays of a file that are read, by name."""
    try:
        with Path(path).open("rb") as file:
            # Reading pickled objects could run code.
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise ConfigError(
                    f"data=npz: {path} is one array. Type numpy.savez(path, x=..., y=...)."
                )
            names = dict.fromkeys((*(loaded.files if inputs is None else inputs), target))
            missing = [name for name in names if name not in loaded.files]
            if missing:
                raise ConfigError(
                    f"data=npz: {path} has no array {', '.join(missing)}; it has "
                    f"{', '.join(loaded.files)}. Type data.target=<name> and data.inputs=[<names>]."
                )
            size = sum(loaded.zip.getinfo(f"{name}.npy").file_size for name in names)
            check_unpacked(Path(path), size)
            return {name: loaded[name] for name in names}
    except (KeyError, ValueError, OSError, EOFError, MemoryError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"data=npz: {path} cannot be read: {error}.") from error


def as_input(array: np.ndarray) -> Tensor:
    """Return an array as a tensor: floating numbers in float32 or float64, others as they are."""
    if array.dtype.kind == "f":
        array = array.astype(np.float64 if array.itemsize >= 8 else np.float32, copy=False)
    # torch asks for the byte order of this machine.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.ascontiguousarray(native))


def as_target(array: np.ndarray) -> Tensor:
    """Return an array as a tensor: floating and complex numbers as inputs, others in int64."""
    tensor = as_input(array)
    is_class = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.to(torch.int64) if is_class else tensor
