"""Compare values of YAML and JSON with Python's annotations, and say them in words."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

BUILT = object()
"""Stands for the object that a nested target will return; it fits any annotation."""


def fits_type(value: Any, hint: Any) -> bool:
    """Return whether a value of YAML fits an annotation; any value fits an unknown kind."""
    kind = get_origin(hint) or hint
    if value is BUILT:
        return True
    if kind in (Union, UnionType):
        return any(fits_type(value, option) for option in get_args(hint))
    if kind is Literal:
        # The target itself reports which texts are allowed.
        takes_texts = all(isinstance(option, str) for option in get_args(hint))
        return isinstance(value, str) or not takes_texts
    if not isinstance(kind, type) or kind is object:
        return True
    # In Python bool is a subclass of int, but `true` is no number in a config.
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if issubclass(kind, str | bool | NoneType):
        return isinstance(value, kind)
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if issubclass(kind, Iterable):
        item_hint = next((option for option in get_args(hint) if option is not Ellipsis), Any)
        # A module may be called 0, which YAML reads as a number.
        if item_hint is str:
            item_hint = str | int
        if not (isinstance(value, list | tuple) and all(fits_type(v, item_hint) for v in value)):
            return False
        # tuple[float, float] fixes a length; tuple[int] is often written for a list of any length.
        is_fixed = kind is tuple and len(get_args(hint)) > 1 and Ellipsis not in get_args(hint)
        return not is_fixed or len(value) == len(get_args(hint))
    return True


def dataclass_fields_from_json(kind: type, values: object) -> dict[str, Any]:
    """Return the entries of a mapping, read from a file, that are fields of a dataclass.

    Raises:
        ValueError: a value is missing or does not fit its annotation.
    """
    hints = get_type_hints(kind)
    if not isinstance(values, Mapping):
        raise ValueError(f"no {kind.__name__}")
    # Other keys are ignored: a newer version may have written the file.
    entries = {key: value for key, value in values.items() if key in hints}
    for key, value in entries.items():
        if not _fits_field(value, hints[key]):
            raise ValueError(f"{key} is no {kind.__name__}'s")
    # Both are MISSING for a field without a default.
    required = {field.name for field in fields(kind) if field.default is field.default_factory}
    lacking = required - set(entries)
    if lacking:
        raise ValueError(f"no {kind.__name__}: it lacks {', '.join(sorted(lacking))}")
    return entries


def _fits_field(value: Any, hint: Any) -> bool:
    """Return whether a value read from a file fits a field's annotation."""
    if not fits_type(value, hint):
        return False
    if get_origin(hint) is Literal and value not in get_args(hint):
        return False
    # The values of a mapping of Any are not looked at.
    if isinstance(value, Mapping) and get_args(hint):
        _, item_hint = get_args(hint)
        return all(_fits_field(item, item_hint) for item in value.values())
    return True


def typed_value(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


_CONTAINER_MODULES = ("builtins", "collections", "collections.abc", "typing")
"""Modules of the classes that a list or a mapping of YAML can stand for."""

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


_LIST_WORDS = {
    int: "a list of whole numbers, as in [100,200]",
    float: "a list of numbers, as in [0.1,0.2]",
}


def annotation_words(hint: Any) -> str:
    """Return an annotation in words, as an error message lists what is allowed."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return " or ".join(annotation_words(option) for option in get_args(hint))
    if kind is Literal:
        return ", ".join(map(str, get_args(hint)))
    if isinstance(kind, type) and kind in _WORDS:
        return _WORDS[kind]
    if (getattr(kind, "__module__", ""), getattr(kind, "__name__", "")) == ("torch", "Tensor"):
        return "a list of numbers, as in [1.0,5.0]"
    if isinstance(kind, type) and kind.__module__ not in _CONTAINER_MODULES:
        return f"a nested _target_ that returns a {kind.__name__}"
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "keys with values, as in {a: 1}"
    if isinstance(kind, type) and issubclass(kind, Iterable):
        item = next(iter(get_args(hint)), None)
        return _LIST_WORDS[item] if item in (int, float) else "a list, as in [a,b]"
    return str(hint).replace("typing.", "").replace("collections.abc.", "")
