"""Write and read the sharded tensors of a checkpoint.

The folder `step-<n>.shards` holds the shards of all processes, in safetensors files that
torch.distributed.checkpoint writes; `step-<n>.pt` holds everything else, with a mark in place of
each sharded tensor. They load in any number of processes, and nothing in them is unpickled.
"""

import os
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.core.base.errors import ConfigError
from runner.core.base.tensor_facts import is_sharded
from runner.core.base.torchrun import process_rank

if TYPE_CHECKING:  # importing them takes time that a run without shards need not spend
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.tensor import DTensor

SHARDS_SUFFIX = ".shards"
_MARK = "sharded"
"""Key of a mark, which stands for a sharded tensor; its value is the tensor's name in the files."""
_READ_BYTES = 1 << 24
"""Bytes of a file that are in memory at once while its checksum is computed."""

Checksums = dict[str, list[int]]
"""Size and checksum (CRC-32) of files by name."""


def extract_shards(value: Any, sharded: "dict[str, DTensor]", name: str = "") -> Any:
    """Copy plain containers with marks in place of sharded tensors.

    Args:
        value: dicts, lists and tuples of tensors and other values.
        sharded: gets the sharded tensors by their names in the files.
        name: of the value; the keys and indices that lead to a tensor are joined with slashes.
    """
    if is_sharded(value):
        # Weights that layers share are written once, under the first of their names. Storages are
        # compared, not addresses: an empty shard has the address 0, and all processes must agree
        # on the names.
        storage = value.to_local().untyped_storage()._cdata
        first_name = name
        for key, other in sharded.items():
            if other.to_local().untyped_storage()._cdata == storage:
                first_name = key
                break
        sharded.setdefault(first_name, value)
        return {_MARK: first_name, "shape": [*value.shape], "dtype": str(value.dtype)}
    if isinstance(value, Mapping):
        prefix = f"{name}/" if name else ""
        return {k: extract_shards(v, sharded, f"{prefix}{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(extract_shards(v, sharded, f"{name}/{i}") for i, v in enumerate(value))
    return value


def write_shards(folder: Path, sharded: "Mapping[str, DTensor]") -> Checksums:
    """Write this process's shards and wait until they are on the disk. All processes call it.

    Args:
        folder: the same for all processes; made if it is missing.
        sharded: the same names in all processes.

    Returns:
        Those of this process's files.

    Raises:
        OSError: a file cannot be written.
    """
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save({**sharded}, storage_writer=writer)
    except dcp.api.CheckpointException as error:
        raise OSError(_failure_reason(error)) from error
    # DCP numbers the files of the processes from 1.
    own_files = folder.glob(f"shard-{process_rank().index + 1:05d}-*")
    return {path.name: _sync_and_checksum(path) for path in own_files}


def check_shards(folder: Path, checksums: Checksums) -> None:
    """Compare the files with their checksums; each of several processes reads some of them.

    Raises:
        ConfigError: one has changed or is missing.
    """
    rank = process_rank()
    for i, (name, expected) in enumerate(sorted(checksums.items())):
        # The file may be a stranger's: a name in it must not lead out of the folder.
        path = folder / Path(name).name
        is_read_here = i % rank.world_size == rank.index
        try:
            actual = [path.stat().st_size, expected[1]]
            if is_read_here:
                actual = _sync_and_checksum(path)
        except OSError as error:
            raise ConfigError(
                f"checkpoint={folder}: {name} is missing: {error.strerror}."
            ) from None
        if actual != expected:
            raise ConfigError(f"checkpoint={folder} is damaged: {name} has changed on disk.")


def stored_shape(value: Any) -> list[int] | None:
    """Return the shape of a tensor, or of the sharded one that a mark names; None for others."""
    if isinstance(value, Tensor):
        return [*value.shape]
    is_mark = isinstance(value, Mapping) and _MARK in value
    return value.get("shape") if is_mark else None


def load_full(value: Any, folder: Path) -> Any:
    """Copy plain containers with full tensors on the CPU in place of the marks.

    Args:
        value: what extract_shards returned.
        folder: of the shards.

    Raises:
        ConfigError: the shards do not fit the marks.
    """
    tensors: dict[str, Tensor] = {}

    def unmarked(value: Any) -> Any:
        if isinstance(value, Mapping) and _MARK in value:
            empty = torch.empty(value["shape"], dtype=_dtype(value))
            return tensors.setdefault(value[_MARK], empty)
        if isinstance(value, Mapping):
            return {key: unmarked(item) for key, item in value.items()}
        return type(value)(map(unmarked, value)) if isinstance(value, list | tuple) else value

    content = unmarked(value)
    _load_in_place(folder, tensors)
    return content


def load_sharded(
    state: Mapping[Any, Mapping[str, Any]], params: Sequence[Tensor], folder: Path
) -> Any:
    """Return an optimizer's state, sharded as its parameters are.

    A mark is replaced by its shards from the folder, a full tensor is sharded.

    Args:
        state: values by the parameter's number and by name.
        params: the parameters.
        folder: holds the shards.

    Raises:
        ConfigError: the shards do not fit the parameters.
    """
    shards: dict[str, Tensor] = {}

    def sharded_like(param: Tensor, value: Any) -> Any:
        assert is_sharded(param)
        if isinstance(value, Mapping) and _MARK in value:
            empty = torch.empty_like(param, dtype=_dtype(value), requires_grad=False)
            return shards.setdefault(value[_MARK], empty)
        # One process wrote this checkpoint. A scalar, Adam's step for example, is not sharded.
        if isinstance(value, Tensor) and value.shape == param.shape and value.ndim:
            return shard_like(value, param)
        return value

    sharded_state = {}
    for i, values in state.items():
        sharded_state[i] = {key: sharded_like(params[i], value) for key, value in values.items()}
    _load_in_place(folder, shards)
    return sharded_state


def shard_like(full: Tensor, sharded: "DTensor") -> "DTensor":
    """Return a full tensor, which every process has, sharded as another one is."""
    from torch.distributed.tensor import distribute_tensor

    # Without a src_data_rank nothing is sent.
    return distribute_tensor(
        full.to(sharded.device), sharded.device_mesh, sharded.placements, src_data_rank=None
    )


def _load_in_place(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors in place; of a sharded one this process's shard."""
    if not tensors:
        return
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():
            # DCP warns that it loads in a single process. That is meant: each process reads what
            # it needs, and none waits for another.
            warnings.simplefilter("ignore")
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except dcp.api.CheckpointException as error:
        reason = _failure_reason(error)
        raise ConfigError(f"checkpoint={folder} does not fit: {reason}") from error


def _failure_reason(error: "CheckpointException") -> str:
    """Return the first process's reason of a failure, on one line."""
    first_failure, _ = next(iter(error.failures.values()))
    return " ".join(str(first_failure).split())


def _dtype(mark: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a mark names.

    Raises:
        ConfigError: it names none; the file may be a stranger's.
    """
    dtype = getattr(torch, str(mark["dtype"]).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"checkpoint: {mark['dtype']} is no dtype.")
    return dtype


def _sync_and_checksum(path: Path) -> list[int]:
    """Sync a file to the disk and return its size and CRC-32."""
    size = 0
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
        # A descriptor that was opened for reading serves for a sync, too.
        os.fsync(file.fileno())
    return [size, crc]
