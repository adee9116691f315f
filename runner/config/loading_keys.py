"""Name the keys of the data and the task group that the runner reads itself.

Those of the data group are data.collate and data.sampler, which targets.py builds; those of
the task group are TASK_KEYS, which data/task_target.py builds. They are not passed to the
group's own target. A target among them is a node with a `_target_`, or a dotted path as text.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

LEADING_COUNTS = {"collate": 0, "sampler": 1}
"""Number of arguments that the runner passes before the keywords, by key."""

TASK_KEYS = ("metrics", "quality", "direction", "after_evaluation", "whole_batch")
"""Keys of the task group that fit every task."""


class MetricItem(NamedTuple):
    """A metric of task.metrics.

    Attributes:
        key: dotted key of its value.
        name: under which it is recorded.
        value: a node with a `_target_` or a dotted path; anything else is wrong.
    """

    key: str
    name: str
    value: Any


def is_target_node(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value of a config is a node whose target is called."""
    return isinstance(value, Mapping) and "_target_" in value


def data_target_node(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data group's node without the keys that the runner reads itself."""
    return {key: value for key, value in data.items() if key not in LEADING_COUNTS}


def loading_nodes(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield each node with a target: its dotted key, the node, the number of its arguments that
    the runner passes."""
    for key, leading in LEADING_COUNTS.items():
        node = data.get(key)
        if is_target_node(node):
            # A partial function is called with one argument more, which the runner passes.
            yield f"data.{key}", node, leading or int(node.get("_partial_") is True)


def metric_items(value: Any) -> list[MetricItem]:
    """Return the metrics of task.metrics: one, a list, or a mapping of names to metrics."""
    key = "task.metrics"
    if value is None:
        return []
    if isinstance(value, list):
        return [MetricItem(f"{key}[{i}]", _metric_name(v), v) for i, v in enumerate(value)]
    if isinstance(value, Mapping) and "_target_" not in value:
        return [MetricItem(f"{key}.{name}", str(name), v) for name, v in value.items()]
    return [MetricItem(key, _metric_name(value), value)]


_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def _metric_name(value: Any) -> str:
    """Return the name of a metric without one of its own: its class in snake_case."""
    path = value.get("_target_") if isinstance(value, Mapping) else value
    return _WORD_STARTS.sub("_", str(path).rpartition(".")[2]).lower()


def task_nodes(task: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield each node with a target among TASK_KEYS, as loading_nodes does.

    Args:
        task: the keys of the task group that the runner reads.
    """
    for item in metric_items(task.get("metrics")):
        if is_target_node(item.value):
            yield item.key, item.value, 0
    hook = task.get("after_evaluation")
    if is_target_node(hook):
        # A partial function is called with the model and what the evaluation found.
        yield "task.after_evaluation", hook, 2 * int(hook.get("_partial_") is True)


def text_targets(group: str, node: Any) -> list[tuple[str, str]]:
    """Return the dotted key and the value of the targets in a group's node that are given as text.

    Args:
        group: data or task; other groups have none.
        node: of anything but a mapping there are none.
    """
    values: list[tuple[str, Any]] = []
    if not isinstance(node, Mapping):
        return []
    if group == "data":
        values = [(f"data.{key}", node.get(key)) for key in LEADING_COUNTS]
    if group == "task":
        values = [(f"task.{key}", node.get(key)) for key in ("loss", "after_evaluation")]
        values += [(item.key, item.value) for item in metric_items(node.get("metrics"))]
    return [(key, value) for key, value in values if isinstance(value, str)]


def target_name(value: str | Mapping[str, Any]) -> str:
    """Return the dotted path that a key's value names."""
    return value if isinstance(value, str) else str(value.get("_target_"))
