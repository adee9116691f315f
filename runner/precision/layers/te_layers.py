"""Layers of TransformerEngine inside a model that was built without it.

A converted layer keeps its module object and its parameter objects, so that names, ties, hooks,
frozen flags and checkpoints are those of the plain model. Nothing here imports the library.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from runner.precision.conversion import (
    ROOT,
    ConversionRules,
    Swap,
    classify_modules,
    convert_modules,
    replace_in_place,
)
from runner.precision.keep_fp32 import no_op_hook
from runner.precision.layers.backward_checks import forbid_second_derivative
from runner.precision.layers.conv1d import is_transposed, layer_widths, linear_classes
from runner.precision.layers.padding import pad_rows
from runner.precision.precision import ConversionReport


class PlainState:
    """Mixin before a layer of the library: no `_extra_state` in its state dict. The library's is
    a pickle that it refuses to load; runner.precision.transformer_engine keeps what is in it."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class Norm(PlainState):
    """Mixin before te.LayerNorm, whose gradient cannot be differentiated again."""

    def forward(self, input: Tensor) -> Tensor:
        return forbid_second_derivative(super().forward(input))  # type: ignore[misc]


class PaddedRows(PlainState):
    """Mixin before te.Linear: takes any number of rows."""

    _multiple: int

    @property
    def transposed_weight(self) -> Tensor:
        """The weight of a Conv1D, stored as [in, out], as the library takes it: [out, in]."""
        return self.weight.t().contiguous()  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        return forbid_second_derivative(pad_rows(super().forward, input, self._multiple))  # type: ignore[misc]


class NormFirst(PaddedRows):
    """Mixin before te.LayerNormLinear: the norm's parameters stay where they were, in the norm.

    Raises:
        RuntimeError: its input is not what the norm was called with just before. Then the model
            calls one of the two elsewhere too, and would compute something else than unfused.
    """

    _norm: tuple["DeferredLinear"]  # in a tuple, so that it is no child

    @property
    def layer_norm_weight(self) -> Tensor:
        return self._norm[0].weight  # type: ignore[return-value]

    @property
    def layer_norm_bias(self) -> Tensor:
        return self._norm[0].bias  # type: ignore[return-value]

    def forward(self, input: Tensor) -> Tensor:
        self._norm[0].collect(input)
        # A row of padding comes out of the norm as its bias, which may enter an amax.
        return super().forward(input)


class DeferredLinear(nn.Module):
    """Mixin before a layer norm that its linear layer computes: its input passes."""

    _given: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if self._given is not None:
            raise RuntimeError(f"the norm was called twice in a row. {_REMEDY}")
        self._given = input
        return input

    def collect(self, input: Tensor) -> None:
        """Called by the linear layer, with its own input."""
        given, self._given = self._given, None
        if given is not input:
            raise RuntimeError(f"the layer was called without its norm. {_REMEDY}")


_REMEDY = "The model does not always call one after the other. Type precision.fuse=false."


@cache
def layer_class(name: str, mixin: type, *kinds: type[nn.Module]) -> type[nn.Module]:
    """A mixin before a layer of the library and the class that the module had, so that isinstance
    and the user's own methods hold."""
    return type(name, (mixin, *kinds), {})


def convert_layers(
    model: nn.Module, te: Any, multiple: int, rules: ConversionRules, fuse: bool
) -> ConversionReport:
    """Convert nn.Linear, Conv1D and nn.LayerNorm to the library's, in place.

    Args:
        model: changed in place.
        te: transformer_engine.pytorch.
        multiple: of widths and rows.
        rules: who may be converted; `unfit` is its judge.
        fuse: one layer for a norm and the linear layer that alone takes its output.

    Raises:
        ConfigError: no linear layer would be converted, or a pattern matches nothing.
    """
    linear = linear_classes()
    to_linear: Swap = partial(_to_linear, te=te, multiple=multiple)
    swaps = dict.fromkeys(linear, to_linear)
    if any(row.done for row, _ in classify_modules(model, linear, rules)):  # norms alone are no FP8
        swaps[nn.LayerNorm] = partial(_to_norm, te=te)
    report = convert_modules(model, swaps, rules)
    if fuse:
        report = _fuse(model, report, te, multiple)
    return report


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module that a row of a report is about."""
    return model.get_submodule("" if path == ROOT else path)


def unfit(module: nn.Module, multiple: int) -> str:
    """Why the library cannot hold a layer; empty where it can."""
    if isinstance(module, linear_classes()):
        return unfit_shape(*layer_widths(module), multiple)
    assert isinstance(module, nn.LayerNorm)
    if len(module.normalized_shape) > 1:
        return f"normalises over {len(module.normalized_shape)} dimensions"
    if module.weight is None or module.bias is None:
        return "has no weight" if module.weight is None else "has no bias"
    return ""


def unfit_shape(into: int, out: int, multiple: int) -> str:
    """Why low-precision products cannot take a layer's widths; empty where they can. Where the
    multiples come from: te_recipes.KINDS."""
    if into % multiple or out % multiple:
        return f"its shape {into} -> {out} is not in multiples of {multiple}"
    return ""


def _to_linear(module: nn.Module, te: Any, multiple: int) -> None:
    into, out = layer_widths(module)
    made = te.Linear(
        into,
        out,
        bias=module.bias is not None,
        params_dtype=module.weight.dtype,
        device="meta",
    )
    made._multiple = multiple
    if is_transposed(module):
        made.weight_names = ["transposed_weight"]  # where the library looks for its weight
    _become(module, made, layer_class("TELinear", PaddedRows, te.Linear, type(module)))


def _to_norm(module: nn.Module, te: Any) -> None:
    assert isinstance(module, nn.LayerNorm)
    made = te.LayerNorm(
        module.normalized_shape, eps=module.eps, dtype=module.weight.dtype, device="meta"
    )
    _become(module, made, layer_class("TELayerNorm", Norm, te.LayerNorm, type(module)))


def _become(module: nn.Module, made: nn.Module, kind: type[nn.Module]) -> None:
    """Graft a new layer, made on the meta device, onto a module that keeps what it registered."""
    made.__class__ = kind
    vars(made).pop("bias", None)  # an empty tensor, where a layer has none
    for held in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        vars(made)[held] = vars(module)[held]
    replace_in_place(module, made)


def _fuse(model: nn.Module, report: ConversionReport, te: Any, multiple: int) -> ConversionReport:
    """Fuse what can be of the layers that were converted; the rows say what was, and why not."""
    done = {row.module: module_at(model, row.module) for row in report.modules if row.done}
    norms = [path for path, module in done.items() if isinstance(module, te.LayerNorm)]
    linears = {path for path, module in done.items() if isinstance(module, te.Linear)}
    pairs, notes = find_pairs(model, norms, linears)
    for norm, linear in pairs.items():
        _to_fused(done[norm], done[linear], te, multiple)
        notes |= {norm: f"computed in {linear}", linear: f"computes {norm} too"}
    rows = (replace(row, why=notes.get(row.module, row.why)) for row in report.modules)
    return ConversionReport(tuple(rows))


def _to_fused(norm: nn.Module, linear: nn.Module, te: Any, multiple: int) -> None:
    assert isinstance(norm, nn.LayerNorm)
    into, out = layer_widths(linear)
    made = te.LayerNormLinear(
        into,
        out,
        eps=norm.eps,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device="meta",
    )
    made._multiple, made._norm = multiple, (norm,)
    if is_transposed(linear):
        made.weight_names = ["transposed_weight"]
    _become(
        linear,
        made,
        layer_class("TELayerNormLinear", NormFirst, te.LayerNormLinear, _plain(linear)),
    )
    norm.__class__ = layer_class("PostponedLayerNorm", DeferredLinear, _plain(norm))  # type: ignore[assignment]
    norm._given = None  # type: ignore[assignment]


def _plain(module: nn.Module) -> type[nn.Module]:
    """The class that a converted module had."""
    return type(module).__bases__[-1]


def find_pairs(
    model: nn.Module, norms: Collection[str], linears: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Norms whose output goes into one linear layer and nowhere else, as the module that calls
    them shows when it is traced.

    Args:
        model: unchanged.
        norms: dotted names.
        linears: dotted names.

    Returns:
        The linear layer of each norm that has one, and why each other norm has none.
    """
    times = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    free = {n for n in (*norms, *linears) if not _observed(module_at(model, n), times)}
    graphs: dict[str, fx.Graph | str] = {}
    pairs: dict[str, str] = {}
    whys: dict[str, str] = {}
    for norm in norms:
        caller = _caller(model, norm)
        if caller not in graphs:
            graphs[caller] = _traced(model.get_submodule(caller))
        linear, why = _partner(graphs[caller], f"{caller}." if caller else "", norm, linears)
        if linear and not {norm, linear} <= free:
            linear, why = "", "it or its linear layer has hooks or two names"
        if linear:
            pairs[norm] = linear
        else:
            whys[norm] = f"not fused: {why}"
    return pairs, whys


def _observed(module: nn.Module, times: Counter[int]) -> bool:
    """Whether somebody may see what goes in or comes out of a module, beside its caller."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    theirs = [hook for held in hooks for hook in held.values() if hook is not no_op_hook]
    return bool(theirs) or times[id(module)] > 1


def _caller(model: nn.Module, name: str) -> str:
    """The nearest module around another that has a forward, as nn.ModuleList has not."""
    while "." in name:
        name = name.rpartition(".")[0]
        if type(model.get_submodule(name)).forward is not nn.Module.forward:
            return name
    return ""


class _Shallow(fx.Tracer):
    """Follows one module's forward and enters none of the modules that it calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _traced(module: nn.Module) -> fx.Graph | str:
    """What a module's forward does, or why that cannot be said."""
    held = dict(vars(module))
    try:
        with torch.random.fork_rng(devices=[]):
            return _Shallow().trace(module)
    except Exception as error:
        return f"{type(module).__name__} cannot be traced ({type(error).__name__})"
    finally:  # what the forward keeps on the module would be no tensor
        vars(module).clear()
        vars(module).update(held)


def _partner(
    graph: fx.Graph | str, prefix: str, norm: str, linears: Collection[str]
) -> tuple[str, str]:
    """The linear layer that alone takes a norm's output, or the reason that there is none."""
    if isinstance(graph, str):
        return "", graph
    calls = [node for node in graph.nodes if node.op == "call_module"]
    times = Counter(f"{prefix}{node.target}" for node in calls)
    if times[norm] != 1:
        return "", f"it is called {times[norm]} times"
    (node,) = (node for node in calls if f"{prefix}{node.target}" == norm)
    users = list(node.users)
    linear = f"{prefix}{users[0].target}" if len(users) == 1 and users[0] in calls else ""
    if linear not in linears or times[linear] != 1:
        return "", "its output is not for one converted linear layer alone"
    if users[0].args != (node,) or users[0].kwargs:
        return "", f"{linear} takes more than its output"
    return linear, ""
