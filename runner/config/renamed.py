"""Resolve module paths of version 0.1, which users' yaml files, checkpoints and code name.

RENAMED is the only table of them. Paths in configs and checkpoints are rewritten where they are
read, so that later code compares new paths only; Python imports of an old path give the new module.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

RENAMED: Mapping[str, str] = {
    "runner.adapter": "runner.training.adapters",
    "runner.data.base": "runner.data.splits",
    "runner.data.cifar": "runner.data.datasets.cifar",
    "runner.data.digits": "runner.data.datasets.digits",
    "runner.data.imagefolder": "runner.data.datasets.imagefolder",
    "runner.data.mnist": "runner.data.datasets.mnist",
    "runner.data.signals": "runner.data.datasets.signals",
    "runner.data.synthetic_images": "runner.data.datasets.synthetic_images",
    "runner.data.synthetic_tokens": "runner.data.datasets.synthetic_tokens",
    "runner.data.text": "runner.data.datasets.text",
    "runner.hooks": "runner.sweeps.hydra_callback",
    "runner.numerics": "runner.diagnostics.numerics",
    "runner.optimizers": "runner.training.lowbit_optimizers",
    "runner.precision.base": "runner.precision.contract",
    "runner.precision.precision": "runner.precision.contract",
    "runner.strategy": "runner.distributed",
    "runner.strategy.base": "runner.distributed.strategy",
    "runner.sweep": "runner.sweeps",
    "runner.tasks": "runner.training.tasks",
    "runner.tasks.base": "runner.training.tasks.task",
    "runner.tracking.base": "runner.tracking.tracker",
    "runner.tracking.none": "runner.tracking.tracker",
}
"""Old module or package to new one; what is below an old package moves with it."""


def current_path(path: str) -> str:
    """Return today's path of a module, class or function that may be named by an old path."""
    parts = path.split(".")
    # The longest old path first: runner.strategy.base moved elsewhere than runner.strategy.
    for length in range(len(parts), 1, -1):
        old = ".".join(parts[:length])
        if old in RENAMED:
            return ".".join([RENAMED[old], *parts[length:]])
    return path


def with_current_targets(node: Any) -> Any:
    """Return a copy of a config node in which every `_target_` has today's path."""
    if isinstance(node, Mapping):
        return {key: _current_value(key, value) for key, value in node.items()}
    if isinstance(node, list):
        return [with_current_targets(item) for item in node]
    return node


def _current_value(key: Any, value: Any) -> Any:
    if key == "_target_" and isinstance(value, str):
        return current_path(value)
    return with_current_targets(value)


class _RenamedModules(MetaPathFinder, Loader):
    """Import the new module where Python finds none of an old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if current_path(fullname) == fullname:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(current_path(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has set __spec__ to the old name's.
        old = module.__spec__
        assert old is not None
        module.__spec__ = old.loader_state


def install_import_hook() -> None:
    """Make old module paths importable; call it once, when the package is imported."""
    # Last: the hook costs nothing where Python's own finders find a module.
    sys.meta_path.append(_RenamedModules())
