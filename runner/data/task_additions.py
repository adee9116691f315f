"""Check and build what the config adds to any task: metrics, the quality, a hook of evaluations."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.config.loading_keys import MetricItem, metric_items, target_name
from runner.config.targets import build_group, locate, path_problems
from runner.utils.errors import ConfigError

DIRECTIONS: Mapping[str, Literal["max", "min"]] = {"maximize": "max", "minimize": "min"}
"""The values of task.direction."""

_NAME = re.compile(r"\w[\w.-]*")
_TARGET = "a dotted path, package.module.Name, or a node with _target_ and keywords"


@dataclass(frozen=True)
class TaskAdditions:
    """What the keys task.metrics, task.quality, task.direction and task.after_evaluation name.

    Attributes:
        metrics: objects of torchmetrics.Metric, by the names under which they are recorded.
        quality: name of the metric that runs are compared by, "val/..."; None for the task's own.
        direction: whichever of it is better; None where it follows from the metric.
        hook: called after each evaluation with the model and an EvaluationInfo; None for none.
        hook_name: the dotted path of the hook.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)
    quality: str | None = None
    direction: Literal["max", "min"] | None = None
    hook: Callable[..., Any] | None = None
    hook_name: str = ""


def addition_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with these keys, the arguments of nodes left out.

    Args:
        values: of the keys that the runner reads.
    """
    items = metric_items(values.get("metrics"))
    for item in items:
        yield from _target_problems(item.key, item.value)
    yield from _name_problems(items)
    quality = values.get("quality")
    if quality is not None and not isinstance(quality, str):
        yield f"task.quality={quality} does not fit. Allowed: a metric's name, as in val/loss."
    direction = values.get("direction")
    if direction is not None and direction not in DIRECTIONS:
        yield f"task.direction={direction} is not known. Allowed: {', '.join(DIRECTIONS)}."
    hook = values.get("after_evaluation")
    if hook is not None:
        yield from _target_problems("task.after_evaluation", hook)


def _target_problems(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from path_problems(key, value)
    elif not (isinstance(value, Mapping) and "_target_" in value):
        yield f"{key}={value} does not fit. Allowed: {_TARGET}."


def _name_problems(items: Sequence[MetricItem]) -> Iterator[str]:
    """Yield why metrics cannot be recorded under their names."""
    for item in items:
        if not _NAME.fullmatch(item.name):
            yield (
                f"{item.key}: {item.name} is no name of a metric. Allowed: letters, digits, "
                "underscores, dots and dashes."
            )
    for name, count in Counter(item.name for item in items).items():
        if count > 1:
            yield (
                f"task.metrics has {count} metrics of the name {name}. Give each its own name: "
                f"task.metrics={{{name}_a: {{_target_: ...}}, {name}_b: {{_target_: ...}}}}."
            )


def build_additions(values: Mapping[str, Any]) -> TaskAdditions:
    """Build what the keys name.

    Args:
        values: of the keys that the runner reads, without problems.

    Raises:
        ConfigError: a target does not import or refuses its arguments, a metric is no
            torchmetrics.Metric, or a hook cannot be called.
    """
    metrics = {item.name: _metric(item) for item in metric_items(values.get("metrics"))}
    quality = values.get("quality")
    if quality is not None and not quality.startswith("val/"):
        quality = f"val/{quality}"
    hook = values.get("after_evaluation")
    direction = values.get("direction")
    return TaskAdditions(
        metrics,
        quality,
        None if direction is None else DIRECTIONS[direction],
        None if hook is None else _hook(hook),
        "" if hook is None else target_name(hook),
    )


def _metric(item: MetricItem) -> Any:
    """Return the metric that an item names."""
    path = target_name(item.value)
    node = item.value if isinstance(item.value, Mapping) else {"_target_": path}
    is_function = isinstance(item.value, str) and not isinstance(locate(path), type)
    if is_function:
        raise ConfigError(_no_metric(item.key, path, "a function"))
    try:
        found = build_group(item.key, node)
    except ConfigError:
        raise
    except Exception as error:  # of whatever type: torchmetrics raises ImportErrors, too
        text = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{item.key}: {path} cannot be made: {text}.") from error
    if not isinstance(found, locate("torchmetrics.Metric")):  # type: ignore[arg-type]
        raise ConfigError(_no_metric(item.key, path, f"a {type(found).__name__}"))
    return found


def _no_metric(key: str, path: str, kind: str) -> str:
    more = " List its metrics one by one." if "Collection" in kind else ""
    return (
        f"{key}={path} is {kind}, no torchmetrics.Metric.{more} Allowed: classes that derive from "
        "it, as in torchmetrics.classification.MulticlassF1Score."
    )


def _hook(value: str | Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function or the object that task.after_evaluation names."""
    key = "task.after_evaluation"
    found: Any = None
    if isinstance(value, str):
        found = locate(value)
    if found is None or isinstance(found, type):
        node = value if isinstance(value, Mapping) else {"_target_": value}
        found = build_group(key, node)
    if not callable(found):
        raise ConfigError(
            f"{key}={target_name(value)} gives a {type(found).__name__}, which cannot be called. "
            "Name a function of (model, info), or a class whose objects are called with them."
        )
    return found
