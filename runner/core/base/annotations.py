"""Compare values of YAML and JSON with Python's annotations."""

from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

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
    if not isinstance(kind, type):
        return True
    # In Python bool is a subclass of int, but `true` is no number in a config.
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
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
