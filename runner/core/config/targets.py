"""Check the targets (`_target_`) of a config, and build its groups.

GROUPS says which keys of a group the runner reads itself, and what it passes to a target before
the keywords. A target among those keys is a node with a `_target_`, or a dotted path as text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple

from runner.core.base.errors import ConfigError
from runner.core.base.fmt import typed_value
from runner.core.config.instantiation import (
    CONVERT_MODES,
    Arguments,
    instantiate,
    is_target_node,
    keywords,
    locate,
    refusal,
    refusals,
    target_arguments,
)
from runner.core.config.schema import RunSpec


class TargetGroup(NamedTuple):
    """What the runner does with a group of the config whose target it calls.

    Attributes:
        is_required: every run needs one.
        leading: number of arguments that the runner passes before the keywords: the parameters to
            an optimizer, the optimizer to a scheduler.
        own_keys: keys that the runner reads itself. A target that has a parameter of that name is
            passed the value in its place.
        called_keys: keys whose values are targets that the runner calls itself, and the number of
            arguments that it passes to each before the keywords.
    """

    is_required: bool = True
    leading: int = 0
    own_keys: tuple[str, ...] = ()
    called_keys: Mapping[str, int] = MappingProxyType({})


GROUPS = {
    "strategy": TargetGroup(),
    "precision": TargetGroup(),
    "model": TargetGroup(),
    "data": TargetGroup(called_keys={"collate": 0, "sampler": 1}),
    "task": TargetGroup(
        own_keys=("metrics", "quality", "direction", "after_evaluation", "whole_batch")
    ),
    "optimizer": TargetGroup(
        leading=1, own_keys=("groups", "no_decay_on", "layer_decay", "state_dtype")
    ),
    "tracking": TargetGroup(),
    "scheduler": TargetGroup(is_required=False, leading=1, own_keys=("warmup",)),
}
"""The groups of which the runner needs more than their target."""
_OTHER = TargetGroup(is_required=False)


def loading_nodes(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield each node with a target: its dotted key, the node, the number of its arguments that
    the runner passes."""
    for key, leading in GROUPS["data"].called_keys.items():
        node = data.get(key)
        if is_target_node(node):
            # A partial function is called with one argument more, which the runner passes.
            yield f"data.{key}", node, leading or int(node.get("_partial_") is True)


_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def task_nodes(task: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield each node with a target among the task's own keys, as loading_nodes does.

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


def target_name(value: str | Mapping[str, Any]) -> str:
    """Return the dotted path that a key's value names."""
    return value if isinstance(value, str) else str(value.get("_target_"))


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


def _metric_name(value: Any) -> str:
    """Return the name of a metric without one of its own: its class in snake_case."""
    path = value.get("_target_") if isinstance(value, Mapping) else value
    return _WORD_STARTS.sub("_", str(path).rpartition(".")[2]).lower()


def runner_keys(group: str, node: Mapping[str, Any]) -> set[str]:
    """Return the keys of a group's node that the runner reads and does not pass to its target.

    Raises:
        ConfigError: the target does not import.
    """
    keys = GROUPS.get(group, _OTHER)
    passed: Iterable[str] = ()
    if keys.own_keys:
        target = locate(node["_target_"])
        with suppress(TypeError, ValueError):
            passed = signature(target).parameters
    return {*keys.called_keys, *keys.own_keys}.difference(passed)


def without_runner_keys(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's node with a target, without the keys that the runner reads.

    Raises:
        ConfigError: the target does not import.
    """
    keys = runner_keys(group, node)
    return {key: value for key, value in node.items() if key not in keys}


def runner_values(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group's node that the runner reads itself, by their keys."""
    keys: Iterable[str] = GROUPS[group].own_keys
    # check_targets reports a target that does not import.
    with suppress(ConfigError, AttributeError, TypeError, KeyError):
        keys = runner_keys(group, node)
    return {key: node[key] for key in keys if node.get(key) is not None}


def target_nodes(spec: RunSpec) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield each node of a spec with a target: its dotted key, the node, its leading arguments."""
    for part in fields(RunSpec):
        node = getattr(spec, part.name)
        # The user's own values are no group, whatever they hold.
        if not isinstance(node, dict) or part.name in ("vars", "sections"):
            continue
        leading = GROUPS.get(part.name, _OTHER).leading
        if part.name == "data":
            yield from loading_nodes(node)
            node = without_runner_keys("data", node)
        if part.name == "task":
            yield from task_nodes(runner_values("task", node))
        if "_target_" in node:
            yield part.name, node, leading
            # Schedules of schedules, each of which is called with the optimizer.
            if part.name == "scheduler" and isinstance(node.get("schedulers"), list):
                yield from _nested_schedules(part.name, node["schedulers"])
            continue
        # Several optimizers, each under a name of its own.
        for key, child in node.items():
            if is_target_node(child):
                yield f"{part.name}.{key}", child, leading


def _nested_schedules(
    key: str, parts: Iterable[Any]
) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield target_nodes' rows of the schedules in a list, at any depth."""
    for i, part in enumerate(parts):
        if is_target_node(part):
            name = f"{key}.schedulers.{i}"
            yield name, part, GROUPS["scheduler"].leading
            if isinstance(part.get("schedulers"), list):
                yield from _nested_schedules(name, part["schedulers"])


def check_targets(spec: RunSpec) -> list[str]:
    """Return a message for each target that does not import and each argument that does not fit.

    Nodes that are nested in the arguments of a group's target are checked, too.
    """
    present = {key.partition(".")[0] for key, _, _ in target_nodes(spec)}
    problems = [
        f"{key} has no _target_. Type {key}=<option>."
        for key, group in GROUPS.items()
        if group.is_required and key not in present
    ]
    for key, node, leading in target_nodes(spec):
        if node["_target_"] is None and not GROUPS.get(key, _OTHER).is_required:
            continue
        if node.get("_partial_") is True and not leading:
            problems.append(
                f"{key}._partial_=true would give a function of {node['_target_']}. Leave it out."
            )
        passed = node
        if not key.startswith(("task.", "data.")):
            # A target that does not import, or is no path, is reported as such.
            with suppress(ConfigError, AttributeError, TypeError):
                passed = without_runner_keys(key.partition(".")[0], node)
        problems += _node_problems(key, node, target_arguments(passed, key), leading)
    return problems


def _node_problems(
    key: str, node: Mapping[str, Any], arguments: Mapping[str, Any], leading: int = 0
) -> Iterator[str]:
    """Yield a message for each problem of a node, and of the nodes nested in its arguments.

    Args:
        key: dotted key of the node.
        node: with its target.
        arguments: keywords that it passes.
        leading: number of arguments that the runner passes first.
    """
    path = node["_target_"]
    items = node.get("_args_") or []
    wrong_keys = list(_call_key_problems(key, node))
    yield from wrong_keys
    if not isinstance(path, str):
        yield f"{key}._target_={path} is no path. Write package.module.Name."
    elif not wrong_keys:
        is_partial = node.get("_partial_", False)
        passed = Arguments(key, path, items, arguments, leading, is_partial)
        try:
            yield from passed.problems(locate(path))
        except ConfigError as error:
            yield from (f"{key}._target_={problem}" for problem in error.problems)
    if node.get("_recursive_", True):
        # Schedules of a schedule have rows of their own in target_nodes.
        if key.startswith("scheduler"):
            arguments = {name: arguments[name] for name in arguments if name != "schedulers"}
        for nested_key, nested in _nested_nodes(key, {**arguments, "_args_": items}):
            yield from _node_problems(nested_key, nested, keywords(nested))


def _nested_nodes(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each node with a target in a value, and its dotted key; not those below such a node."""
    for child_key, child in children(key, value):
        if is_target_node(child):
            yield child_key, child
        else:
            yield from _nested_nodes(child_key, child)


def children(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each item of a mapping or list and its dotted key; nothing of any other value."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield f"{key}.{name}", item
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield f"{key}[{i}]", item


def _call_key_problems(key: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each of Hydra's keys that has a wrong value."""
    for name in ("_partial_", "_recursive_"):
        value = node.get(name, False)
        if not isinstance(value, bool):
            yield f"{key}.{name}={typed_value(value)} does not fit. Allowed: true or false."
    items = node.get("_args_")
    if not isinstance(items, list | None):
        yield f"{key}._args_={items} does not fit. Allowed: a list, as in [a,b]."
    convert = node.get("_convert_", CONVERT_MODES[0])
    if convert not in CONVERT_MODES:
        allowed = ", ".join(CONVERT_MODES)
        yield f"{key}._convert_={typed_value(convert)} is not known. Allowed: {allowed}."


def build_group(key: str, node: Mapping[str, Any], *leading: object) -> Any:
    """Call a group's target, after those that are nested in its arguments.

    Raises:
        ConfigError: a target refuses a value; the message names its key.
    """
    try:
        return instantiate(node, *leading, key=key)
    except refusals() as error:
        raise refusal(key, node, error) from error
    except AttributeError as error:
        if "Module.__init__() call" not in str(error):
            raise
        text = f"{key}: begin __init__ of {node['_target_']} with super().__init__()."
        raise ConfigError(text) from error


def loading_problems(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the keys of the data group whose targets the runner calls itself.

    The arguments of their nodes are left out: check_targets checks them.
    """
    for key in GROUPS["data"].called_keys:
        value = data.get(key)
        if value is not None:
            yield from value_problems(f"data.{key}", value)
        parameters: Iterable[str] = ()
        # check_targets reports a path that does not import.
        with suppress(ConfigError, TypeError, ValueError, AttributeError):
            parameters = signature(locate(data.get("_target_", ""))).parameters
        if value is not None and key in parameters:
            target = data["_target_"]
            yield f"data.{key} is the runner's, and a keyword of {target}. Give that another name."
    if data.get("sampler") is not None and data.get("shuffle", True) is False:
        yield "data.shuffle=false contradicts data.sampler, which decides the order. Leave one out."


def build_value(key: str, value: str | Mapping[str, Any], *leading: object) -> Any:
    """Return the object that a key below a group names.

    A class, and a node's target, are called; a path to a function names the function itself where
    the runner passes no arguments.

    Raises:
        ConfigError: the target does not import, or refuses its arguments.
    """
    if isinstance(value, str):
        target = locate(value)
        if not leading and not isinstance(target, type):
            return target
        value = {"_target_": value}
    return build_group(key, value, *leading)


def value_problems(key: str, value: Any) -> Iterator[str]:
    """Yield why a key's value names nothing that can be called; a node's arguments are left out."""
    if not isinstance(value, str):
        if not is_target_node(value):
            yield (
                f"{key}={value} does not fit. Allowed: a dotted path, package.module.Name, or a "
                "node with _target_ and keywords."
            )
        return
    try:
        target = locate(value)
    except ConfigError as error:
        yield from (f"{key}={problem}" for problem in error.problems)
        return
    if not callable(target):
        yield f"{key}={value} is a {type(target).__name__}, not a class or function."
