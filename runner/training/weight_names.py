"""Rename weights by prefixes, and find the prefix or the patterns that make a file's names fit."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from runner.utils.errors import ConfigError

EVERY_NAME = "*"
"""The old prefix that stands for the beginning of every name."""
_SAMPLES = 3
"""Names of the file whose counterparts in the model are looked for."""
_COUNTERPARTS = 8
"""Names of the model that are tried for each of them, those with most segments in common."""


class Rename(NamedTuple):
    """A change of prefixes, and how many tensors fit the model after it."""

    prefixes: dict[str, str | None]
    fitting: int


def rename(weights: Mapping[str, Any], prefixes: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """Return weights under new names.

    Args:
        weights: by name.
        prefixes: of whole segments of names: the new one for each old one, None to remove it; `*`
            puts the new one in front of every name. They apply one after the other.
        path: of the file, for messages.

    Raises:
        ConfigError: a prefix begins no name, or two tensors would have one name.
    """
    renamed = dict(weights)
    for old, new in prefixes.items():
        _check_begins(str(old), renamed, path)
        before = renamed
        renamed = {}
        for name, value in before.items():
            changed = _new_name(name, str(old), "" if new is None else str(new))
            if changed in renamed:
                raise ConfigError(f"init.rename gives two tensors of {path} the name {changed}.")
            renamed[changed] = value
    return renamed


def _check_begins(prefix: str, names: Collection[str], path: Path) -> None:
    """Raise ConfigError for a prefix that begins none of the names."""
    if prefix == EVERY_NAME or any(_begins(prefix, name) for name in names):
        return
    firsts = dict.fromkeys(name.partition(".")[0] for name in names)
    known = ", ".join(islice(firsts, 6)) or "none"
    raise ConfigError(
        f"init.rename: no name in {path} begins with {prefix}. Names begin with: {known}."
    )


def _begins(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _new_name(name: str, old: str, new: str) -> str:
    if old == EVERY_NAME:
        return f"{new}.{name}" if new else name
    if not _begins(old, name):
        return name
    rest = name[len(old) :].removeprefix(".")
    return ".".join(part for part in (new, rest) if part)


def proposed_rename(
    own: Mapping[str, Any], theirs: Mapping[str, Any], fitting: int
) -> Rename | None:
    """Return the one change of a prefix with which most tensors fit; None where none helps much.

    Args:
        own: tensors of the model by name.
        theirs: tensors of the file by name.
        fitting: number of those that fit without it.
    """
    best = None
    for old, new in dict.fromkeys(_candidates(own, theirs)):
        count = 0
        for name, value in theirs.items():
            mine = own.get(_new_name(name, old, new))
            count += isinstance(mine, Tensor) and getattr(value, "shape", None) == mine.shape
        if count > (best.fitting if best else fitting):
            best = Rename({old: new or None}, count)
    # Fewer would fit by chance, as the biases of equal layers do.
    return best if best and best.fitting - fitting > len(theirs) / 4 else None


def _candidates(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield pairs of prefixes by which a few names of the file become names of the model."""
    strangers = [name for name in theirs if name not in own]
    for name in islice(strangers, 0, None, max(len(strangers) // _SAMPLES, 1)):
        segments = name.split(".")
        named = [(_common_end(segments, mine.split(".")), mine) for mine in own]
        for shared, mine in nlargest(_COUNTERPARTS, named):
            if shared:
                old = ".".join(segments[: len(segments) - shared]) or EVERY_NAME
                yield old, ".".join(mine.split(".")[:-shared])


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of segments at the end that two names have in common."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count


def shortest_patterns(names: Collection[str], every: Collection[str]) -> list[str]:
    """Return names of modules or tensors that cover some names and no other.

    Args:
        names: to be covered.
        every: all names; those that are not to be covered are among them.
    """
    wanted = set(names)
    others = [name for name in every if name not in wanted]
    # Every prefix of a name that is kept.
    kept = {".".join(name.split(".")[:n]) for name in others for n in range(1, name.count(".") + 2)}
    found: dict[str, None] = {}
    for name in names:
        segments = name.split(".")
        prefixes = (".".join(segments[:n]) for n in range(1, len(segments) + 1))
        found[next((prefix for prefix in prefixes if prefix not in kept), name)] = None
    return list(found)
