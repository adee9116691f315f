"""Find the smallest set of modules that has to be kept out of a precision, with few trials."""

from collections.abc import Callable, Mapping, Sequence

Modules = tuple[str, ...]
"""Dotted names of modules, which are left out of a precision with all modules inside them."""


def find_minimal_set(
    tree: Mapping[str, Sequence[str]],
    suspects: Sequence[str],
    is_enough: Callable[[Modules], bool],
) -> Modules | None:
    """Return a set of modules that is enough, and of which none can be left out or narrowed.

    First the most suspicious modules are tried alone, then all modules together. From the first
    set that is enough, one module after another is left out, the least suspicious first; then
    modules are replaced by their parts. Another set of the same size may be enough as well.

    Args:
        tree: the children of each module by dotted name; the model's own name is empty.
        suspects: names, the most suspicious first; modules that are not among them come last.
        is_enough: returns whether a set is; False once nothing more may be tried.

    Returns:
        None if not even all modules together are enough.
    """
    rank = {name: place for place, name in enumerate(suspects)}
    top = sorted(tree[""], key=lambda name: _suspicion_rank(name, rank))
    starts = _starting_sets(suspects, top)
    modules = next((start for start in starts if is_enough(start)), None)
    if modules is None:
        return None
    modules = _leave_out(modules, rank, is_enough)
    # One level of the tree at a time: large modules that can be left out are never taken apart, and
    # trials are spent below the others only.
    while True:
        narrower = _narrow_once(modules, tree, rank, is_enough)
        if narrower is None:
            return modules
        modules = narrower


def _starting_sets(suspects: Sequence[str], top: Sequence[str]) -> list[Modules]:
    """Return the sets to begin with: one, two and four suspects, then everything."""
    # Each set is a trial: a right suspicion is confirmed by the first, and a wrong one costs three
    # before the search starts from all modules.
    sets: list[Modules] = [tuple(suspects[:n]) for n in (1, 2, 4) if n <= len(suspects)]
    return [*sets, tuple(top)]


def _suspicion_rank(name: str, rank: Mapping[str, int]) -> int:
    """Return the rank of a module: that of the most suspicious module in it, 0 the highest."""
    ranks = [place for s, place in rank.items() if s == name or s.startswith(f"{name}.")]
    return min(ranks, default=len(rank))


def _leave_out(
    modules: Modules, rank: Mapping[str, int], is_enough: Callable[[Modules], bool]
) -> Modules:
    """Return the set without the modules that can be left out one after another."""
    # Zeller and Hildebrandt's ddmin ("Simplifying and Isolating Failure-Inducing Input", 2002),
    # one module at a time. The least suspicious first, which can most probably be left out.
    for name in sorted(modules, key=lambda name: -_suspicion_rank(name, rank)):
        fewer = tuple(other for other in modules if other != name)
        # The empty set is the precision itself, which fails.
        if fewer and is_enough(fewer):
            modules = fewer
    return modules


def _narrow_once(
    modules: Modules,
    tree: Mapping[str, Sequence[str]],
    rank: Mapping[str, int],
    is_enough: Callable[[Modules], bool],
) -> Modules | None:
    """Return the set with one module replaced by as few of its parts as are enough.

    Returns:
        None if no module can be replaced.
    """
    for name in modules:
        others = tuple(other for other in modules if other != name)
        parts = sorted(tree.get(name, ()), key=lambda part: _suspicion_rank(part, rank))
        # The two most suspicious parts are tried alone; a single part is tried as all parts.
        parts_alone = parts[:2] if len(parts) > 1 else []
        for part in parts_alone:
            if is_enough((*others, part)):
                return (*others, part)
        # Not even all parts are enough where the module's own arithmetic needs float32.
        if parts and is_enough((*others, *parts)):
            return _leave_out((*others, *parts), rank, is_enough)
    return None
