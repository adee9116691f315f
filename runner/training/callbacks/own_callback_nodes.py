"""Check and build the callbacks of one's own: the nodes of the config group `callbacks`."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from runner.config.annotations import typed_value
from runner.config.instantiation import locate
from runner.config.targets import build_group
from runner.training.callbacks.own_callback import HOOKS, RESERVED_PREFIXES, RunCallback
from runner.utils.errors import ConfigError

_NAME = re.compile(r"[A-Za-z]\w*")
_BASE = f"{RunCallback.__module__}.{RunCallback.__name__}"


def callback_problems(nodes: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each name, node and class that is no callback; arguments are checked with
    those of all targets."""
    if "_target_" in nodes:
        target = nodes["_target_"]
        yield (
            f"callbacks._target_={target} has no name. Callbacks are a mapping of names to nodes: "
            f"type callbacks.<name>._target_={target}."
        )
        return
    for name, node in nodes.items():
        yield from _node_problems(f"callbacks.{name}", str(name), node)


def _node_problems(key: str, name: str, node: Any) -> Iterator[str]:
    if not _NAME.fullmatch(name) or name in RESERVED_PREFIXES:
        yield (
            f"{key}: {name} cannot name a callback, whose metrics it begins. Allowed: a letter, "
            f"then letters, digits and underscores, but not {', '.join(RESERVED_PREFIXES)}."
        )
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        yield (
            f"{key}={typed_value(node)} does not fit. Allowed: a node with _target_ and keywords; "
            f"type {key}._target_=package.module.Name."
        )
        return
    try:
        target = locate(node["_target_"])
    except ConfigError:
        return  # reported with those of all targets
    if isinstance(target, type):
        yield from class_problems(f"{key}._target_={node['_target_']}", target)


def class_problems(subject: str, kind: type) -> Iterator[str]:
    """Yield a message for each reason why objects of a class are no callbacks.

    Args:
        subject: what the messages are about.
        kind: the class.
    """
    if not issubclass(kind, RunCallback):
        yield f"{subject} is no callback. Derive it from {_BASE}."
        return
    defined = [name for name in dir(kind) if name.startswith("on_")]
    for name in defined:
        if name not in HOOKS:
            similar = get_close_matches(name, HOOKS, n=1)
            hint = f" Write {similar[0]}." if similar else ""
            yield f"{subject} has {name}, which is no hook. Hooks: {', '.join(HOOKS)}.{hint}"
        elif not _takes_two(getattr(kind, name)):
            base = signature(getattr(RunCallback, name))
            what = ", ".join(base.parameters)
            yield f"{subject} has {name}{signature(getattr(kind, name))}. Write {name}({what})."
    own = [name for name in HOOKS if getattr(kind, name) is not getattr(RunCallback, name)]
    if not own:
        yield f"{subject} has no hook of its own. Define one of: {', '.join(HOOKS)}."


def _takes_two(hook: Any) -> bool:
    """Return whether a method, as its class has it, takes a record and a handle."""
    try:
        signature(hook).bind(None, None, None)
    except TypeError:
        return False
    return True


def build_own_callbacks(nodes: Mapping[str, Any]) -> dict[str, RunCallback]:
    """Build the callbacks of a run, by their names.

    Args:
        nodes: the group `callbacks`; the target of each node returns a RunCallback.

    Raises:
        ConfigError: a target refuses its arguments, or returns something else.
    """
    built = {}
    problems: list[str] = []
    for name, node in nodes.items():
        key = f"callbacks.{name}"
        made = build_group(key, node)
        problems += class_problems(f"{key}: what {node['_target_']} returns", type(made))
        built[name] = made
    if problems:
        raise ConfigError(*problems)
    return built
