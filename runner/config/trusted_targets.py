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

from runner.config.signature import describe_key_location
from runner.config.targets import locate
from runner.utils.errors import ConfigError

_MODEL_FUNCTIONS = ("runner.models.", "torchvision.models.")
"""Packages whose functions return models."""
_KINDS: Mapping[str, tuple[tuple[str, ...], type]] = {
    "model": (("torch.nn.", *_MODEL_FUNCTIONS), nn.Module),
    "optimizer": (("torch.optim.",), Optimizer),
    "scheduler": (("torch.optim.lr_scheduler.",), LRScheduler),
}
"""By group: packages of trusted classes besides the runner's options, and their base class."""


def check_trusted(
    spec: Mapping[str, Any],
    groups: Collection[str],
    typed: Mapping[str, Any],
    where: object,
    key: str,
    own: bool = False,
) -> None:
    """Refuse a checkpoint's targets unless they are the runner's or torch's own for their group,
    this user's own code, or named by this command, too. Refuse secrets that were masked.

    Args:
        spec: of the checkpoint.
        groups: those that are taken from it.
        typed: this command's spec, as containers.
        where: the checkpoint.
        key: that names it.
        own: this user's key has signed the spec, whose targets are then called as they were by
            the command that composed it.

    Raises:
        ConfigError: names each refused target, before anything of it is imported.
    """
    problems = []
    for group in groups:
        ours = _targets(typed.get(group))
        for target in () if own else _targets(spec.get(group)):
            if target not in ours and not _known(group, target):
                problems.append(
                    f"{key}={where} names {group}._target_={target}, which is neither the "
                    f"runner's own nor code of {Path.cwd()} or PYTHONPATH: it is not called. "
                    f"Its config is not signed with your key ({describe_key_location()}). "
                    f"If you trust it, type {group}=... yourself, as for the training."
                )
        problems += [
            f"{key}={where} does not hold the secret {name}. Type {name}=<value>, and in "
            f"mode=evaluate {group}=... as for the training."
            for name in _hidden(group, spec.get(group))
        ]
    if problems:
        raise ConfigError(*problems)


def _hidden(name: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys of values that were masked in a checkpoint (see utils/secrets.py)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _hidden(f"{name}.{key}", item)
    elif isinstance(value, list):
        for item in value:
            yield from _hidden(name, item)
    elif isinstance(value, str) and "***" in value:
        yield name


def _targets(node: Any) -> list[Any]:
    """Return the targets at any depth: own code may call those nested in its arguments."""
    if isinstance(node, list | tuple):
        return [target for item in node for target in _targets(item)]
    if not isinstance(node, Mapping):
        return []
    own = [node["_target_"]] if node.get("_target_") is not None else []
    return [*own, *_targets(list(node.values()))]


def _known(group: str, target: Any) -> bool:
    if not isinstance(target, str):
        return False
    if target in _options(group):
        return True
    prefixes, kind = _KINDS.get(group, ((), object))
    if target.startswith(prefixes):
        found = _located(target)
        if isinstance(found, type):
            return issubclass(found, kind)
        return isinstance(found, FunctionType) and found.__module__.startswith(_MODEL_FUNCTIONS)
    root = target.partition(".")[0]
    if not _is_mine(root):
        return False
    # None if it does not import, which is reported where it is called. What an own module imports
    # (mine.os.system) is not own code: the module that defines it counts.
    found = _located(target)
    return found is None or _home(found) == root


def _options(group: str) -> set[str]:
    """Return the targets of the runner's own options of a group."""
    texts = [p.read_text() for p in Path(str(files("runner.conf"))).glob(f"{group}/*.yaml")]
    return {t for text in texts for t in re.findall(r"^ *_target_: (\S+)$", text, re.MULTILINE)}


def _located(target: str) -> Any:
    try:
        return locate(target)
    except ConfigError:
        return None


def _home(found: Any) -> str:
    """Return the top-level package of the module that defines a class or function."""
    return str(getattr(found, "__module__", "")).partition(".")[0]


def _is_mine(root: str) -> bool:
    """Return whether a top-level name is imported from the working directory or PYTHONPATH, not
    from Python's installation. Imports nothing."""
    if root == "runner" or root in sys.stdlib_module_names:
        return False
    own = [place for place in sys.path if not _is_installation(Path(place).resolve())]
    mine = PathFinder.find_spec(root, own)
    return mine is not None and _places(PathFinder.find_spec(root, sys.path)) == _places(mine)


def _is_installation(place: Path) -> bool:
    """Return whether a folder has installed packages: below Python's own folders, or those of
    `pip install --user`, of another environment, of the system."""
    installed = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    named = {"site-packages", "dist-packages"} & {*place.parts}
    return bool(named or installed & {*place.parents})


def _places(spec: ModuleSpec | None) -> list[str]:
    if spec is None:
        return []
    found = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return [str(Path(place).resolve()) for place in found]
