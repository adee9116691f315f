"""Check and build the task with what the config adds to it: its loss, metrics, quality, a hook."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import Tensor

from runner.core import ConfigError, targets

DIRECTIONS: Mapping[str, Literal["max", "min"]] = {"maximize": "max", "minimize": "min"}
"""The values of task.direction."""

_NAME = re.compile(r"\w[\w.-]*")


def task_problems(task: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with these keys, their nodes' arguments left out."""
    added = targets.runner_values("task", task)
    items = targets.metric_items(added.get("metrics"))
    for item in items:
        yield from targets.value_problems(item.key, item.value)
    for item in items:
        if not _NAME.fullmatch(item.name):
            yield f"{item.key}: {item.name} is no metric's name. Allowed: letters, digits, _ . -"
    for name, count in Counter(item.name for item in items).items():
        if count > 1:
            yield (
                f"task.metrics has {count} metrics of the name {name}. Give each its own name: "
                f"task.metrics={{{name}_a: {{_target_: ...}}, {name}_b: {{_target_: ...}}}}."
            )
    quality = added.get("quality")
    if quality is not None and not isinstance(quality, str):
        yield f"task.quality={quality} does not fit. Allowed: a metric's name, as in val/loss."
    direction = added.get("direction")
    if direction is not None and direction not in DIRECTIONS:
        yield f"task.direction={direction} is not known. Allowed: {', '.join(DIRECTIONS)}."
    if not isinstance(added.get("whole_batch", False), bool):
        yield f"task.whole_batch={added['whole_batch']} does not fit. Allowed: true, false."
    if "after_evaluation" in added:
        yield from targets.value_problems("task.after_evaluation", added["after_evaluation"])
    # A task of the user's own may have a key of this name for something else.
    if task.get("loss") is not None and _is_builtin(task):
        yield from targets.value_problems("task.loss", task["loss"])


def build_task(task: Mapping[str, Any]) -> Any:
    """Return the task of a run, with its training loss and its metrics built.

    Args:
        task: the task group's node.

    Raises:
        ConfigError: a target does not import, or refuses its arguments.
    """
    node = targets.without_runner_keys("task", task)
    loss = node.get("loss")
    if isinstance(loss, str) and _is_builtin(task):
        node["loss"] = targets.build_value("task.loss", loss)
    elif isinstance(loss, Mapping) and "_target_" in loss:
        node["loss"] = targets.build_group("task.loss", with_tensors(loss))
    built = targets.build_group("task", node)
    missing = [name for name in ("quality", "direction") if not hasattr(built, name)]
    if missing:
        raise ConfigError(
            f"task={task['_target_']} has no {' and no '.join(missing)}, by which runs are "
            'compared. Write in the class: quality = "val/loss"; direction = "min" (or "max").'
        )
    added = targets.runner_values("task", task)
    if added:
        if not hasattr(built, "extend"):
            raise ConfigError(
                f"task.{next(iter(added))} fits tasks that derive from "
                f"runner.core.Task, which {task['_target_']} does not."
            )
        built.extend(**_build_additions(added))
    return built


def with_tensors(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node of task.loss with float32 tensors for lists where its target annotates one.

    Raises:
        ConfigError: such a list holds something else than numbers.
    """
    target = targets.locate(node["_target_"])
    try:
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target)
    except Exception:
        # An annotation under TYPE_CHECKING cannot be evaluated.
        hints = {}
    values = {
        name: _with_tensor(f"task.loss.{name}", value, hints.get(name))
        for name, value in node.items()
    }
    items = node.get("_args_")
    if isinstance(items, list):
        try:
            names = [*signature(target).parameters]
        except (TypeError, ValueError):
            names = []  # a builtin without a signature
        names += [""] * len(items)
        values["_args_"] = [
            _with_tensor(f"task.loss._args_[{i}]", item, hints.get(names[i]))
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


def _is_builtin(task: Mapping[str, Any]) -> bool:
    return str(task.get("_target_")).startswith("runner.training.tasks.")


def _build_additions(values: Mapping[str, Any]) -> dict[str, Any]:
    """Build what the keys that the runner reads name.

    Raises:
        ConfigError: a target does not import or refuses its arguments, a metric is no
            torchmetrics.Metric, or a hook cannot be called.
    """
    metrics = {item.name: _metric(item) for item in targets.metric_items(values.get("metrics"))}
    quality = values.get("quality")
    if quality is not None and not quality.startswith("val/"):
        quality = f"val/{quality}"
    direction = DIRECTIONS[values["direction"]] if "direction" in values else None
    hook = values.get("after_evaluation")
    return {
        "metrics": metrics,
        "quality": quality,
        "direction": direction,
        "hook": None if hook is None else _hook(hook),
        "hook_name": "" if hook is None else targets.target_name(hook),
        "whole_batch": values.get("whole_batch"),
    }


def _metric(item: targets.MetricItem) -> Any:
    """Return the metric that an item names."""
    path = targets.target_name(item.value)
    try:
        metric = targets.build_value(item.key, item.value)
    except ConfigError:
        raise
    except Exception as error:  # of whatever type: torchmetrics raises ImportErrors, too
        text = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{item.key}: {path} cannot be made: {text}.") from error
    kind = type(metric).__name__
    metric_class: Any = targets.locate("torchmetrics.Metric")
    if not isinstance(metric, metric_class):
        more = " List its metrics one by one." if "Collection" in kind else ""
        raise ConfigError(
            f"{item.key}={path} is a {kind}, no torchmetrics.Metric.{more} Allowed: classes that "
            "derive from it, as in torchmetrics.classification.MulticlassF1Score."
        )
    return metric


def _hook(value: str | Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function or the object that task.after_evaluation names."""
    key = "task.after_evaluation"
    hook = targets.build_value(key, value)
    if not callable(hook):
        raise ConfigError(
            f"{key}={targets.target_name(value)} gives a {type(hook).__name__}, which cannot be "
            "called. Name a function of (model, info), or a class whose objects are called with "
            "them."
        )
    return hook
