"""Divide parameters by patterns of their names: into groups with options of their own, or frozen.

`optimizer.groups` gives parameters that patterns name other options, `optimizer.no_decay_on`
exempts parameters from weight decay, `optimizer.layer_decay` lowers the learning rate from the last
block of a model to the first, and `train.freeze` freezes parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from torch import nn
from torch.optim import Optimizer

from runner.core import ConfigError, fmt, module_tree, targets, tensor_facts, train_state
from runner.precision.forward_watch import expert_layouts
from runner.precision.layers.conv1d import linear_classes
from runner.precision.layers.derived_weight import is_derived
from runner.precision.layers.experts import ExpertLayer
from runner.training.schedules import Node

NamedParameters = Mapping[str, nn.Parameter]
"""Parameters by their dotted names."""

NORMS_AND_BIASES = "norms_and_biases"
"""Value of optimizer.no_decay_on: biases, parameters of norm layers, and vectors and scalars."""

DIVISION_KEYS = ("groups", "no_decay_on", "layer_decay")
"""Keys of an optimizer that divide its parameters into groups."""

# Name of the group of the parameters that no entry of optimizer.groups names.
_REST = "rest"

# Keys of an entry of optimizer.groups that are no options of the optimizer.
_OWN_KEYS = ("match", "name")

# Options that torch's optimizers take for all of their groups together.
_WHOLE_OPTIMIZER = ("fused", "foreach", "capturable", "differentiable", "maximize")


def group_settings(node: Node) -> dict[str, Any]:
    """Return the settings of an optimizer's node that divide its parameters; empty for none."""
    values = targets.runner_values("optimizer", node)
    return {key: values[key] for key in sorted(DIVISION_KEYS) if key in values}


def matched_names(key: str, match: Any, named: NamedParameters, model: nn.Module) -> set[str]:
    """Return the names of the parameters that a `match` of the config takes.

    Args:
        key: of the match, for messages.
        match: a pattern or a list of them, of names of parameters or of modules; `matrices` for
            the matrices of hidden layers; None for every parameter.
        named: parameters by name.
        model: their owner.

    Raises:
        ConfigError: a pattern takes none of them.
    """
    if match is None:
        return {*named}
    if match != "matrices":
        return module_tree.select_modules(
            key, _patterns(match), named, "no parameter that it could take"
        )
    # Muon is made for the matrices of hidden layers (Jordan et al., 2024), and leaves embeddings
    # and the output layer to another optimizer.
    linears = [
        module
        for module in model.modules()
        if isinstance(module, linear_classes()) and not isinstance(module, ExpertLayer)
    ]
    matrices = set()
    for name, param in named.items():
        holder, _, parametrized = name.partition(".parametrizations.")
        owner = model.get_submodule(holder if parametrized else name.rpartition(".")[0])
        # The gains of a weight norm are [out, 1].
        is_gain = owner in linears and is_derived(owner) and 1 in param.shape
        is_table = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
        if param.ndim == 2 and not (is_gain or is_table or owner in linears[-1:]):
            matrices.add(name)
    return matrices


def divide_parameters(
    key: str, node: Node, model: nn.Module, named: NamedParameters
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, as its constructor takes them.

    Args:
        key: of its node, for messages.
        node: its target and keywords.
        model: the owner of the parameters.
        named: that it updates.

    Returns:
        One group with its `params` alone where no setting divides them. Otherwise each group has
        its own options, their names in `own_options`, and a `name` where its learning rate may
        differ.

    Raises:
        ConfigError: a pattern matches nothing, or the model has no order of layers.
    """
    settings = group_settings(node)
    if not settings:
        return [{"params": [*named.values()]}]
    entries = settings.get("groups", [])
    owners = _owners(key, entries, model, named)
    no_decay = settings.get("no_decay_on")
    exempt = _exempt(key, no_decay, model, named) if no_decay else set()
    depths = _depths(key, model) if "layer_decay" in settings else {}
    rows = fmt.grouped(
        ((owners[name], depths.get(name, 0), name in exempt), p) for name, p in named.items()
    )
    last = max(depths.values(), default=0)
    # The last ones are those of the parameters that no entry names.
    owner_names = [*map(_entry_name, entries), _REST]
    owner_options = [*entry_options(node), {}]
    groups = []
    for (owner, depth, is_exempt), members in sorted(rows.items()):
        options = dict(owner_options[owner])
        if is_exempt:
            options["weight_decay"] = 0.0
        group = {"params": members, **options, "own_options": sorted(options)}
        words = [owner_names[owner]] if entries else []
        if depths:
            rate = options.get("lr", _learning_rate(node))
            group["lr"] = rate * settings["layer_decay"] ** (last - depth)
            words.append(f"layer_{depth:02d}")
        if words:
            group["name"] = ".".join(words)
        groups.append(group)
    return groups


def _patterns(match: Any) -> list[str]:
    # A module's name may be a number, as in [0,1], which YAML reads as such.
    return [str(item) for item in match] if isinstance(match, list | tuple) else [str(match)]


def _entry_name(entry: Node) -> str:
    return str(entry.get("name") or _patterns(entry["match"])[0])


def _owners(
    key: str, entries: Sequence[Node], model: nn.Module, named: NamedParameters
) -> dict[str, int]:
    """Return the index of each parameter's entry; their number for those that none names."""
    owners = {}
    for i, entry in enumerate(entries):
        match = entry["match"]
        matches = matched_names(f"{key}.groups", match, named, model)
        free = matches - owners.keys()
        if not matches:
            given = f"{key}.groups: match={_typed(match)}"
            raise ConfigError(f"{given} matches no parameter that it could take.")
        if not free:
            raise ConfigError(
                f"{key}.groups: match={_typed(match)} is left nothing: the groups before it take "
                f"{fmt.first_names(sorted(matches))}. The first match wins. Put it before "
                "them."
            )
        owners.update(dict.fromkeys(free, i))
    return {name: owners.get(name, len(entries)) for name in named}


def _exempt(key: str, patterns: Any, model: nn.Module, named: NamedParameters) -> set[str]:
    """Return the names of the parameters without weight decay."""
    typed = _patterns(patterns)
    others = [pattern for pattern in typed if pattern != NORMS_AND_BIASES]
    nothing = f"no parameter, and {NORMS_AND_BIASES} stands for all norms and biases"
    exempt = module_tree.select_modules(f"{key}.no_decay_on", others, named, nothing)
    # A model without norms and biases, as one whose adapter alone trains, is no mistake.
    if NORMS_AND_BIASES in typed:
        for name, param in named.items():
            owner, _, short = name.rpartition(".")
            is_norm = type(model.get_submodule(owner)).__name__.endswith("Norm")
            # BatchNorm2d and InstanceNorm2d end otherwise; theirs are vectors, as are most norms'.
            if param.ndim <= 1 or short == "bias" or is_norm:
                exempt.add(name)
    return exempt


def _depths(key: str, model: nn.Module) -> dict[str, int]:
    """Return the depth of each parameter: 0 before the first block, i in block i, then the head.

    Source: the layer-wise rates of BEiT (Bao et al., arXiv:2106.08254).

    Raises:
        ConfigError: the model has no repeated blocks.
    """
    blocks = module_tree.repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"{key}.layer_decay takes the repeated blocks of a model, and this one has none: "
            "members of one class, in a ModuleList, ModuleDict or Sequential, that hold modules of "
            f"their own. Type {key}.groups=[{{match: <pattern>, lr: <rate>}}] instead."
        )
    depth_of_block = {}
    for depth, block in enumerate(blocks, 1):
        for p in block.parameters():
            depth_of_block.setdefault(id(p), depth)
    depths = {}
    depth = 0
    for name, p in model.named_parameters():
        # What is registered between two blocks belongs to the one before it.
        if depth == len(blocks) and id(p) not in depth_of_block:
            depth += 1
        depth = depth_of_block.get(id(p), depth)
        depths[name] = depth
    return depths


def _typed(match: Any) -> str:
    return f"[{','.join(_patterns(match))}]" if isinstance(match, list | tuple) else str(match)


def _learning_rate(node: Node) -> Any:
    """Return the rate of an optimizer's node, or the default of its target; None without any."""
    if node.get("lr") is not None:
        return node["lr"]
    parameter = signature(targets.locate(node["_target_"])).parameters.get("lr")
    return None if parameter is None or parameter.default is Parameter.empty else parameter.default


def group_problems(key: str, node: Node, optimizer: Optimizer) -> Iterator[str]:
    """Yield a message for each setting that the optimizer's class cannot follow.

    Args:
        key: of its node.
        node: its target and keywords.
        optimizer: made of the node, over any parameter.
    """
    settings = group_settings(node)
    if not settings:
        return
    target = node["_target_"]
    options = {k: v for k, v in optimizer.defaults.items() if k not in _WHOLE_OPTIMIZER}
    if "max_iter" in options and "line_search_fn" in options:
        yield f"{key}.{next(iter(settings))}: {target} takes one group of parameters alone."
        return
    exempt = settings.get("no_decay_on")
    if exempt is not None and not _are_patterns(exempt):
        yield f"{key}.no_decay_on={exempt} does not fit. Allowed: {NORMS_AND_BIASES}, or patterns."
    if exempt is not None and "weight_decay" not in options:
        yield f"{key}.no_decay_on={_typed(exempt)}: {target} has no weight_decay."
    decay = settings.get("layer_decay")
    if decay is not None and not (_is_number(decay) and 0 < decay <= 1):
        yield f"{key}.layer_decay={decay} is out of range. Allowed: above 0, 1 and below."
    if decay is not None and not _is_number(_learning_rate(node)):
        yield f"{key}.layer_decay={decay} lowers the learning rate. Type {key}.lr=<rate>."
    yield from _entry_problems(key, settings.get("groups"), target, options)


def _entry_problems(
    key: str, entries: Any, target: str, options: Mapping[str, Any]
) -> Iterator[str]:
    if entries is None:
        return
    if not isinstance(entries, list):
        yield f"{key}.groups={entries} is no list. Type {key}.groups=[{{match: head, lr: 0.01}}]."
        return
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not _are_patterns(entry.get("match")):
            yield (
                f"{key}.groups.{i}={entry} names no parameters. Type {{match: <pattern>, "
                "<option>: <value>}, as in {match: head, lr: 0.01}."
            )
            continue
        for option, value in entry.items():
            typed = f"{key}.groups.{i}.{option}={value}"
            if option == "name" and not isinstance(value, str | int):
                yield f"{typed} does not fit. Allowed: text."
            if option in _OWN_KEYS:
                continue
            if option not in options:
                yield f"{typed}: {target} has no {option} of a group. It has: {', '.join(options)}."
            elif _is_number(options[option]) and not _is_number(value):
                yield f"{typed} does not fit. Allowed: a number."
        earlier = [_entry_name(e) for e in entries[:i] if isinstance(e, Mapping) and "match" in e]
        name = _entry_name(entry)
        if name in (_REST, *earlier):
            yield (
                f"{key}.groups.{i} has the name {name}, which is taken: its rate could not be told "
                f"from another's in lr/{name}. Give it a name, as in {{match: ..., name: head}}."
            )


def _are_patterns(value: Any) -> bool:
    """Return whether a value is a pattern, or a list of at least one."""
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(isinstance(item, str | int) and item != "" for item in items)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def entry_options(node: Node) -> list[dict[str, Any]]:
    """Return the options of each entry of optimizer.groups."""
    entries = group_settings(node).get("groups")
    # What is no list of mappings has a message of its own.
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        return []
    return [{k: v for k, v in entry.items() if k not in _OWN_KEYS} for entry in entries]


def describe_groups(optimizers: Sequence[train_state.ScheduledOptimizer]) -> str:
    """Return one line about the groups of parameters that settings made; empty without any."""
    tensors = {}
    rates = {}
    exempt = 0
    every = 0
    for scheduled in optimizers:
        groups = scheduled.optimizer.param_groups
        full_rates = scheduled.full_rates()
        for name, group, rate in zip(scheduled.group_names, groups, full_rates, strict=True):
            count = len(group["params"])
            every += count
            tensors[name] = tensors.get(name, 0) + count
            rates[name] = rate
            is_own = "weight_decay" in group.get("own_options", ())
            if is_own and group["weight_decay"] == 0:
                exempt += count
    parts = [f"{name}: {tensors[name]} at lr {rates[name]:g}" for name in tensors if name]
    words = [f"parameter groups, in tensors: {', '.join(parts)}"] if parts else []
    if exempt:
        words.append(f"no weight decay on {exempt} of {every} tensors")
    return "; ".join(words)


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names, or whose modules' names, match a pattern.

    Args:
        model: converted, with its adapter; changed in place.
        patterns: of dotted names; none freezes nothing.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    named = dict(model.named_parameters())
    had_trainable = any(p.requires_grad for p in named.values())
    # Packed experts have taken the place of the parameter that held them.
    names = [*named, *expert_layouts(model)]
    for name in module_tree.select_modules(
        "train.freeze", patterns, names, "no parameter of the model"
    ):
        # Codes of packed weights are integers, which never train.
        if name in named and named[name].requires_grad:
            named[name].requires_grad_(False)
    if had_trainable and not any(p.requires_grad for p in named.values()):
        raise ConfigError(
            f"train.freeze=[{','.join(patterns)}] leaves nothing to train: it freezes all "
            f"{len(named)} parameters of the model. Leave out a pattern."
        )


def describe_frozen(model: nn.Module) -> str:
    """Return how many parameters of a model are frozen, and their size."""
    params = [*model.parameters()]
    frozen = [p for p in params if not p.requires_grad]
    size = tensor_facts.tensor_bytes(*frozen) / tensor_facts.MIB
    return f"frozen: {len(frozen)} of {len(params)} parameters, {size:.1f} MiB"
