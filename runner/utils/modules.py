"""Select modules of a model: by patterns of dotted names, or the blocks that the model repeats.

Patterns are matched segment by segment, so that `l1` does not match `l10`.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from runner.utils.errors import ConfigError


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether a pattern names this module or one that holds it (`layer1` covers `layer1.0`);
    `*` stands for any part of one segment, a leading `*.` for any depth, `*` alone for the model
    itself, whose name is empty."""
    wanted, given = pattern.split("."), name.split(".")
    if wanted[0] == "*" and len(wanted) > 1:
        return any(_starts(wanted[1:], given[i:]) for i in range(len(given)))
    return _starts(wanted, given)


def _starts(wanted: Sequence[str], given: Sequence[str]) -> bool:
    return len(wanted) <= len(given) and all(
        fnmatchcase(g, w) for w, g in zip(wanted, given, strict=False)
    )


def select_modules(key: str, patterns: Sequence[str], names: Iterable[str]) -> set[str]:
    """Return the names that any pattern matches. Raises ConfigError if a pattern matches none.

    Args:
        key: the config key, for the message.
        patterns: as the user wrote them.
        names: dotted module names of the model, the empty one of the model itself included.
    """
    names, patterns = list(names), [str(pattern) for pattern in patterns]
    found: set[str] = set()
    problems = []
    for pattern in patterns:
        hits = {name for name in names if matches_pattern(pattern, name)}
        if not hits:
            near = get_close_matches(pattern, names, 4, 0.4) or [n for n in names if n][:8]
            problems.append(
                f"{key}: {pattern} matches no module of the model. "
                f"Nearest names: {', '.join(near) or '*'}. `*` stands for any part of one segment."
            )
        found |= hits
    if problems:
        raise ConfigError(*problems)
    return found


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, as the layers of a transformer: the outermost modules
    with children of their own of which a container holds several of one class."""
    found: list[nn.Module] = []
    members = [child for child in model._modules.values() if child is not None]
    kinds = [type(child) for child in members] if isinstance(model, _CONTAINERS) else []
    for child in members:
        many = kinds.count(type(child)) > 1 and not isinstance(child, _CONTAINERS)
        found += [child] if many and child._modules else repeated_blocks(child)
    return list(dict.fromkeys(found))
