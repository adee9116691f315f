"""Decide what a file that is read back may have called: a stranger's must not run any code.

A checkpoint, a run's config and a sweep's manifest name code. It is called only if it is the
runner's or torch's own, if the command names it, too, or if the file is signed with this user's key
(signature.py). Where the code lies is no reason to trust it: a downloaded run's folder below the
working directory can be imported from there.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from runner.core import (
    ConfigError,
    LoadedCheckpoint,
    checkpoint_file,
    files,
    fmt,
    layout,
    refuse,
    signature,
    targets,
)

_MODEL_FUNCTIONS = ("runner.models.", "torchvision.models.")
"""Packages whose functions return models."""
_KINDS: Mapping[str, tuple[tuple[str, ...], type]] = {
    "model": (("torch.nn.", *_MODEL_FUNCTIONS), nn.Module),
    "data": (("torchvision.transforms.",), nn.Module),
    "task": (("torch.nn.",), nn.Module),
    "optimizer": (("torch.optim.",), Optimizer),
    "scheduler": (("torch.optim.lr_scheduler.",), LRScheduler),
}
"""Packages by group whose classes are trusted in addition to the runner's options, and the base
class that they must have."""

_OWN_FUNCTIONS: Mapping[str, tuple[str, ...]] = {"data": ("runner.data.padding.pad",)}
"""Functions of the runner by group that no option names."""

_CALLED_KEYS: Mapping[str, Collection[str]] = {
    "data": targets.GROUPS["data"].called_keys,
    "task": ("loss", "after_evaluation"),
}
"""Keys by group whose values may name a target as text."""


class SavedConfig(NamedTuple):
    """A config that is read back from a file.

    Attributes:
        values: resolved, as plain containers.
        path: of the file, or of the run's folder.
        key: config key that names it.
        is_signed: this user's key has signed the values, whose targets are then called as they were
            by the command that composed it.
    """

    values: Mapping[str, Any]
    path: Path
    key: str
    is_signed: bool = False


def checkpoint_config(saved: LoadedCheckpoint, key: str) -> SavedConfig:
    """Return the settings of a checkpoint's run, to be judged before any of them is called.

    Args:
        saved: the checkpoint.
        key: config key that names it.
    """
    is_signed = checkpoint_file.is_signed_by_user(saved.content)
    return SavedConfig(saved.content["spec"], saved.path, key, is_signed)


def check_trusted(config: SavedConfig, groups: Collection[str], typed: Mapping[str, Any]) -> None:
    """Refuse a file's untrusted targets, and secrets that were masked in it.

    A target is trusted if it is one of the runner's or torch's for its group, or named by this
    command, too.

    Args:
        config: of the file.
        groups: groups that are taken from it.
        typed: the nodes of this command's groups, as containers.

    Raises:
        ConfigError: names each refused target, before anything of it is imported.
    """
    source = f"{config.key}={config.path}"
    # A run without a signature has its store without one, too.
    end = ", and tracking.uri=<the store of its record>" if "resume" in config.key else ""
    problems = []
    for group in groups:
        node = config.values.get(group)
        typed_targets = [target for _, target in _group_targets(group, typed.get(group))]
        for name, target in () if config.is_signed else _group_targets(group, node):
            if target not in typed_targets and not _is_known(group, target):
                problems.append(
                    f"{source} names {name}={target}, which is neither the runner's own nor "
                    "torch's: it is not called. Its config is not signed with your key "
                    f"({signature.describe_key_location()}). If you trust it, type {group}=... "
                    f"yourself{end}."
                )
        problems += [
            f"{source} does not hold the secret {name}. Type {name}=<value>, and in mode=evaluate "
            f"{group}=... as for the training."
            for name in masked_keys(group, node)
        ]
    refuse(problems)


def masked_keys(name: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys of values that were masked in a checkpoint (core/base/secrets.py)."""
    for key, leaf in fmt.leaves(value, name):
        if "***" in str(leaf):  # a list is one leaf
            yield key


def _group_targets(group: str, node: Any) -> list[tuple[str, Any]]:
    """Return the dotted key and the target of each in a group's node, those that are given as text
    included."""
    values: list[tuple[str, Any]] = []
    for each in node if isinstance(node, list) else [node]:
        if not isinstance(each, Mapping):
            continue
        values += [(f"{group}.{key}", each.get(key)) for key in _CALLED_KEYS.get(group, ())]
        if group == "task":
            values += [(item.key, item.value) for item in targets.metric_items(each.get("metrics"))]
    texts = [(key, value) for key, value in values if isinstance(value, str)]
    return [*_targets(group, node), *texts]


def _targets(key: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the target of each at any depth: own code may call those nested in
    its arguments."""
    if isinstance(node, Mapping) and node.get("_target_") is not None:
        yield f"{key}._target_", node["_target_"]
    for child_key, child in targets.children(key, node):
        yield from _targets(child_key, child)


def _is_known(group: str, target: Any) -> bool:
    if not isinstance(target, str):
        return False
    own = [*_OWN_FUNCTIONS.get(group, ())]
    # The targets of the runner's own options of the group.
    for path in layout.BUILT_IN_CONFIGS.glob(f"{group}/*.yaml"):
        own += re.findall(r"^ *_target_: (\S+)$", path.read_text(), re.MULTILINE)
    if target in own:
        return True
    packages, base_class = _KINDS.get(group, ((), object))
    if group == "task" and target.startswith("torchmetrics."):
        # Imported where a metric is named: the package is optional, and slow to import.
        packages, base_class = ("torchmetrics.",), _locate_or_none("torchmetrics.Metric")
    if not target.startswith(packages):
        return False
    # These packages hold other things, too, which take files or run code, and modules that lead out
    # of them: torch.fx compiles names of modules as Python source.
    made = _locate_or_none(target)
    if isinstance(made, FunctionType) and made.__module__.startswith(_MODEL_FUNCTIONS):
        made = made.__annotations__.get("return")
    is_kind = isinstance(made, type) and issubclass(made, base_class)
    return is_kind and f"{made.__module__}.".startswith(packages)


def _locate_or_none(target: str) -> Any:
    try:
        return targets.locate(target)
    except ConfigError:
        return None


def folder_config(folder: Path, key: str) -> SavedConfig | None:
    """Return the settings in a run's folder; None where its config is gone.

    Args:
        folder: of the run.
        key: config key that names the folder or a file in it.

    Raises:
        ConfigError: the file is not a config as a run writes it.
    """
    path = folder / layout.CONFIG
    if not path.is_file():
        return None
    try:
        text = files.read_text(path, files.MAX_CONFIG_BYTES)
        files.check_values(yaml.safe_load(text), path)
        values: Any = OmegaConf.to_container(OmegaConf.create(text))
        problem = files.interpolation_problem(values)
        if not isinstance(values, dict):
            raise ValueError
    except (OSError, TypeError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException):
        raise ConfigError(f"{path} is damaged.") from None
    if problem:
        raise ConfigError(f"{path} {problem}.")
    signed = None
    with suppress(OSError, ValueError):
        signed = files.read_json(folder / layout.SIGNATURE)
    is_own = isinstance(signed, dict) and signature.is_signed(
        layout.CONFIG, text, signed.get("config")
    )
    return SavedConfig(values, folder, key, is_own)
