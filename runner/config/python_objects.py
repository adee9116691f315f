"""Hold the objects that a Python program gives to a run in place of config nodes, by their roles.

The targets in runner/api/objects.py take them, and a command that is shown names them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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


@dataclass(frozen=True)
class GivenObjects:
    """The objects of a call.

    Attributes:
        by_role: the objects; a list of them for the role callbacks.
        has_several_runs: the call runs several jobs, none of which may change what the next one
            gets.
    """

    by_role: Mapping[str, Any]
    has_several_runs: bool = False


_NONE = GivenObjects(MappingProxyType({}))


_given: ContextVar[GivenObjects] = ContextVar("given", default=_NONE)


@contextmanager
def given_objects(objects: Mapping[str, Any], has_several_runs: bool = False) -> Iterator[None]:
    """Let runs within the context take these objects, by their roles."""
    token = _given.set(GivenObjects(objects, has_several_runs))
    try:
        yield
    finally:
        _given.reset(token)


def current_objects() -> GivenObjects:
    """Return the objects of the innermost context."""
    return _given.get()


def given_keys() -> dict[str, str]:
    """Return the keys that the objects of the innermost context stand for, by their roles."""
    return {role: KEYS[role] for role in current_objects().by_role}
