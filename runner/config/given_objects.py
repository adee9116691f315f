"""Hold the objects that a Python program gives to a run in place of config nodes, by their roles.

The targets in runner/api/objects.py take them from here; a command that is shown names them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

KEYS = {
    "model": "model",
    "data": "data",
    "optimizer": "optimizer",
    "loss": "task.loss",
    "collate": "data.collate",
    "callbacks": "callbacks",
}
"""The key of the config that each role stands for."""

_given: ContextVar[Mapping[str, Any]] = ContextVar("given", default=MappingProxyType({}))


@contextmanager
def given_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let runs within the context take these objects, by their roles."""
    token = _given.set(objects)
    try:
        yield
    finally:
        _given.reset(token)


def current_objects() -> Mapping[str, Any]:
    """Return the objects of the innermost context, by their roles."""
    return _given.get()


def given_keys() -> dict[str, str]:
    """Return the keys that the objects of the innermost context stand for, by their roles."""
    return {role: KEYS[role] for role in current_objects()}
