"""Save, read and validate checkpoint files, without unpickling anything but tensors."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from runner.core.base.errors import ConfigError
from runner.core.base.files import (
    check_values,
    check_version,
    interpolation_problem,
    write_with_torch,
)
from runner.core.base.tpu import is_tpu
from runner.core.config.schema import RunSpec
from runner.core.config.signature import is_signed
from runner.core.record import sharded_tensors

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
    return path.with_suffix(sharded_tensors.SHARDS_SUFFIX)


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
        sharded_tensors.check_shards(shards_folder(path), checksums)
        # The optimizer state is sharded, or filled, where it is restored.
        for key in ("model", "average"):
            if key in content:
                content[key] = sharded_tensors.load_full(content[key], shards_folder(path))
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
        for key in keys:
            if not isinstance(content.get(key), kind):
                yield f"its {key} is no {kind.__name__}"
    for key in ("choices", "bypassed"):
        names = [*content[key].keys(), *content[key].values()]
        if not all(isinstance(name, str) for name in names):
            yield f"its {key} are no names"
    yield from _average_problems(content)
    learned = content.get("learned", {})
    if not isinstance(learned, dict) or not isinstance(learned.get("classes", []), list):
        yield "its learned facts are no dict with a list of classes"
    for key in _SPEC_MAPPINGS:
        if not isinstance(content["spec"].get(key, {}), dict):
            yield f"its spec.{key} is no dict"
    try:
        check_values(content["spec"])
        problem = interpolation_problem(content["spec"])
    except (TypeError, ValueError, ConfigError):
        problem = "holds what no config does"
    if problem:
        yield f"its spec {problem}"


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
        shape = sharded_tensors.stored_shape(value)
        if shape is None or shape != sharded_tensors.stored_shape(content["model"].get(name)):
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
