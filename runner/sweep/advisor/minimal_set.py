"""The smallest set of modules that heals a precision when they are kept out of it."""

from collections.abc import Callable, Mapping, Sequence

Modules = tuple[str, ...]


def smallest_set(
    tree: Mapping[str, Sequence[str]], suspects: Sequence[str], heals: Callable[[Modules], bool]
) -> Modules | None:
    """A set of modules none of which can be left out, or be narrowed to its parts.

    First the most suspicious modules alone, then all; of those that heal, one after another is
    left out (Zeller's ddmin, one at a time, the least suspicious first), then replaced by its
    parts.

    Args:
        tree: the children of each module by dotted name; the model's own is empty.
        suspects: names, the most suspicious first; others come after them.
        heals: whether a set does; False once nothing more may be tried.

    Returns:
        None where not even all modules together heal it.
    """
    rank = {name: place for place, name in enumerate(suspects)}
    top = sorted(tree[""], key=lambda name: _rank(name, rank))
    found = next((s for s in _first(suspects, top) if heals(s)), None)
    if found is None:
        return None
    found = _without(found, rank, heals)
    while (narrower := _narrowed(found, tree, rank, heals)) is not None:
        found = narrower
    return found


def _first(suspects: Sequence[str], top: Sequence[str]) -> list[Modules]:
    """Sets to begin with: one, two and four suspects, then everything."""
    tries: list[Modules] = [tuple(suspects[:n]) for n in (1, 2, 4) if n <= len(suspects)]
    return [*tries, tuple(top)]


def _rank(name: str, rank: Mapping[str, int]) -> int:
    """A module is as suspicious as the most suspicious one in it."""
    inside = [p for s, p in rank.items() if s == name or s.startswith(f"{name}.")]
    return min(inside, default=len(rank))


def _without(found: Modules, rank: Mapping[str, int], heals: Callable[[Modules], bool]) -> Modules:
    for name in sorted(found, key=lambda name: -_rank(name, rank)):
        fewer = tuple(other for other in found if other != name)
        if fewer and heals(fewer):
            found = fewer
    return found


def _narrowed(
    found: Modules,
    tree: Mapping[str, Sequence[str]],
    rank: Mapping[str, int],
    heals: Callable[[Modules], bool],
) -> Modules | None:
    """The set with one of its modules replaced by as few of its parts as do."""
    for name in found:
        others = tuple(other for other in found if other != name)
        parts = sorted(tree.get(name, ()), key=lambda part: _rank(part, rank))
        for chosen in [(part,) for part in parts[:2]] if len(parts) > 1 else []:
            if heals((*others, *chosen)):
                return (*others, *chosen)
        if parts and heals((*others, *parts)):
            return _without((*others, *parts), rank, heals)
    return None
