"""Replace a model's linear layers by low-precision ones, in place, and report each one that is
replaced, and the reason for each that is not.

Every decision is made before the first module changes, so that a refusal leaves the model
unchanged. A module's object stays and gets the class and the tensors of the new layer, so that
names, references that the model keeps elsewhere, sharing, hooks, training mode and the user's own
attributes survive.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from runner.core import (
    ConfigError,
    ConversionPlan,
    ConversionReport,
    Fate,
    ModuleConversion,
    fmt,
    module_tree,
    tensor_facts,
)
from runner.precision.casting import KEEP_FP32_REASON, no_op_hook
from runner.precision.layers.conv1d import layer_widths
from runner.precision.layers.experts import (
    clashing_names,
    convert_experts,
    expert_matrices,
    linear_of,
    own_stacks,
    possible_stacks,
)

ROOT_NAME = "(model)"  # in reports, of a model that is itself a layer; its dotted name is empty
KEPT_REASON = "keeps its dtype: the model declares float32, or froze it in this one"
IGNORED_REASON = "named by precision.ignore_modules"
ROUTER_REASON = "a router: it stays in float32, unless precision.ignore_modules names it"
# Where nn.Module keeps hooks. The dictionaries stay the same objects, so that handles that the user
# holds still remove their hooks.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)

LayerConverter = Callable[[nn.Module], None]
Layers = list[tuple[ModuleConversion, nn.Module]]
"""Layers of a model, each with its row of a report."""


@dataclass(frozen=True)
class ConversionRules:
    """The rules by which modules are converted or skipped.

    Attributes:
        name: of the precision, for messages.
        ignore: the patterns of `precision.ignore_modules`.
        keep_fp32: dotted names of the modules that `precision.keep_fp32` selects.
        find_obstacle: returns why this precision cannot hold a module; empty where it can.
        new_weights: the weight becomes another object, so that no other module may share it and
            no hook may be registered on it.
        skips_shared: skip layers that share a parameter, although no weight is replaced.
        kept: names of the parameters and buffers that keep their dtype.
        experts: dotted names of stacked weights, and whether each is transposed, beside those that
            modules say they have; see layers.experts.own_stacks.
        plan: what forwards have found out about the model. Where one follows that finds further
            experts, plain layers compute the products of the other stacked weights until then.
    """

    name: str
    ignore: Sequence[str] = ()
    keep_fp32: Collection[str] = ()
    find_obstacle: Callable[[nn.Module], str] = lambda module: ""
    new_weights: bool = False
    skips_shared: bool = False
    kept: Collection[str] = ()
    experts: Mapping[str, bool] = field(default_factory=dict)
    plan: ConversionPlan = ConversionPlan()

    def stacks(self, path: str, module: nn.Module) -> dict[str, bool]:
        """Return the stacked weights of experts that a module holds, by name, and whether each is
        transposed; the path is the module's name in reports."""
        prefix = "" if path == ROOT_NAME else f"{path}."
        found = {
            name: self.experts[f"{prefix}{name}"]
            for name in module._parameters
            if f"{prefix}{name}" in self.experts
        }
        return own_stacks(module) | found


def convert_modules(
    model: nn.Module, converters: Mapping[type[nn.Module], LayerConverter], rules: ConversionRules
) -> ConversionReport:
    """Convert every module that the rules allow, in place; return a row for each module looked at.

    Args:
        model: changed in place.
        converters: by the plain class of a layer, the function that converts one of its objects.
        rules: which modules are converted.

    Raises:
        ConfigError: nothing would be converted, a pattern matches nothing, or a hook is registered
            on a weight that would be replaced.
    """
    pairs = classify_modules(model, tuple(converters), rules)
    candidates = _candidates(pairs, rules) if rules.plan.finds_experts else {}
    chosen = [
        (row.module, module)
        for row, module in pairs
        if row.is_converted and module not in candidates
    ]
    report = ConversionReport(tuple(row for row, _ in pairs))
    if chosen or not candidates:
        _check_conversion(rules, report, chosen)
    for path, module in chosen:
        # In evaluation nn.TransformerEncoderLayer reads its parts' weights and does not call their
        # forward, unless a part has a hook.
        module.register_forward_pre_hook(no_op_hook)
        stacks = rules.stacks(path, module)
        pattern = _pattern_of(path)
        try:
            if stacks:
                convert_experts(module, stacks, converters[nn.Linear], rules.new_weights)
            else:
                kind = next(k for k in converters if isinstance(module, k))
                converters[kind](module)
            vars(module)["converted_name"] = pattern
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"precision={rules.name} cannot convert {path} ({type(module).__name__}): "
                f"{type(error).__name__}: {error} Type precision.ignore_modules=[{pattern}]."
            ) from error
    for module, stacks in candidates.items():
        convert_experts(module, stacks, None)
    return report


def _pattern_of(path: str) -> str:
    """Return the pattern of precision.ignore_modules that names the module of a report's row."""
    return "*" if path == ROOT_NAME else path


def _candidates(pairs: Layers, rules: ConversionRules) -> dict[nn.Module, dict[str, bool]]:
    """Return the modules with stacked weights of which a forward is to show whether they are
    experts, and the names of those weights."""
    found = {}
    for row, module in pairs:
        stacks = {} if row.fate is Fate.DECLINED else possible_stacks(module)
        # precision.experts may name one of several; transformers declares all.
        known = rules.stacks(row.module, module) if row.is_converted else {}
        if stacks.keys() - known.keys() and not own_stacks(module):
            found[module] = stacks
    return found


def classify_modules(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], rules: ConversionRules
) -> Layers:
    """Return each layer with a row that says whether it is to be converted.

    A layer is a module that holds matrix weights, is of one of these kinds, or is converted
    already. Nothing is changed.

    Args:
        model: unchanged.
        kinds: the plain classes that the precision converts.
        rules: which modules are converted.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    # Modules are compared by identity: one that is registered twice has two names.
    modules = dict(model.named_modules(remove_duplicate=False))
    ignored_names = module_tree.select_modules("precision.ignore_modules", rules.ignore, modules)
    declined = {modules[name]: IGNORED_REASON for name in ignored_names}
    for name in rules.kept:
        declined[modules[name.rpartition(".")[0]]] = KEPT_REASON
    routers = {modules[name] for name in find_routers(model, rules)}
    for name in rules.keep_fp32:
        # The layer that holds the tensor.
        holder = model.get_submodule(name.rpartition(".")[0])
        kept = modules[name].modules() if name in modules else [holder]
        declined |= dict.fromkeys(kept, KEEP_FP32_REASON)
    holders = _holders_by_parameter(model)
    pairs: Layers = []
    for name, module in model.named_modules():
        # It holds the weight of the module around it, which has a row.
        if isinstance(module, parametrize.ParametrizationList):
            continue
        kind = next((each for each in kinds if isinstance(module, each)), None)
        if kind is None and not is_converted(module) and not weight_matrices(module):
            continue
        path = name or ROOT_NAME
        # The user's own choice is named first, then what the model does, then what the layer is.
        fate = Fate.SKIPPED
        if module in declined:
            fate, why = Fate.DECLINED, declined[module]
        elif module in routers:
            why = ROUTER_REASON
        elif path in rules.plan.bypassed:
            why = rules.plan.bypassed[path]
        else:
            why = _obstacle(path, module, kind, rules, holders)
        if not why:
            fate = Fate.CONVERTED
        pairs.append((ModuleConversion(path, type(module).__name__, fate, why), module))
    return _with_counts(pairs, rules)


def named_experts(model: nn.Module, patterns: Sequence[str]) -> dict[str, bool]:
    """Return the stacked weights that precision.experts names, and whether each is transposed.

    Args:
        model: unchanged.
        patterns: of names of parameters of three dimensions, [experts, out, in]; with `:in_out`
            behind it of [experts, in, out].

    Raises:
        ConfigError: a pattern matches none.
    """
    # Under all its names: a stacked weight may be shared.
    named = model.named_parameters(remove_duplicate=False)
    shapes = {name: [*parameter.shape] for name, parameter in named if not is_lazy(parameter)}
    names = [name for name, shape in shapes.items() if len(shape) == 3]
    found: dict[str, bool] = {}
    for pattern in map(str, patterns):
        name, _, layout = pattern.partition(":")
        if layout not in ("", "in_out"):
            raise ConfigError(
                f"precision.experts: {pattern} ends in :{layout}. Allowed: {name}, of a weight "
                f"[experts, out, in], or {name}:in_out, of [experts, in, out]."
            )
        matches = [each for each in shapes if module_tree.matches_pattern(name, each)]
        if matches and not {*matches} & {*names}:
            raise ConfigError(
                f"precision.experts: {pattern} matches {matches[0]}, whose shape is "
                f"{shapes[matches[0]]}. Allowed: weights of three dimensions, [experts, out, in] "
                "or [experts, in, out]."
            )
        nothing = "no parameter of three dimensions"
        chosen = module_tree.select_modules("precision.experts", [name], names, nothing)
        found |= dict.fromkeys(chosen, bool(layout))
    return found


def find_routers(model: nn.Module, rules: ConversionRules) -> set[str]:
    """Return the dotted names of the routers of a model's experts, but for those that the rules
    ignore: of modules in the one that holds the experts, or else beside it, with a single matrix
    that has as many outputs as there are experts."""
    modules = dict(model.named_modules(remove_duplicate=False))
    routers: set[str] = set()
    for path, module in model.named_modules():
        stacks = rules.stacks(path or ROOT_NAME, module)
        if stacks:
            count = len(module.get_parameter(next(iter(stacks))))
            parent = path.rpartition(".")[0]
            inside = _routers_in(module, path, count)
            routers |= inside or _routers_in(modules[parent], parent, count)
    return routers - module_tree.select_modules("precision.ignore_modules", rules.ignore, modules)


def _routers_in(module: nn.Module, path: str, count: int) -> set[str]:
    """Return the names of a module's children with a single matrix of so many outputs, or, if none
    has one, of their children."""
    for depth in (0, 1):
        found = set()
        for name, part in module.named_modules(remove_duplicate=False):
            if name and name.count(".") == depth and _has_outputs(part, count):
                found.add(f"{path}.{name}".removeprefix("."))
        if found:
            return found
    return set()


def _has_outputs(module: nn.Module, count: int) -> bool:
    """Return whether a module has a single matrix, of so many outputs."""
    shapes = [matrix.shape for matrix in weight_matrices(module).values()]
    return len(shapes) == 1 and len(shapes[0]) == 2 and shapes[0][0] == count


def _obstacle(
    path: str,
    module: nn.Module,
    kind: type[nn.Module] | None,
    rules: ConversionRules,
    holders: Mapping[int, list[str]],
) -> str:
    """Return why a module, or the experts that it holds, cannot be converted; empty where they can.

    Args:
        path: its name in reports.
        module: a layer; see classify_modules.
        kind: the plain class that it is an instance of.
        rules: which modules are converted.
        holders: see _holders_by_parameter.
    """
    stacks = rules.stacks(path, module)
    if is_converted(module):
        return f"is a {type(module).__name__} already"
    if stacks:
        clashes = ", ".join(clashing_names(module))
        reason = clashes and f"has {clashes} of its own, names that converted experts take"
    elif kind is None:
        reason = _reason_of_other(module, rules.name)
    else:
        reason = _reason_of_layer(module, kind)
    if reason:
        return reason
    # A module that shares the weight would still hold the plain one.
    if rules.new_weights or rules.skips_shared:
        others = ", ".join(_sharing_modules(path, module, holders))
        if others:
            return f"shares a parameter with {others}"
    # Last, because it reads the weight and the widths, which a lazy layer, for example, lacks.
    if not stacks:
        return rules.find_obstacle(module)
    for stack, transposed in stacks.items():
        reason = _reason_of_stack(module.get_parameter(stack).detach(), transposed, rules)
        if reason:
            return f"{stack} {reason}"
    return ""


def _reason_of_stack(weight: Tensor, transposed: bool, rules: ConversionRules) -> str:
    """Return why a stacked weight's experts cannot be converted; empty where they can."""
    matrices = expert_matrices(weight, transposed)
    if not matrices.is_floating_point():
        return f"is {tensor_facts.dtype_name(matrices.dtype)}"
    # The widths are those of one expert; the values are looked at together.
    reason = rules.find_obstacle(linear_of(matrices[0].to("meta")))
    return reason or rules.find_obstacle(linear_of(matrices.flatten(0, 1)))


def weight_matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own floating or complex parameters of two dimensions or more, by name; for
    a parametrized weight the parameters that it is computed from. Those of a lazy layer are not
    among them: they have no dimensions yet."""
    parameters = dict(module.named_parameters(recurse=False))
    if parametrize.is_parametrized(module):
        parametrizations = module.get_submodule("parametrizations")
        parameters |= dict(parametrizations.named_parameters(prefix="parametrizations"))
    # A lazy parameter has no dimensions to ask for.
    return {
        name: p
        for name, p in parameters.items()
        if (p.is_floating_point() or p.is_complex()) and not is_lazy(p) and p.ndim > 1
    }


def _with_counts(pairs: Layers, rules: ConversionRules) -> Layers:
    """Return the rows with the number of elements of their matrix weights.

    A shared weight is counted once: with the first module that is converted, else with the first.
    """
    # Converted rows first; the sort is stable, so that the model's order decides among them.
    converted_first = sorted(pairs, key=lambda pair: not pair[0].is_converted)
    owners: dict[int, str] = {}
    for row, module in converted_first:
        for parameter in weight_matrices(module).values():
            owners.setdefault(id(parameter), row.module)
    counted_pairs = []
    for row, module in pairs:
        matrices = weight_matrices(module)
        stacks = rules.stacks(row.module, module)
        if stacks:
            count = len(matrices[next(iter(stacks))])
            matrices = {n: p for n, p in matrices.items() if n in stacks or not _is_bias(p, count)}
        elements = {n: p.numel() for n, p in matrices.items() if owners[id(p)] == row.module}
        others = {owners[id(p)] for p in matrices.values()} - {row.module}
        names = stacks or ("weight",)
        counted = replace(
            row,
            elements=sum(elements.values()),
            # A converted layer's other matrices keep their format.
            converted=sum(elements.get(name, 0) for name in names) if row.is_converted else 0,
            counted_with="" if elements else ", ".join(sorted(others)),
        )
        counted_pairs.append((counted, module))
    return counted_pairs


def _is_bias(parameter: nn.Parameter, count: int) -> bool:
    """Return whether a parameter beside the stacked weights of so many experts is their bias."""
    return len(parameter) == count and (parameter.ndim == 2 or 1 in parameter.shape)


def _reason_of_other(module: nn.Module, name: str) -> str:
    """Return why a module with matrix weights is not a layer that the named precision converts."""
    if isinstance(module, nn.MultiheadAttention):
        # torch splits the projection where keys and values have widths of their own.
        packed = "in_proj_weight" if module._qkv_same_embed_dim else "q_proj_weight"
        return f"its packed {packed} is read by F.multi_head_attention_forward"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "an embedding is a lookup without a product"
    if type(module).__module__.startswith("torch.nn."):
        return f"precision={name} converts linear layers only"
    names = ", ".join(weight_matrices(module))
    kinds = "linear layers only"
    if possible_stacks(module):
        kinds = "linear layers, and stacked experts that precision.experts names"
    return f"holds its own {names}; precision={name} converts {kinds}"


def _check_conversion(
    rules: ConversionRules, report: ConversionReport, chosen: Sequence[tuple[str, nn.Module]]
) -> None:
    """Raise ConfigError where no module is chosen, or a chosen one's weight has a hook that the new
    weight would not have."""
    if not chosen:
        reasons = report.summaries() or ["it has no layer of a kind that it converts"]
        _, weights = report.weight_counts
        total = f"the model's {weights:,} matrix weights" if weights else "the model"
        raise ConfigError(
            f"precision={rules.name} would convert nothing of {total}: "
            f"{fmt.first_names(reasons, 4, '; ')}. "
            "Type a precision without conversion, for example precision=bf16-mixed."
        )
    hooked: dict[str, None] = {}
    for path, module in chosen if rules.new_weights else ():
        for name in rules.stacks(path, module) or ("weight",):
            weight = module._parameters.get(name)
            # torch keeps hooks of after the accumulation in an attribute that a plain weight lacks.
            keys = ("_backward_hooks", "_post_accumulate_grad_hooks")
            if any(getattr(weight, key, None) for key in keys):
                hooked[path] = None
    if hooked:
        patterns = ",".join(map(_pattern_of, hooked))
        raise ConfigError(
            f"precision={rules.name} replaces weights, and a hook hangs on that of "
            f"{', '.join(hooked)}. Type precision.ignore_modules=[{patterns}]."
        )


# Modules whose classes are low-precision layers. Those of the libraries cannot say it themselves.
_LAYER_MODULES = (
    "bitsandbytes.",
    "transformer_engine.",
    "torchao.",
    "runner.precision.layers.",
    "runner.precision.emulation.te_emulation",
)


def is_converted(module: nn.Module) -> bool:
    """Return whether a module is a low-precision layer already: of a library, of the runner, or of
    a class of the user's own that says so by an attribute `is_low_precision = True`."""
    if getattr(type(module), "is_low_precision", False):
        return True
    # bitsandbytes has embeddings of its own, which are in float32.
    if type(module).__name__ in ("Embedding", "StableEmbedding"):
        return False
    return any(kind.__module__.startswith(_LAYER_MODULES) for kind in type(module).__mro__)


def _reason_of_layer(module: nn.Module, kind: type[nn.Module]) -> str:
    """Return why a layer is not a plain one of its kind, which a conversion may replace; empty
    where it is."""
    # torch's class of that module's output projection, by name because it is private.
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight and never calls it"
    if parametrize.is_parametrized(module) or "weight" not in module._parameters:
        return "its weight is made anew in each forward (a parametrization)"
    if type(module).forward is not kind.forward or "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own"
    weight = module._parameters["weight"]
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight has no shape before the first forward"
    if weight is not None and not weight.is_floating_point():
        return f"its weight is {tensor_facts.dtype_name(weight.dtype)}"
    return ""


def find_shared_weights(model: nn.Module) -> dict[str, list[str]]:
    """Return, by dotted name, the other modules that share a parameter with a module. A module that
    is registered twice has its other name among them."""
    holders = _holders_by_parameter(model, twice=True)
    shared = {}
    for name, module in model.named_modules():
        others = _sharing_modules(name or ROOT_NAME, module, holders)
        if others:
            shared[name] = others
    return shared


def _holders_by_parameter(model: nn.Module, twice: bool = False) -> dict[int, list[str]]:
    """Return the names of the modules that hold each parameter, by its id; more than one where it
    is tied.

    Args:
        model: unchanged.
        twice: whether a module that is registered twice counts as two.
    """
    holders: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=not twice):
        # A set: a module may hold one parameter under two names.
        for parameter in {id(p) for p in module.parameters(recurse=False)}:
            holders[parameter].append(path or ROOT_NAME)
    return holders


def _sharing_modules(path: str, module: nn.Module, holders: Mapping[int, list[str]]) -> list[str]:
    """Return the names of the other modules that hold a parameter of this one."""
    names = set[str]().union(*(holders[id(p)] for p in module.parameters(recurse=False)))
    return sorted(names - {path})


def change_class(module: Any, low: type[nn.Module], **attributes: Any) -> None:
    """Turn a linear layer into a low-precision one, in place; its tensors stay.

    A class of the user's own stays a base of the new one, so that its methods and isinstance still
    work.

    Args:
        module: nn.Linear or Conv1D, or of a subclass.
        low: the low-precision layer's class.
        attributes: of the low-precision layer.
    """
    module.in_features, module.out_features = layer_widths(module)
    kind = type(module)
    # A class of torch's own has no methods of the user's to keep.
    is_torchs = kind.__module__.startswith("torch.nn.modules.")
    module.__class__ = low if is_torchs else layer_class(low.__name__, low, kind)
    vars(module).update(attributes)


@cache
def layer_class(name: str, *kinds: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module that became a low-precision layer.

    Args:
        name: of the class.
        kinds: the low-precision layer's classes, then the class that the module had, so that
            isinstance and the user's own methods still work.
    """
    return type(name, kinds, {"__module__": kinds[0].__module__})


def replace_in_place(module: nn.Module, made: nn.Module, kind: type[nn.Module]) -> None:
    """Turn a module into a layer of a library, keeping its object, its parameters, buffers and
    children, its hooks and the user's own attributes.

    Args:
        module: changed in place.
        made: the library's layer; its own tensors are dropped.
        kind: the class that the module gets; see layer_class.
    """
    for key in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        vars(made)[key] = vars(module)[key]
    hooks = {key: vars(module)[key] for key in _HOOKS}
    for key, registered in hooks.items():
        registered.update(vars(made)[key])
    if module._is_full_backward_hook is not None:
        hooks["_is_full_backward_hook"] = module._is_full_backward_hook
    training = module.training
    module.__class__ = kind
    # Attributes that the user set, which the new layer lacks, stay.
    vars(module).update(vars(made) | hooks | {"training": training})
