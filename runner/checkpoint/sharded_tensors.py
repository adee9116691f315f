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

from runner.distributed.strategy import is_sharded
from runner.distributed.torchrun import process_rank
from runner.utils.errors import ConfigError

if TYPE_CHECKING:  # else every run would pay for the import
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.tensor import DTensor

SUFFIX = ".shards"
_MARK = "sharded"
"""Key of a mark, which stands for a sharded tensor; its value is the tensor's name in the files."""
_CHUNK = 1 << 24

Sums = dict[str, list[int]]
"""Size and checksum (CRC-32) of files by name."""


def extract_shards(value: Any, parts: "dict[str, DTensor]", name: str = "") -> Any:
    """Copy plain containers with marks in place of sharded tensors, which are put into `parts`."""
    if is_sharded(value):
        known = next((key for key, other in parts.items() if _same(other, value)), name)
        parts.setdefault(known, value)
        return {_MARK: known, "shape": [*value.shape], "dtype": str(value.dtype)}
    if isinstance(value, Mapping):
        return {
            k: extract_shards(v, parts, f"{name}/{k}" if name else str(k)) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(extract_shards(v, parts, f"{name}/{i}") for i, v in enumerate(value))
    return value


def _same(one: "DTensor", other: "DTensor") -> bool:
    """Return whether two names hold one tensor, also in a process whose shard of it is empty."""
    storages = (t.to_local().untyped_storage()._cdata for t in (one, other))
    return len({*storages}) == 1


def write_shards(folder: Path, parts: "Mapping[str, DTensor]") -> Sums:
    """Write this process's shards and wait until they are on the disk. All processes call it.

    Raises:
        OSError: a file cannot be written.
    """
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save({**parts}, storage_writer=writer)
    except dcp.api.CheckpointException as error:
        raise OSError(_reason(error)) from error
    return {p.name: _sum(p) for p in folder.glob(f"shard-{process_rank().rank + 1:05d}-*")}


def check_shards(folder: Path, sums: Sums) -> None:
    """Compare the files with their checksums; each of several processes reads some of them.

    Raises:
        ConfigError: one has changed or is missing.
    """
    here = process_rank()
    for i, (name, wanted) in enumerate(sorted(sums.items())):
        path = folder / Path(name).name
        mine = i % here.world_size == here.rank
        try:
            found = _sum(path) if mine else [path.stat().st_size, wanted[1]]
        except OSError as error:
            raise ConfigError(
                f"checkpoint={folder}: {name} is missing: {error.strerror}."
            ) from None
        if found != wanted:
            raise ConfigError(f"checkpoint={folder} is damaged: {name} has changed on disk.")


def load_full(value: Any, folder: Path) -> Any:
    """Copy plain containers with full tensors on the CPU in place of the marks."""
    wanted: dict[str, Tensor] = {}

    def fill(mark: Mapping[str, Any]) -> Tensor:
        return wanted.setdefault(mark[_MARK], torch.empty(mark["shape"], dtype=_dtype(mark)))

    made = _filled(value, fill)
    _read(folder, wanted)
    return made


def load_sharded(
    state: Mapping[Any, Mapping[str, Any]], params: Sequence[Tensor], folder: Path
) -> Any:
    """Return an optimizer's state, sharded as its parameters are.

    A mark is replaced by its shards from the folder, a full tensor is sharded.

    Args:
        state: values by the parameter's number and by name.
        params: the parameters.
        folder: holds the shards.
    """
    from torch.distributed.tensor import distribute_tensor

    wanted: dict[str, Tensor] = {}

    def like(param: Tensor, value: Any) -> Any:
        assert is_sharded(param)
        if isinstance(value, Mapping) and _MARK in value:
            empty = torch.empty_like(param, dtype=_dtype(value), requires_grad=False)
            return wanted.setdefault(value[_MARK], empty)
        if isinstance(value, Tensor) and value.shape == param.shape and value.ndim:
            mesh, placements = param.device_mesh, param.placements
            return distribute_tensor(value.to(param.device), mesh, placements, src_data_rank=None)
        return value

    made = {
        i: {key: like(params[i], value) for key, value in values.items()}
        for i, values in state.items()
    }
    _read(folder, wanted)
    return made


def _read(folder: Path, wanted: dict[str, Tensor]) -> None:
    """Fill tensors in place; of a sharded one this process's shard."""
    if not wanted:
        return
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is one process
            dcp.load(wanted, storage_reader=reader, no_dist=True)
    except dcp.api.CheckpointException as error:
        raise ConfigError(f"checkpoint={folder} does not fit: {_reason(error)}") from error


def _filled(value: Any, fill: Any) -> Any:
    if isinstance(value, Mapping):
        if _MARK in value:
            return fill(value)
        return {key: _filled(item, fill) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(item, fill) for item in value)
    return value


def _reason(error: "CheckpointException") -> str:
    """Return the first process's reason of a failure, on one line."""
    return " ".join(str(next(iter(error.failures.values()))[0]).split())


def _dtype(mark: Mapping[str, Any]) -> torch.dtype:
    found = getattr(torch, str(mark["dtype"]).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"checkpoint: {mark['dtype']} is no dtype.")
    return found


def _sum(path: Path) -> list[int]:
    """Sync a file to the disk and return its size and CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        os.fsync(file.fileno())
    return [size, crc]
