"""Check and build the targets of the data group that the runner calls itself (loading_keys.py)."""

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

from runner.config.loading_keys import LEADING_COUNTS
from runner.config.targets import build_group, locate
from runner.utils.errors import ConfigError


def loading_problems(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with these keys, their nodes' arguments left out."""
    for key in LEADING_COUNTS:
        value = data.get(key)
        if isinstance(value, str):
            yield from path_problems(f"data.{key}", value)
        elif value is not None and not (isinstance(value, Mapping) and "_target_" in value):
            yield (
                f"data.{key}={value} does not fit. Allowed: a dotted path, package.module.name, or "
                "a node with _target_ and keywords."
            )
        if value is not None and _takes_keyword(data.get("_target_"), key):
            yield (
                f"data.{key} is read by the runner, and {data['_target_']} takes a keyword {key} "
                "of its own. Give that another name."
            )
    if data.get("sampler") is not None and data.get("shuffle", True) is False:
        yield (
            "data.shuffle=false contradicts data.sampler, which decides the order of the training "
            "data. Leave one of them out."
        )


def build_loading_target(key: str, value: str | Mapping[str, Any], *leading: object) -> Any:
    """Return the object that a key names.

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
    return build_group(f"data.{key}", value, *leading)


def path_problems(key: str, path: str) -> Iterator[str]:
    """Yield why a dotted path names nothing that can be called."""
    try:
        target = locate(path)
    except ConfigError as error:
        yield from (f"{key}={problem}" for problem in error.problems)
        return
    if not callable(target):
        yield f"{key}={path} is a {type(target).__name__}, not a class or function."


def _takes_keyword(path: Any, key: str) -> bool:
    """Return whether the data group's target names a parameter like one of these keys."""
    try:
        return key in signature(locate(path)).parameters
    except (ConfigError, TypeError, ValueError, AttributeError):
        return False  # check_targets reports a path that does not import
