"""Rename weights by prefixes, and find the prefix or the patterns that make a file's names fit."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from runner.utils.errors import ConfigError

EVERY_NAME = "*"
"""The old prefix that stands for every name that no other prefix begins."""
_SAMPLES = 3
"""Names of the file whose counterparts in the model are looked for."""


class Rename(NamedTuple):
    """A change of prefixes, and how many tensors fit the model after it."""

    prefixes: dict[str, str | None]
    fitting: int


def rename(weights: Mapping[str, Any], prefixes: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """Return weights under new names.

    Args:
        weights: by name.
        prefixes: of whole segments of names: the new one for each old one, None to remove it; of
            several that fit the longest applies, and `*` is put in front of all other names.
        path: of the file, for messages.

    Raises:
        ConfigError: a prefix begins no name, or two tensors would have one name.
    """
    pairs = {str(old): str(new) if new is not None else "" for old, new in prefixes.items()}
    for old in pairs:
        if old != EVERY_NAME and not any(_begins(old, name) for name in weights):
            firsts = dict.fromkeys(name.partition(".")[0] for name in weights)
            known = ", ".join(islice(firsts, 6)) or "none"
            raise ConfigError(
                f"init.rename: no name in {path} begins with {old}. Names begin with: {known}."
            )
    renamed: dict[str, Any] = {}
    for name, value in weights.items():
        new = _new_name(name, pairs)
        if new in renamed:
            raise ConfigError(f"init.rename gives two tensors of {path} the name {new}.")
        renamed[new] = value
    return renamed


def _begins(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _new_name(name: str, pairs: Mapping[str, str]) -> str:
    fitting = [old for old in pairs if old != EVERY_NAME and _begins(old, name)]
    if fitting:
        old = max(fitting, key=len)
        rest = name[len(old) :].removeprefix(".")
        return ".".join(part for part in (pairs[old], rest) if part)
    added = pairs.get(EVERY_NAME, "")
    return f"{added}.{name}" if added else name


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
            mine = own.get(_new_name(name, {old: new}))
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
        # Weights of models without layers have names of one segment.
        for mine in own:
            parts = mine.split(".")
            shared = _common_end(segments, parts)
            if shared:
                old = ".".join(segments[: len(segments) - shared]) or EVERY_NAME
                yield old, ".".join(parts[: len(parts) - shared])


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
