"""Save, read and validate checkpoint files, without unpickling anything but tensors."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from runner.checkpoint import sharded_tensors
from runner.config.renamed import with_current_targets
from runner.config.signature import is_signed
from runner.utils.errors import ConfigError
from runner.utils.files import write_with_torch
from runner.utils.tpu import is_tpu

FORMAT = 1
_KINDS = {
    "spec": dict,
    "choices": dict,
    "precision": str,
    "layout": str,
    "precision_state": dict,
    "metrics": dict,
    "step": int,
    "epoch": int,
    "skipped_steps": int,
    "model": dict,
    "optimizers": list,
    "schedulers": list,
    "loss_scale": dict,
}
_SIGNED = "spec"
_PARTS = ("model", "data", "task", "precision", "optimizer", "scheduler", "adapter", "debug")
"""Mappings in a spec."""


def is_own(content: Mapping[str, Any]) -> bool:
    """Check whether this user's key has signed the spec that a checkpoint holds."""
    spec = content.get("signed_spec", content["spec"])
    return is_signed(_SIGNED, repr(spec), content.get("signature"))


def save(folder: Path, content: Mapping[str, Any], keep: int) -> Path:
    """Write `step-<n>.pt`, then delete all but the newest `keep` checkpoints.

    The file is written under another name, synced and renamed, so that no earlier checkpoint is
    lost whatever happens meanwhile. Its shards, if any, have been written before.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint_path(folder, content["step"])
    aside = path.with_suffix(".partial")
    try:
        with write_with_torch(aside) as file:
            torch.save(tree_map_only(Tensor, _portable, dict(content)), file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    aside.replace(path)
    _sync(folder)  # the rename, too
    for old in sorted(folder.glob("step-*.pt"))[:-keep]:
        delete_checkpoint(old)
    return path


def delete_checkpoint(path: Path) -> None:
    """Remove a checkpoint, with its shards."""
    path.unlink()
    shutil.rmtree(shards_folder(path), ignore_errors=True)


def shards_folder(path: Path) -> Path:
    """Return the folder of the shards that several processes wrote of a checkpoint."""
    return path.with_suffix(sharded_tensors.SUFFIX)


def _portable(tensor: Tensor) -> Tensor:
    """Copy a tensor of torch_xla to the host: it ignores map_location when it is loaded."""
    return tensor.cpu() if is_tpu(tensor.device) else tensor


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}.pt"


def keep_best(path: Path) -> Path:
    """Keep a checkpoint as `best.pt`, too, by a hard link that outlives its own name."""
    best = path.with_name("best.pt")
    if (parts := shards_folder(path)).is_dir():
        shutil.rmtree(shards_folder(best), ignore_errors=True)
        shutil.copytree(parts, shards_folder(best), copy_function=os.link)
    aside = best.with_suffix(".partial")
    aside.unlink(missing_ok=True)
    os.link(path, aside)
    return aside.replace(best)


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename the checkpoints after the step that a run resumes from.

    They belong to steps that are now trained again, or are damaged.
    """
    for path in folder.glob("step-*.pt"):
        if path > checkpoint_path(folder, step):
            path.replace(path.with_suffix(".superseded"))


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def load(path: Path) -> dict[str, Any]:
    """Return a checkpoint's content, with its tensors on the CPU.

    Raises:
        ConfigError: the file is not one of ours, or damaged.
    """
    if not path.is_file():
        raise ConfigError(f"checkpoint={path} is no file. Give a step-*.pt file of a run.")
    try:
        with ZipFile(path) as file:  # torch does not compare the checksums that it writes
            if any(member.compress_type != ZIP_STORED for member in file.infolist()):
                raise BadZipFile  # torch compresses none, and one may unfold to anything
            if (damaged := file.testzip()) is not None:
                raise ConfigError(f"checkpoint={path} is damaged: {damaged} has changed on disk.")
    except (BadZipFile, OSError, EOFError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"checkpoint={path} is no checkpoint of this runner, or it is cut short. "
            "Give a step-*.pt file of a run."
        ) from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ConfigError(f"checkpoint={path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"checkpoint={path} was not written by this runner (format {FORMAT}).")
    if problem := next(_misfits(content), None):
        raise ConfigError(f"checkpoint={path} was not written by this runner: {problem}.")
    if sums := content.get("parts"):
        sharded_tensors.check_shards(shards_folder(path), sums)
        content["model"] = sharded_tensors.load_full(content["model"], shards_folder(path))
    content["signed_spec"] = content["spec"]  # the signature is of the text that was written
    content["spec"] = with_current_targets(content["spec"])
    return content


def _misfits(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs from a checkpoint's format: a file from elsewhere may hold anything."""
    for key, kind in _KINDS.items():
        if not isinstance(content.get(key), kind):
            yield f"its {key} is no {kind.__name__}"
    if not all(isinstance(text, str) for pair in content["choices"].items() for text in pair):
        yield "its choices are no names"
    bypassed = content.get("bypassed", {})  # older files have none
    if not isinstance(bypassed, dict) or not all(
        isinstance(text, str) for pair in bypassed.items() for text in pair
    ):
        yield "its bypassed are no names"
    for key in _PARTS:
        if not isinstance(content["spec"].get(key, {}), dict):
            yield f"its spec.{key} is no dict"
    try:
        spec = json.dumps(content["spec"])
    except (TypeError, ValueError):
        yield "its spec holds what no config does"
    else:
        if "${" in spec:
            yield "its spec holds an interpolation, which would be resolved here"


class LoadedCheckpoint(NamedTuple):
    """A checkpoint's file and what it holds."""

    path: Path
    content: Mapping[str, Any]
