"""Converting layers: who is converted, who is not and why, and how one module becomes another.

Every decision is made before the first module changes, so that a refusal leaves the model as it
was. A module becomes another in place: its object stays, and with it names, references that the
model keeps elsewhere, sharing, hooks, training mode and the user's own attributes.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from runner.precision.keep_fp32 import no_op_hook
from runner.precision.precision import ConversionReport, ModuleConversion, summarize_modules
from runner.utils.errors import ConfigError
from runner.utils.modules import select_modules

ROOT = "(model)"  # what a model is called that is itself a layer
# What nn.Module keeps hooks in; the dictionaries stay the same objects, so that handles that the
# user holds still remove their hooks.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


Swap = Callable[[nn.Module], None]


@dataclass(frozen=True)
class ConversionRules:
    """Who may be converted.

    Attributes:
        name: the precision's, for messages.
        ignore: patterns of modules that `precision.ignore_modules` leaves alone.
        islands: dotted names of modules that `precision.keep_fp32` keeps.
        judge: why this precision cannot hold a module; empty where it can.
        new_weights: the weight becomes another object, so that no other module may share it and
            no hook may hang on it.
        bypassed: reasons to leave modules alone, by dotted name; see Precision.bypassed.
    """

    name: str
    ignore: Sequence[str] = ()
    islands: Collection[str] = ()
    judge: Callable[[nn.Module], str] = lambda module: ""
    new_weights: bool = False
    bypassed: Mapping[str, str] = field(default_factory=dict)


def convert_modules(
    model: nn.Module, swaps: Mapping[type[nn.Module], Swap], rules: ConversionRules
) -> ConversionReport:
    """Convert every module that can be, in place.

    Args:
        model: changed in place.
        swaps: the plain class of a layer, and what turns one of its objects into another.
        rules: who may be converted.

    Raises:
        ConfigError: nothing would be converted, a pattern matches nothing, or a module carries
            what a swap would lose.
    """
    rows = list(classify_modules(model, tuple(swaps), rules))
    chosen = [(row.module, module) for row, module in rows if row.done]
    report = ConversionReport(tuple(row for row, _ in rows))
    _check(rules, report, chosen)
    for _, module in chosen:
        # nn.TransformerEncoderLayer reads its parts' weights and passes their forward by in
        # evaluation, but for parts with hooks.
        module.register_forward_pre_hook(no_op_hook)
    for path, module in chosen:
        swap = next(s for kind, s in swaps.items() if isinstance(module, kind))
        try:
            swap(module)
        except (AssertionError, TypeError, ValueError) as error:
            where = "*" if path == ROOT else path
            raise ConfigError(
                f"precision={rules.name} cannot convert {path} ({type(module).__name__}): "
                f"{type(error).__name__}: {error} Type precision.ignore_modules=[{where}]."
            ) from error
    return report


def classify_modules(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], rules: ConversionRules
) -> Iterator[tuple[ModuleConversion, nn.Module]]:
    """Yield what is to become of every module that holds matrix weights, is of one of these kinds,
    or is a library's own already."""
    # By identity: a module that is registered twice can be meant by either name.
    every = dict(model.named_modules(remove_duplicate=False))
    ignored = {every[n] for n in select_modules("precision.ignore_modules", rules.ignore, every)}
    kept = {part for name in rules.islands for part in every[name].modules()}
    holders = _holders(model)
    found: list[tuple[ModuleConversion, nn.Module]] = []
    for name, module in model.named_modules():
        kind = next((k for k in kinds if isinstance(module, k)), None)
        layer = kind is not None or is_converted(module)
        if isinstance(module, parametrize.ParametrizationList):
            continue  # what it holds is the weight of the module around it
        if not layer and not weight_matrices(module):
            continue
        path = name or ROOT
        why = (
            ("kept in float32 by precision.keep_fp32" if module in kept else "")
            or ("named by precision.ignore_modules" if module in ignored else "")
            or rules.bypassed.get(path, "")
            or (_foreign(module, kind) if layer else _other(module, rules.name))
            or (_tied(path, module, holders) if rules.new_weights else "")
            or rules.judge(module)
        )
        found.append((ModuleConversion(path, type(module).__name__, not why, why), module))
    yield from _counted(found)


def weight_matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own parameters of two dimensions or more; of a parametrized weight what it
    is computed from. A lazy layer's have no dimensions yet."""
    own = dict(module.named_parameters(recurse=False))
    if parametrize.is_parametrized(module):
        parametrizations = module.get_submodule("parametrizations")
        own |= dict(parametrizations.named_parameters(prefix="parametrizations"))
    return {
        name: parameter
        for name, parameter in own.items()
        if not is_lazy(parameter)
        and parameter.ndim >= 2
        and (parameter.is_floating_point() or parameter.is_complex())
    }


def _counted(
    found: Sequence[tuple[ModuleConversion, nn.Module]],
) -> Iterator[tuple[ModuleConversion, nn.Module]]:
    """Yield the rows with the elements of their matrix weights. What modules share is counted once:
    with the first that is converted, else with the first."""
    owners: dict[int, str] = {}
    for row, module in sorted(found, key=lambda pair: not pair[0].done):
        for parameter in weight_matrices(module).values():
            owners.setdefault(id(parameter), row.module)
    for row, module in found:
        held = {
            name: parameter.numel()
            for name, parameter in weight_matrices(module).items()
            if owners[id(parameter)] == row.module
        }
        others = {owners[id(parameter)] for parameter in weight_matrices(module).values()}
        others.discard(row.module)
        counted = replace(
            row,
            elements=sum(held.values()),
            converted=held.get("weight", 0) if row.done else 0,
            counted_with="" if held else ", ".join(sorted(others)),
        )
        yield counted, module


def _other(module: nn.Module, name: str) -> str:
    """Why a module with matrix weights is no layer that a precision of this name converts."""
    if isinstance(module, nn.MultiheadAttention):
        packed = "in_proj_weight" if module._qkv_same_embed_dim else "q_proj_weight"
        return f"its packed {packed} is read by F.multi_head_attention_forward"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "an embedding is a lookup without a product"
    if type(module).__module__.startswith("torch.nn."):
        return f"precision={name} converts linear layers only"
    held = ", ".join(weight_matrices(module))
    return f"holds its own {held}; precision={name} converts linear layers only"


def _check(
    rules: ConversionRules, report: ConversionReport, chosen: Sequence[tuple[str, nn.Module]]
) -> None:
    if not chosen:
        reasons = summarize_modules(report.modules)
        more = [f"and {len(reasons) - 4} more"] if len(reasons) > 4 else []
        _, weights = report.weights
        of_what = f"the model's {weights:,} matrix weights" if weights else "the model"
        raise ConfigError(
            f"precision={rules.name} would convert nothing of {of_what}: "
            f"{'; '.join(reasons[:4] + more) or 'it has no layer of a kind that it converts'}. "
            "Type a precision without conversion, for example precision=bf16-mixed."
        )
    if rules.new_weights and (hooked := [path for path, m in chosen if _weight_hooks(m)]):
        raise ConfigError(
            f"precision={rules.name} replaces weights, and a hook hangs on that of "
            f"{', '.join(hooked)}. Type precision.ignore_modules="
            f"[{','.join('*' if path == ROOT else path for path in hooked)}]."
        )


_LOW = (
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
    if type(module).__name__ in ("Embedding", "StableEmbedding"):  # bitsandbytes' in float32
        return False
    return any(kind.__module__.startswith(_LOW) for kind in type(module).__mro__)


def _foreign(module: nn.Module, kind: type[nn.Module] | None) -> str:
    """Why a module is not the plain layer that a conversion may replace."""
    if kind is None or is_converted(module):
        return f"is a {type(module).__name__} already"
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
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    return ""


def find_shared_weights(model: nn.Module) -> dict[str, list[str]]:
    """Of each module that shares a parameter with others, or has further names itself: those."""
    holders = _holders(model, twice=True)
    return {
        name: others
        for name, module in model.named_modules()
        if (others := _others(name or ROOT, module, holders))
    }


def _holders(model: nn.Module, twice: bool = False) -> dict[int, list[str]]:
    """Names of the modules that hold each parameter; more than one where it is tied. `twice`: a
    module that is registered twice counts as two."""
    holders: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=not twice):
        for parameter in {id(p) for p in module.parameters(recurse=False)}:
            holders[parameter].append(path or ROOT)
    return holders


def _others(path: str, module: nn.Module, holders: Mapping[int, list[str]]) -> list[str]:
    mine = [holders[id(parameter)] for parameter in module.parameters(recurse=False)]
    return sorted({name for names in mine for name in names} - {path})


def _tied(path: str, module: nn.Module, holders: Mapping[int, list[str]]) -> str:
    others = _others(path, module, holders)
    return f"shares a parameter with {', '.join(others)}" if others else ""


def _weight_hooks(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and bool(
        weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    )


@cache
def low_precision_class(low: type[nn.Module], kind: type[nn.Module]) -> Any:
    """A low-precision layer's class, before the user's own where the module had one, whose methods
    and isinstance hold."""
    if kind.__module__.startswith("torch.nn.modules."):
        return low
    return type(low.__name__, (low, kind), {"__module__": low.__module__})


def replace_in_place(module: nn.Module, made: nn.Module) -> None:
    """Turn `module` into `made`, keeping its object, its hooks and what the user put on it."""
    for key in ("_parameters", "_buffers", "_modules"):
        vars(made)[key] = {**vars(module)[key], **vars(made)[key]}
    made._non_persistent_buffers_set |= module._non_persistent_buffers_set
    hooks = {key: vars(module)[key] for key in _HOOKS}
    for key, held in hooks.items():
        held.update(vars(made)[key])
    if module._is_full_backward_hook is not None:
        hooks["_is_full_backward_hook"] = module._is_full_backward_hook
    mine = {key: value for key, value in vars(module).items() if key not in vars(made)}
    training = module.training
    module.__class__ = type(made)
    vars(module).update(mine | vars(made) | hooks | {"training": training})
