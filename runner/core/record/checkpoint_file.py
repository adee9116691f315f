"""Save, read and validate checkpoint files, without unpickling anything but tensors.

`step-<n>.pt` is a checkpoint. Where weights are sharded, the folder `step-<n>.shards` holds the
shards of all processes, in safetensors files that torch.distributed.checkpoint writes, and the file
a mark in place of each sharded tensor. They load in any number of processes.
"""

import os
import shutil
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from runner.core.base.accelerators import is_tpu
from runner.core.base.errors import ConfigError
from runner.core.base.files import (
    check_values,
    check_version,
    interpolation_problem,
    write_with_torch,
)
from runner.core.base.tensor_facts import is_sharded
from runner.core.base.torchrun import process_rank
from runner.core.config.schema import RunSpec
from runner.core.config.signature import is_signed

if TYPE_CHECKING:  # importing them takes time that a run without shards need not spend
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.tensor import DTensor

FORMAT = 2
"""Version of a checkpoint; raised where a key changes its meaning or goes away."""
_KEYS: Mapping[type, Sequence[str]] = {
    dict: ("spec", "choices", "bypassed", "precision_state", "metrics", "model", "loss_scale"),
    str: ("precision", "layout"),
    int: ("step", "epoch", "skipped_steps"),
    list: ("optimizers", "schedulers"),
}
"""Keys of a checkpoint by the type of their values."""
SPEC_SIGNATURE_PURPOSE = "spec"
"""Purpose of a checkpoint's signature; see runner.core.config.signature.sign."""
_SPEC_MAPPINGS = {part.name for part in fields(RunSpec) if part.default is MISSING} - {"sections"}
"""Keys of a spec whose values are mappings."""


def is_signed_by_user(content: Mapping[str, Any]) -> bool:
    """Return whether this user's key has signed the spec that a checkpoint holds."""
    return is_signed(SPEC_SIGNATURE_PURPOSE, repr(content["spec"]), content.get("signature"))


def save(folder: Path, content: Mapping[str, Any], keep: int, best: bool = False) -> Path:
    """Write `step-<n>.pt`, then delete all but the newest `keep` checkpoints.

    Args:
        folder: of the run's checkpoints; made if it is missing.
        content: what training.state_dict.checkpoint_state_dict returns. Its shards, if any, have
            been written before.
        keep: number of the newest checkpoints that stay.
        best: make `best.pt` another name of the file, too.

    Returns:
        The path of the new file.

    Raises:
        OSError: the file cannot be written; the earlier checkpoints are unchanged.
    """
    path = checkpoint_path(folder, content["step"])
    with write_with_torch(path) as file:
        # The checkpoint then loads where torch_tpu is not installed.
        on_host = tree_map_only(Tensor, lambda t: t.cpu() if is_tpu(t.device) else t, dict(content))
        torch.save(on_host, file)
    # The rename must be on the disk before the deletions: after a power cut, a folder without both
    # the new and the old names would hold no checkpoint.
    names = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(names)
    finally:
        os.close(names)
    for old in checkpoints_in(folder)[:-keep]:
        # The file first: shards without it are removed at the next start, while a file without its
        # shards would look like a checkpoint to resume from.
        old.unlink()
        shutil.rmtree(shards_folder(old), ignore_errors=True)
    if best:
        best_path = path.with_name("best.pt")
        shards = shards_folder(path)
        # Hard links cost no space, and outlive the deletion of the checkpoint's own name.
        if shards.is_dir():
            shutil.rmtree(shards_folder(best_path), ignore_errors=True)
            shutil.copytree(shards, shards_folder(best_path), copy_function=os.link)
        # os.link does not replace a file; a rename does, and there is a best.pt at any moment.
        link = best_path.with_suffix(".partial")
        link.unlink(missing_ok=True)
        os.link(path, link)
        link.replace(best_path)
    return path


def shards_folder(path: Path) -> Path:
    """Return the folder of the shards that several processes wrote of a checkpoint."""
    return path.with_suffix(SHARDS_SUFFIX)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}.pt"


def rename_superseded(folder: Path, step: int) -> None:
    """Rename the checkpoints after the step that a run resumes from, so that none is found again.

    They belong to steps that are now trained again, or are damaged.
    """
    for path in checkpoints_in(folder):
        # Paths compare as steps do: their numbers have leading zeros.
        if path > checkpoint_path(folder, step):
            path.replace(path.with_suffix(".superseded"))


def load(path: Path) -> dict[str, Any]:
    """Return a checkpoint's content, with its tensors on the CPU.

    Raises:
        ConfigError: the file is not one of ours, or damaged.
    """
    content = _unpickle(path)
    if isinstance(content, dict) and any(isinstance(v, Tensor) for v in content.values()):
        raise _lone_weights(path, "was not written by this runner: it holds")
    if not isinstance(content, dict):
        raise ConfigError(f"checkpoint={path} was not written by this runner: it is no dict.")
    check_version(
        f"checkpoint={path}",
        "checkpoint",
        content.get("format"),
        FORMAT,
        "Give a checkpoint of this version of precision-runner, or use the version that wrote it.",
    )
    problem = next(_format_problems(content), None)
    if problem:
        raise ConfigError(f"checkpoint={path} was not written by this runner: {problem}.")
    checksums = content.get("parts")
    if checksums:
        check_shards(shards_folder(path), checksums)
        # The optimizer state is sharded, or filled, where it is restored.
        for key in ("model", "average"):
            if key in content:
                content[key] = load_full(content[key], shards_folder(path))
    return content


def _unpickle(path: Path) -> Any:
    """Return what a file of torch.save holds, tensors in plain containers.

    Raises:
        ConfigError: there is no such file, or it is damaged or of another kind.
    """
    if not path.is_file():
        raise ConfigError(f"checkpoint={path} is no file. Give a step-*.pt file of a run.")
    if path.suffix == ".safetensors":
        raise _lone_weights(path, "holds")
    try:
        with ZipFile(path) as file:
            # torch compresses no member. A compressed one is from elsewhere, and a small file of
            # this kind may unpack to more than the memory.
            if any(member.compress_type != ZIP_STORED for member in file.infolist()):
                raise BadZipFile
            # torch.load does not compare the checksums that torch.save writes.
            damaged = file.testzip()
            if damaged is not None:
                raise ConfigError(f"checkpoint={path} is damaged: {damaged} has changed on disk.")
    except (BadZipFile, OSError, EOFError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"checkpoint={path} is no checkpoint or is cut short. Give a step-*.pt file of a run."
        ) from error
    # weights_only: nothing in the file is executed. mmap: memory is used for what is read only, not
    # for the optimizer state of a checkpoint whose weights alone are wanted.
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # torch advises weights_only=False, which would execute the file.
        raise ConfigError(
            f"checkpoint={path} cannot be read: it is damaged, or holds Python objects, and a "
            "pickle is not executed here. Give a step-*.pt file of a run."
        ) from error


def _lone_weights(path: Path, verb: str) -> ConfigError:
    """Return the error for weights that name no model and no data to evaluate."""
    return ConfigError(
        f"checkpoint={path} {verb} weights alone, without model and data. Give a step-*.pt file, "
        f"or start a run from these weights: init.weights={path} with model= and data=."
    )


def _format_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs from a checkpoint's format: a file from elsewhere may hold anything."""
    # The caller takes the first problem only, so each check may rely on those before it.
    for kind, keys in _KEYS.items():
        yield from _kind_problems(content, keys, kind)
    for key in ("choices", "bypassed"):
        names = [*content[key].keys(), *content[key].values()]
        if not all(isinstance(name, str) for name in names):
            yield f"its {key} are no names"
    yield from _average_problems(content)
    learned = content.get("learned", {})
    if not isinstance(learned, dict) or not isinstance(learned.get("classes", []), list):
        yield "its learned facts are no dict with a list of classes"
    spec = content["spec"]
    yield from _kind_problems(spec, _SPEC_MAPPINGS & spec.keys(), dict, "spec.")
    try:
        check_values(spec)
        problem = interpolation_problem(spec)
    except (TypeError, ValueError, ConfigError):
        problem = "holds what no config does"
    if problem:
        yield f"its spec {problem}"


def _kind_problems(
    values: Mapping[str, Any], keys: Iterable[str], kind: type, prefix: str = ""
) -> Iterator[str]:
    """Yield which of some values, by their keys, is missing or not of a type."""
    for key in keys:
        if not isinstance(values.get(key), kind):
            yield f"its {prefix}{key} is no {kind.__name__}"


def _average_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs from the format of averaged weights, which most files do not hold."""
    average = content.get("average")
    if average is None:
        return
    weights = average.get("weights") if isinstance(average, dict) else None
    if not isinstance(weights, dict) or not isinstance(average.get("decay"), float):
        yield "its average is no dict of a decay and weights"
        return
    for name, value in weights.items():
        shape = stored_shape(value)
        if shape is None or shape != stored_shape(content["model"].get(name)):
            yield f"its average of {name} is of no weight of the model"


class LoadedCheckpoint(NamedTuple):
    """A checkpoint's file, and its content as `load` returns it.

    Attributes:
        path: of the file, or of the file or folder that init.weights names.
        content: of weights without a checkpoint only spec (empty), precision, layout and model.
        source: of init.weights, the format of the file in words; empty for any other checkpoint.
    """

    path: Path
    content: Mapping[str, Any]
    source: str = ""


def checkpoints_of_run(run: Path) -> list[Path]:
    """Return the checkpoints of a run by its folder, oldest first."""
    return checkpoints_in(run / "checkpoints")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first; best.pt is a copy of one of them."""
    return sorted(folder.glob("step-*.pt"))


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
