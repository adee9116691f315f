"""Decide which targets of a checkpoint are called: a file from a stranger must not run any code."""

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.resources import files
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from runner.config.loading_keys import loading_paths, task_paths
from runner.config.signature import describe_key_location
from runner.config.targets import locate
from runner.utils.errors import ConfigError

_MODEL_FUNCTIONS = ("runner.models.", "torchvision.models.")
"""Packages whose functions return models."""
_KINDS: Mapping[str, tuple[tuple[str, ...], type]] = {
    "model": (("torch.nn.", *_MODEL_FUNCTIONS), nn.Module),
    "data": (("torchvision.transforms.",), nn.Module),
    "task": (("torch.nn.",), nn.Module),
    "optimizer": (("torch.optim.",), Optimizer),
    "scheduler": (("torch.optim.lr_scheduler.",), LRScheduler),
}
"""By group: packages whose classes are trusted in addition to the runner's options, and the base
class that they must have."""

_OWN_FUNCTIONS: Mapping[str, tuple[str, ...]] = {"data": ("runner.data.padding.pad",)}
"""By group: functions of the runner that no option names."""


def check_trusted(
    spec: Mapping[str, Any],
    groups: Collection[str],
    typed: Mapping[str, Any],
    where: object,
    key: str,
    is_signed: bool = False,
) -> None:
    """Refuse a checkpoint's untrusted targets, and secrets that were masked in it.

    A target is trusted if it is one of the runner's or torch's for its group, this user's own code,
    or named by this command, too.

    Args:
        spec: of the checkpoint.
        groups: groups that are taken from it.
        typed: this command's spec, as containers.
        where: path of the checkpoint.
        key: config key that names the checkpoint.
        is_signed: this user's key has signed the spec, whose targets are then called as they were
            by the command that composed it.

    Raises:
        ConfigError: names each refused target, before anything of it is imported.
    """
    problems = []
    for group in groups:
        ours = [target for _, target in _group_targets(group, typed.get(group))]
        for name, target in () if is_signed else _group_targets(group, spec.get(group)):
            if target not in ours and not _is_known(group, target):
                problems.append(
                    f"{key}={where} names {name}={target}, which is neither the "
                    f"runner's own nor code of {Path.cwd()} or PYTHONPATH: it is not called. "
                    f"Its config is not signed with your key ({describe_key_location()}). "
                    f"If you trust it, type {group}=... yourself, as for the training."
                )
        problems += [
            f"{key}={where} does not hold the secret {name}. Type {name}=<value>, and in "
            f"mode=evaluate {group}=... as for the training."
            for name in _masked_keys(group, spec.get(group))
        ]
    if problems:
        raise ConfigError(*problems)


def _masked_keys(name: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys of values that were masked in a checkpoint (see utils/secrets.py)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _masked_keys(f"{name}.{key}", item)
    elif isinstance(value, list):
        for item in value:
            yield from _masked_keys(name, item)
    elif isinstance(value, str) and "***" in value:
        yield name


def _group_targets(group: str, node: Any) -> list[tuple[str, Any]]:
    """Return the dotted key and the target of each in a group's node, those that are given as text
    included."""
    paths = {"data": loading_paths, "task": task_paths}.get(group)
    return [*_targets(group, node), *(paths(node) if paths else ())]


def _targets(key: str, node: Any) -> list[tuple[str, Any]]:
    """Return the dotted key and the target of each at any depth: own code may call those nested in
    its arguments."""
    children: list[tuple[str, Any]] = []
    found: list[tuple[str, Any]] = []
    if isinstance(node, list | tuple):
        children = [(f"{key}[{i}]", item) for i, item in enumerate(node)]
    elif isinstance(node, Mapping):
        children = [(f"{key}.{name}", item) for name, item in node.items()]
        if node.get("_target_") is not None:
            found.append((f"{key}._target_", node["_target_"]))
    for child_key, child in children:
        found += _targets(child_key, child)
    return found


def _is_known(group: str, target: Any) -> bool:
    if not isinstance(target, str):
        return False
    if target in _options(group) or target in _OWN_FUNCTIONS.get(group, ()):
        return True
    if group == "task" and target.startswith("torchmetrics."):
        located = _locate_or_none(target)
        return isinstance(located, type) and issubclass(located, _metric_class())
    prefixes, base_class = _KINDS.get(group, ((), object))
    if target.startswith(prefixes):
        # These packages hold other things, too, which take files or run code.
        located = _locate_or_none(target)
        if isinstance(located, type):
            return issubclass(located, base_class)
        is_function = isinstance(located, FunctionType)
        return is_function and located.__module__.startswith(_MODEL_FUNCTIONS)
    root = target.partition(".")[0]
    if not _is_user_package(root):
        return False
    # None if it does not import, which is reported where it is called. What an own module imports
    # (mine.os.system) is not own code: the module that defines it counts.
    located = _locate_or_none(target)
    return located is None or _defining_package(located) == root


def _metric_class() -> Any:
    """Return torchmetrics.Metric, the base class of the metrics of task.metrics."""
    # Imported where a metric is named: the package is optional, and slow to import.
    return locate("torchmetrics.Metric")


def _options(group: str) -> set[str]:
    """Return the targets of the runner's own options of a group."""
    targets = set()
    for path in Path(str(files("runner.conf"))).glob(f"{group}/*.yaml"):
        targets.update(re.findall(r"^ *_target_: (\S+)$", path.read_text(), re.MULTILINE))
    return targets


def _locate_or_none(target: str) -> Any:
    try:
        return locate(target)
    except ConfigError:
        return None


def _defining_package(located: Any) -> str:
    """Return the top-level package of the module that defines a class or function."""
    return str(getattr(located, "__module__", "")).partition(".")[0]


def _is_user_package(root: str) -> bool:
    """Return whether a top-level name is imported from the working directory or PYTHONPATH, not
    from Python's installation."""
    if root == "runner" or root in sys.stdlib_module_names:
        return False
    # PathFinder finds a module without importing it: an import would run a stranger's choice.
    user_folders = [folder for folder in sys.path if not _is_installation(Path(folder).resolve())]
    in_user_folders = PathFinder.find_spec(root, user_folders)
    if in_user_folders is None:
        return False
    # An installed package of the same name may come first on the path, and would be imported.
    imported = PathFinder.find_spec(root, sys.path)
    return _module_paths(imported) == _module_paths(in_user_folders)


def _is_installation(folder: Path) -> bool:
    """Return whether a folder has installed packages: below Python's own folders, or those of
    `pip install --user`, of another environment, of the system."""
    prefixes = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    has_package_name = {"site-packages", "dist-packages"} & {*folder.parts}
    return bool(has_package_name or prefixes & {*folder.parents})


def _module_paths(spec: ModuleSpec | None) -> list[str]:
    if spec is None:
        return []
    # A namespace package has no file, only folders.
    paths = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return [str(Path(path).resolve()) for path in paths]
