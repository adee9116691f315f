"""Name the keys of the data group that the runner reads itself: data.collate, data.sampler.

They are not passed to the data group's own target. Each is a node with a `_target_`, or a dotted
path as text. The runner builds them with loading_targets.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

LEADING_COUNTS = {"collate": 0, "sampler": 1}
"""Number of arguments that the runner passes before the keywords, by key."""


def data_target_node(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data group's node without the keys that the runner reads itself."""
    return {key: value for key, value in data.items() if key not in LEADING_COUNTS}


def loading_nodes(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield each node with a target: its dotted key, the node, the number of its arguments that
    the runner passes."""
    for key, leading in LEADING_COUNTS.items():
        node = data.get(key)
        if isinstance(node, Mapping) and "_target_" in node:
            # A partial function is called with one argument more, which the runner passes.
            yield f"data.{key}", node, leading or int(node.get("_partial_") is True)


def task_paths(task: Any) -> list[tuple[str, str]]:
    """Return the dotted key and the value of the task group's targets that are given as text; of
    anything but a mapping none."""
    loss = task.get("loss") if isinstance(task, Mapping) else None
    return [("task.loss", loss)] if isinstance(loss, str) else []


def loading_paths(data: Any) -> list[tuple[str, str]]:
    """Return the dotted key and the value of the data group's targets that are given as text; of
    anything but a mapping none."""
    if not isinstance(data, Mapping):
        return []
    keys = [key for key in LEADING_COUNTS if isinstance(data.get(key), str)]
    return [(f"data.{key}", data[key]) for key in keys]


def target_name(value: str | Mapping[str, Any]) -> str:
    """Return the dotted path that a key's value names."""
    return value if isinstance(value, str) else str(value.get("_target_"))
