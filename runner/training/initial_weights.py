"""Load the weights that init.weights names: renamed, without those that init.skip leaves out.

Where they do not fit, the error names the prefix or the patterns with which they do.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.core import ConfigError, RunSpec, fmt, module_tree, tensor_facts, terminal
from runner.precision.layers.conv1d import is_transposed
from runner.precision.layers.quantized_linear import unpack_state_dict

Weights = Mapping[str, Any]
"""Tensors by their names in a state dict; an extra state may be something else."""
# End of the name of a buffer that weights older than torch 1.0 lack, and that torch fills in.
_COUNTERS = ".num_batches_tracked"
EVERY_NAME = "*"
"""The old prefix that stands for the beginning of every name."""
# Names of the file whose counterparts in the model are looked for.
_SAMPLES = 3
# Names of the model that are tried for each of them.
_COUNTERPARTS = 8


class InitialWeights(NamedTuple):
    """What a model took from init.weights.

    Attributes:
        where: the value of init.weights.
        source: the format of the file, in words.
        loaded: names of the model's parameters and buffers that were loaded.
        fresh: names of those that init.skip left at their fresh values.
        unused: names in the file that init.skip left out.
        rename: init.rename.
    """

    where: str
    source: str
    loaded: list[str]
    fresh: list[str]
    unused: list[str]
    rename: dict[str, str]

    def describe(self) -> str:
        """Return in one line what was loaded and what was not."""
        every = len(self.loaded) + len(self.fresh)
        line = f"weights: {len(self.loaded)} of {every} tensors from {self.where} ({self.source})"
        if self.fresh:
            line += f"; fresh: {fmt.first_names(self.fresh)}"
        if self.unused:
            line += f"; not used: {fmt.first_names(self.unused)}"
        return line


def load_selected(model: nn.Module, weights: Weights, spec: RunSpec, source: str) -> InitialWeights:
    """Copy weights into a model, all but those that init.skip leaves out.

    Args:
        model: changed in place; its packed layers take packed weights only.
        weights: renamed, by their names in the model.
        spec: its init section is read.
        source: the format of the file, for the record.

    Raises:
        ConfigError: names or shapes differ, or a pattern of init.skip matches nothing.
    """
    own = model.state_dict(keep_vars=True)
    where = f"nothing in the model or in {spec.init.weights}"
    skipped = module_tree.select_modules("init.skip", spec.init.skip, {**own, **weights}, where)
    selected = {name: value for name, value in weights.items() if name not in skipped}
    missing = _missing_names(own, weights, skipped)
    unexpected = [name for name in selected if name not in own]
    other_shapes = [
        name for name in selected if name in own and not _fits(own[name], selected[name])
    ]
    if missing or unexpected or other_shapes:
        raise _misfit(spec, own, selected, missing, unexpected, other_shapes)
    try:
        if not any(isinstance(value, Tensor) and value.is_meta for value in own.values()):
            model.load_state_dict(dict(selected), strict=False)
    except (RuntimeError, ValueError) as error:
        # Packed weights, whose shapes their layers compare.
        raise ConfigError(
            f"init.weights={spec.init.weights} does not fit the model: {misfit_reason(error)} For "
            "packed weights take the precision.ignore_modules that they were packed with, too."
        ) from error
    fresh = [name for name in own if name in skipped]
    unused = [name for name in weights if name in skipped and name not in own]
    loaded = [name for name in own if name not in skipped]
    renamed = {str(old): str(new or "") for old, new in spec.init.rename.items()}
    return InitialWeights(spec.init.weights or "", source, loaded, fresh, unused, renamed)


def entries_below(prefix: str, weights: Weights) -> dict[str, Any]:
    """Return the weights whose names begin with a prefix, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def misfit_reason(error: Exception) -> str:
    """Return the first reason of an error of load_state_dict."""
    # torch lists each name below a first line that says nothing about this model.
    lines = str(error).splitlines()
    return lines[1].strip() if len(lines) > 1 else str(error)


def unpack_weights(model: nn.Module, weights: Weights) -> dict[str, Any]:
    """Return packed weights as the numbers that they stand for, for a model of plain layers.

    Args:
        model: says which of its layers store their weights transposed.
        weights: state dict of such a model whose layers are packed.

    Raises:
        ValueError: a packed weight lacks its scales.
    """
    transposed = [name for name, module in model.named_modules() if is_transposed(module)]
    return unpack_state_dict(weights, transposed)


def _missing_names(own: Weights, weights: Weights, skipped: Collection[str]) -> list[str]:
    """Return the names of the model that the file lacks, of a tied weight under all its names.

    Raises:
        ConfigError: one name of a tied weight is skipped and another one is loaded, or the file has
            two values for it.
    """
    sharers = fmt.grouped((id(value), name) for name, value in own.items())
    lacking = set()
    for names in sharers.values():
        fresh = [name for name in names if name in skipped]
        loaded = [name for name in names if name in weights and name not in skipped]
        if fresh and loaded:
            raise ConfigError(
                f"init.skip leaves {fresh[0]} out, which shares its values with {loaded[0]}. "
                f"Type init.skip=[{fresh[0]},{loaded[0]}], or leave both to be loaded."
            )
        tensors = [name for name in names if isinstance(weights.get(name), Tensor)]
        for name in tensors[1:]:
            if not torch.equal(weights[tensors[0]], weights[name]):
                raise ConfigError(
                    f"The file has other values for {name} than for {tensors[0]}, which are one "
                    "weight of the model. Give weights of a model that ties them, too."
                )
        if not loaded:
            lacking.update(names)
    return [n for n in own if n in lacking and n not in skipped and not n.endswith(_COUNTERS)]


def _fits(own: Any, theirs: Any) -> bool:
    """Return whether two entries of state dicts have one shape; packed ones are compared later."""
    if not isinstance(own, Tensor) or not isinstance(theirs, Tensor):
        return isinstance(own, Tensor) == isinstance(theirs, Tensor)
    if own.dtype in (torch.uint8, torch.int8):
        return True
    # Eight-bit numbers are codes, whose scales stand elsewhere in the file.
    has_values = theirs.is_floating_point() and theirs.itemsize > 1
    return own.shape == theirs.shape and (has_values or not own.is_floating_point())


def _misfit(
    spec: RunSpec,
    own: Weights,
    selected: Weights,
    missing: list[str],
    unexpected: list[str],
    other_shapes: list[str],
) -> ConfigError:
    """Return the error that lists what does not fit, and says what to type."""
    shapes = [f"{n}: {_shape(selected[n])}, in the model {_shape(own[n])}" for n in other_shapes]
    names_by_problem = {
        "missing in the file": missing,
        "unexpected in the file": unexpected,
        "of another shape or kind": shapes,
    }
    parts = []
    for problem, names in names_by_problem.items():
        if names:
            parts.append(f"{len(names)} {problem} ({fmt.first_names(names)})")
    fitting = len(selected) - len(unexpected) - len(other_shapes)
    text = (
        f"init.weights={spec.init.weights} does not fit the model: {'; '.join(parts)}; {fitting} "
        f"of the model's {len(own)} tensors fit."
    )
    # The one change of a prefix with which most tensors fit.
    best = fitting
    renames = {}
    for old, new in dict.fromkeys(_candidates(own, selected)):
        count = 0
        for name, value in selected.items():
            name = _new_name(name, old, new)
            count += name in own and _fits(own[name], value)
        if count > best:
            best = count
            renames = {**spec.init.rename, old: new}
    # Fewer would fit by chance, as the biases of equal layers do.
    if best - fitting > len(selected) / 4:
        pairs = ",".join(f"{old}:{new or 'null'}" for old, new in renames.items())
        word = terminal.quote_command([f"init.rename={{{pairs}}}"])
        return ConfigError(f"{text} Type {word}: then {best} fit.")
    if not fitting:
        return ConfigError(
            f"{text} It holds weights of another model. Give those of this one, or name the "
            "prefix that its names have here, as in init.rename={backbone:encoder}."
        )
    patterns = shortest_patterns([*missing, *unexpected, *other_shapes], [*own, *selected])
    skip = ",".join([*map(str, spec.init.skip), *patterns])
    word = terminal.quote_command([f"init.skip=[{skip}]"])
    return ConfigError(
        f"{text} Type {word} to load the others: the model keeps fresh values there, and what is "
        "only in the file is not used."
    )


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    is_usual = value.is_floating_point() and value.itemsize > 1
    kind = "" if is_usual else f" {tensor_facts.dtype_name(value.dtype)}"
    return f"{list(value.shape)}{kind}"


def rename(weights: Weights, prefixes: Mapping[Any, Any], path: Path) -> dict[str, Any]:
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
        before = renamed
        if old != EVERY_NAME and not any(_begins(str(old), name) for name in before):
            firsts = dict.fromkeys(name.partition(".")[0] for name in before)
            known = fmt.first_names([*firsts]) or "none"
            raise ConfigError(
                f"init.rename: no name in {path} begins with {old}. Names begin with: {known}."
            )
        renamed = {}
        for name, value in before.items():
            changed = _new_name(name, str(old), "" if new is None else str(new))
            if changed in renamed:
                raise ConfigError(f"init.rename gives two tensors of {path} the name {changed}.")
            renamed[changed] = value
    return renamed


def _begins(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _new_name(name: str, old: str, new: str) -> str:
    if old == EVERY_NAME:
        old = ""
    elif not _begins(old, name):
        return name
    rest = name[len(old) :].removeprefix(".")
    return ".".join(filter(None, (new, rest)))


def _candidates(own: Weights, theirs: Weights) -> Iterator[tuple[str, str]]:
    """Yield pairs of prefixes by which a few names of the file become names of the model."""
    strangers = [name for name in theirs if name not in own]
    for name in strangers[:: max(len(strangers) // _SAMPLES, 1)]:
        pairs: dict[str, str] = {}
        # The longest end that a name of the model has, too, is tried first.
        for old in ("", *module_tree.name_prefixes(name)):
            end = name.removeprefix(old).strip(".")
            for own_name in own:
                if f".{own_name}".endswith(f".{end}"):
                    pairs.setdefault(own_name, old)
        for own_name, old in [*pairs.items()][:_COUNTERPARTS]:
            end = name.removeprefix(old).strip(".")
            yield old or EVERY_NAME, own_name.removesuffix(end).rstrip(".")


def shortest_patterns(names: Collection[str], every: Collection[str]) -> list[str]:
    """Return names of modules or tensors that cover some names and no other.

    Args:
        names: to be covered.
        every: all names; those that are not to be covered are among them.
    """
    covered = set(names)
    # Every prefix of a name that is kept.
    outside = set()
    for name in set(every) - covered:
        outside.update(module_tree.name_prefixes(name))
    patterns = {}
    for name in names:
        own = (prefix for prefix in module_tree.name_prefixes(name) if prefix not in outside)
        patterns[next(own, name)] = None
    return list(patterns)
