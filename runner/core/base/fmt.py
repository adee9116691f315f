"""Format numbers, paths and overrides as text for labels, tables and messages, and group rows."""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

# Hydra's grammar: in quotes, backslashes count as escapes only before a quote.
_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def relative_path(path: Path) -> str:
    """Return the path relative to the working directory if it is inside it, else absolute."""
    absolute = path.absolute()
    is_inside = absolute.is_relative_to(Path.cwd())
    return os.path.relpath(absolute) if is_inside else str(absolute)


def format_number(value: float | None) -> str:
    """Return a number with four significant digits, or every digit before the point if more.

    From 1e15 on, where float64's digits end, it is written with an exponent. None is empty text.
    """
    if value is None:
        return ""
    if 1000 <= abs(value) < 1e15:
        return f"{value:.0f}"
    return f"{value:.4g}"


def format_percent(share: float) -> str:
    """Return a share, 0 to 1, in percent; a share above 0 or below 1 never reads as 0% or 100%."""
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{share:.1%}"


def format_share(value: float) -> str:
    """Return a share in percent, with two digits below 99.5 %."""
    # Two digits would make 1e+02 of a whole.
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:,.0f} %"


def format_part(part: int, total: int) -> str:
    """Return a part of a total in whole percent; "100 %" only where nothing is missing."""
    share = 100 * part / max(total, 1)
    # A share that rounds to 0 or to 100 would say "nothing" or "all".
    if 0 < share < 1:
        return "under 1 %"
    if part >= total:
        return "100 %"
    return f"{min(round(share), 99)} %"


def format_duration(seconds: float) -> str:
    """Return a time in the unit that suits it: `40 s`, `12 min`, `3.5 h`; 0 s for one below 0."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def first_names(names: Sequence[str], limit: int = 6, separator: str = ", ") -> str:
    """Return the first names of a list for a sentence, with a count of the others."""
    more = f"{separator.rstrip(', ')} and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the second values of pairs by the first ones, in their order."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def now_ms() -> int:
    """Return the milliseconds since the epoch, MLflow's unit of time."""
    return time.time_ns() // 1_000_000


def shorten_override(override: str) -> str:
    """Return an override for a label, in which a number of many digits is rounded to four.

    Searches draw such numbers, for example optimizer.lr=0.00031622776601683794.
    """
    key, equals, value = override.partition("=")
    try:
        rounded = f"{float(value):.4g}"
    except ValueError:
        return override
    return f"{key}{equals}{rounded}" if len(value) > len(rounded) + 2 else override


def quote_value(text: str) -> str:
    """Return a text as a quoted value of Hydra's grammar, which takes any character in it."""
    escaped = _BEFORE_QUOTE.sub(lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


def override_key(override: str) -> str:
    """Return the key of an override, without its marks (`+`, `~`) and its value."""
    return override.lstrip("+~").partition("=")[0]


def typed_value(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed_item, value))}]"
    return str(value)


def _typed_item(value: Any) -> str:
    """Return an item of a list as it is typed; a text in quotes where it would be read as more."""
    is_plain = not isinstance(value, str) or _PLAIN_ITEM.fullmatch(value)
    return typed_value(value) if is_plain else quote_value(value)


_PLAIN_ITEM = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z_*][\w.*/-]*", re.IGNORECASE)
"""Texts that Hydra's grammar reads as texts, and takes without quotes."""
_CONTAINER_MODULES = ("builtins", "collections", "collections.abc", "typing")
"""Modules of the classes that a list or a mapping of YAML can stand for."""


_WORDS = {
    ("builtins", "int"): "a whole number",
    ("builtins", "float"): "a number",
    ("builtins", "bool"): "true or false",
    ("builtins", "str"): "text",
    ("builtins", "NoneType"): "null",
    ("torch", "Tensor"): "a list of numbers, as in [1.0,5.0]",
}
"""By a class's module and name, since importing torch takes time."""


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
    if isinstance(kind, type):
        name = (kind.__module__, kind.__name__)
        if name in _WORDS:
            return _WORDS[name]
        if kind.__module__ not in _CONTAINER_MODULES:
            return f"a nested _target_ that returns a {kind.__name__}"
        if issubclass(kind, Mapping):
            return "keys with values, as in {a: 1}"
        if issubclass(kind, Iterable):
            item = next(iter(get_args(hint)), None)
            return _LIST_WORDS[item] if item in (int, float) else "a list, as in [a,b]"
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def leaves(value: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of a config; an empty mapping is one."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
