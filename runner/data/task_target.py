"""Check and build the task with what the config adds to it: task.loss, task.metrics, ..."""

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from runner.config.targets import (
    build_group,
    locate,
    path_problems,
    runner_values,
    without_runner_keys,
)
from runner.data.task_additions import addition_problems, build_additions
from runner.utils.errors import ConfigError


def task_problems(task: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with these keys, their nodes' arguments left out."""
    yield from addition_problems(runner_values("task", task))
    loss = task.get("loss")
    # A task of the user's own may have a key of this name for something else.
    if loss is None or not _is_builtin(task):
        return
    if isinstance(loss, str):
        yield from path_problems("task.loss", loss)
    elif not (isinstance(loss, Mapping) and "_target_" in loss):
        yield (
            f"task.loss={loss} does not fit. Allowed: a dotted path, package.module.name, or a "
            "node with _target_ and keywords, as in {_target_: torch.nn.CrossEntropyLoss}."
        )


def build_task(task: Mapping[str, Any]) -> Any:
    """Return the task of a run, with its training loss and its metrics built.

    Args:
        task: the task group's node.

    Raises:
        ConfigError: a target does not import, or refuses its arguments.
    """
    node = without_runner_keys("task", task)
    loss = node.get("loss")
    if isinstance(loss, str) and _is_builtin(task):
        found = locate(loss)
        node["loss"] = build_group("task.loss", {"_target_": loss}) if _is_class(found) else found
    elif isinstance(loss, Mapping) and "_target_" in loss:
        node["loss"] = build_group("task.loss", with_tensors("task.loss", loss))
    built = build_group("task", node)
    added = runner_values("task", task)
    if added:
        if not hasattr(built, "extend"):
            raise ConfigError(
                f"task.{next(iter(added))} fits tasks that derive from "
                f"runner.training.tasks.task.Task, which {task['_target_']} does not."
            )
        built.extend(build_additions(added))
    return built


def with_tensors(key: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node whose lists are float32 tensors where its target annotates a Tensor.

    Raises:
        ConfigError: such a list holds something else than numbers.
    """
    target = locate(node["_target_"])
    try:
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target)
    except Exception:
        # As in targets.py: an annotation under TYPE_CHECKING cannot be evaluated.
        hints = {}
    values = {
        name: _with_tensor(f"{key}.{name}", value, hints.get(name)) for name, value in node.items()
    }
    items = node.get("_args_")
    if isinstance(items, list):
        names = [*_parameter_names(target), *([""] * len(items))]
        values["_args_"] = [
            _with_tensor(f"{key}._args_[{i}]", item, hints.get(names[i]))
            for i, item in enumerate(items)
        ]
    return values


def _with_tensor(key: str, value: Any, hint: Any) -> Any:
    """Return a list as a float32 tensor where its annotation is a Tensor, else the value itself.

    Raises:
        ConfigError: such a list holds something else than numbers.
    """
    if not (isinstance(value, list) and Tensor in (hint, *get_args(hint))):
        return value
    try:
        return torch.tensor(value, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}={value} does not fit. Allowed: a list of numbers, as in [1.0,5.0]."
        ) from error


def _parameter_names(target: Any) -> list[str]:
    try:
        return [*signature(target).parameters]
    except (TypeError, ValueError):
        return []  # a builtin without a signature


def _is_builtin(task: Mapping[str, Any]) -> bool:
    return str(task.get("_target_")).startswith("runner.training.tasks.")


def _is_class(found: Any) -> bool:
    return isinstance(found, type)
