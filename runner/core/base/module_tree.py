"""Select modules and tensors of a model by patterns of dotted names, or the blocks it repeats."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from runner.core.base.errors import refuse


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether a pattern names this module or one that holds it (`layer1` covers `layer1.0`).

    `*` stands for any part of one segment, a leading `*.` for any depth, `*` alone for the model
    itself, whose name is empty.
    """
    # Segment by segment, so that `l1` does not match `l10`.
    segments = pattern.split(".")
    path = name.split(".")
    if segments[0] == "*" and len(segments) > 1:
        return any(_matches_prefix(segments[1:], path[depth:]) for depth in range(len(path)))
    return _matches_prefix(segments, path)


def _matches_prefix(segments: Sequence[str], path: Sequence[str]) -> bool:
    if len(segments) > len(path):
        return False
    pairs = zip(segments, path, strict=False)
    return all(fnmatchcase(part, segment) for segment, part in pairs)


def select_modules(
    key: str,
    patterns: Iterable[Any],
    names: Iterable[str],
    nothing: str = "no module of the model",
    others: Iterable[str] = (),
) -> set[str]:
    """Return the names that any pattern matches.

    Args:
        key: the config key, for the message.
        patterns: as the user wrote them.
        names: dotted names of the model's modules, the empty one of the model itself included; or
            of its parameters.
        nothing: says in the message what a pattern matches that matches none of them.
        others: further names, for patterns that match none of `names`.

    Raises:
        ConfigError: a pattern matches no name.
    """
    names = list(names)
    others = list(others)
    selected: set[str] = set()
    problems = []
    # A module's name may be a number, as in [0,1], which YAML reads as such.
    for pattern in map(str, patterns):
        matches = {name for name in names if matches_pattern(pattern, name)}
        matches = matches or {name for name in others if matches_pattern(pattern, name)}
        if not matches:
            problems.append(
                f"{key}: {pattern} matches {nothing}. Nearest names: "
                f"{nearest_names(pattern, [*names, *others])}. "
                "`*` stands for any part of one segment."
            )
        selected |= matches
    refuse(problems)
    return selected


def name_prefixes(name: str) -> Iterator[str]:
    """Yield the dotted names of what holds a module or tensor, the outermost first, and its own."""
    segments = name.split(".")
    for depth in range(1, len(segments) + 1):
        yield ".".join(segments[:depth])


def nearest_names(pattern: str, names: Collection[str]) -> str:
    """Return the names of parameters or modules, and of what holds them, most like a pattern."""
    candidates = dict.fromkeys(names)
    for name in [*candidates]:
        candidates |= dict.fromkeys(name_prefixes(name))
    near = get_close_matches(pattern, [*candidates], n=4, cutoff=0.4)
    return ", ".join(near or [name for name in names if name][:6]) or "*"


def outermost_names(names: Collection[str]) -> set[str]:
    """Return the names of the modules that no other module of these names holds.

    Args:
        names: dotted module names; the empty one, of the model itself, holds every other.
    """
    if "" in names:
        return {""}
    prefixes = tuple(f"{name}." for name in names)
    return {name for name in names if not name.startswith(prefixes)}


def frozen_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules whose parameters are all frozen, by dotted name.

    Empty for a model that is frozen as a whole: it has no part that trains beside them.
    """
    frozen = []
    for name, module in model.named_modules():
        if {p.requires_grad for p in module.parameters()} == {False}:
            frozen.append(name)
    parts = {name: model.get_submodule(name) for name in sorted(outermost_names(frozen))}
    return {} if "" in parts else parts


def note_evaluation_parts(model: nn.Module) -> list[str]:
    """Note the outermost modules that a model has set to evaluation mode; return their names.

    set_training leaves them in it.
    """
    # The mode of the whole model says nothing about its parts.
    modules = model.named_modules() if model.training else ()
    idle = [name for name, module in modules if not module.training]
    noted: list[str] = []
    for name in sorted(outermost_names(idle)):
        module = model.get_submodule(name)
        trains = any(p.requires_grad for p in module.parameters())
        # from_pretrained leaves every model in evaluation mode, also one that is to be trained.
        if not (trains and hasattr(module, "from_pretrained")):
            vars(module)[_STAYS_IN_EVALUATION] = True
            noted.append(name)
    return noted


def set_training(model: nn.Module) -> None:
    """Set a model to training mode, except for the parts that it has set to evaluation mode."""
    model.train()
    for module in model.modules():
        if _STAYS_IN_EVALUATION in vars(module):
            module.eval()


_STAYS_IN_EVALUATION = "_stays_in_evaluation"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ConditionalModules(nn.ModuleList):
    """Modules of which a forward runs some, as its data says (conditional computation), so that
    they are no blocks, which all processes run."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, for example the layers of a transformer.

    A block is an outermost module with children of its own of which a container holds several of
    one class.
    """
    if isinstance(model, ConditionalModules):
        return []
    blocks: list[nn.Module] = []
    children = [child for child in model._modules.values() if child is not None]
    kinds = [type(child) for child in children] if isinstance(model, _CONTAINERS) else []
    for child in children:
        is_repeated = kinds.count(type(child)) > 1 and not isinstance(child, _CONTAINERS)
        if is_repeated and child._modules:
            blocks.append(child)
        else:
            blocks += repeated_blocks(child)
    # A model may hold one module in several places: it counts once.
    return list(dict.fromkeys(blocks))
