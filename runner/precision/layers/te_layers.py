"""Convert a model's linear layers and layer norms to TransformerEngine's, in place.

A converted layer keeps its module object and its parameter objects, so that names, ties, hooks,
frozen flags and checkpoints are those of the plain model. Nothing here imports the library: its
module, or the emulation, is a parameter.

A layer norm and the linear layer after it can be fused into one te.LayerNormLinear. A trace of the
module that calls both proves that the linear layer alone takes the norm's output.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from runner.core import ConversionReport, Fate
from runner.precision.casting import no_op_hook
from runner.precision.conversion import (
    ROOT_NAME,
    ConversionRules,
    LayerConverter,
    classify_modules,
    convert_modules,
    layer_class,
    replace_in_place,
)
from runner.precision.layers.backward_checks import forbid_second_derivative, pad_rows
from runner.precision.layers.conv1d import is_transposed, layer_widths, linear_classes


class NoExtraState:
    """Mixin before a layer of the library that removes `_extra_state` from its state dict.

    The library's is a pickle that it refuses to load; runner.precision.transformer_engine saves its
    content in another form.
    """

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class Norm(NoExtraState):
    """Mixin before te.LayerNorm that refuses to differentiate its gradient again."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input: float of any shape to the same shape."""
        return forbid_second_derivative(super().forward(input))  # type: ignore[misc]


class PaddedRows(NoExtraState):
    """Mixin before te.Linear that takes any number of rows, by padding them."""

    _multiple: int  # which the number of rows is padded to

    @property
    def transposed_weight(self) -> Tensor:
        """Return the weight of a Conv1D, which is [in, out], as the library takes it: [out, in]."""
        return self.weight.t().contiguous()  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype [..., out]."""
        output = pad_rows(super().forward, input, self._multiple)  # type: ignore[misc]
        return forbid_second_derivative(output)


class FusedNormLinear(PaddedRows):
    """Mixin before te.LayerNormLinear that takes the norm's parameters from the norm's module.

    Raises:
        RuntimeError: its input is not what the norm was called with just before. Then the model
            calls one of the two elsewhere too, and would compute something else than unfused.
    """

    _norm: tuple["DeferredNorm"]  # in a tuple, so that it is not registered as a child

    @property
    def layer_norm_weight(self) -> Tensor:
        return self._norm[0].weight  # type: ignore[return-value]

    @property
    def layer_norm_bias(self) -> Tensor:
        return self._norm[0].bias  # type: ignore[return-value]

    def forward(self, input: Tensor) -> Tensor:
        """Return the linear layer's outputs on the normalised input: [..., in] to [..., out]."""
        self._norm[0].check_input(input)
        # A row of padding comes out of the norm as its bias, which may enter an amax.
        return super().forward(input)


class DeferredNorm(nn.Module):
    """Mixin before a layer norm that returns its input: its linear layer computes the norm."""

    _passed_input: Tensor | None  # from the norm's call to the linear layer's

    def forward(self, input: Tensor) -> Tensor:
        """Return the input unchanged.

        Raises:
            RuntimeError: the linear layer was not called since the last call.
        """
        if self._passed_input is not None:
            raise RuntimeError(f"the norm was called twice in a row. {_REMEDY}")
        self._passed_input = input
        return input

    def check_input(self, input: Tensor) -> None:
        """Check that the linear layer's input is what the norm has passed, and forget it.

        Raises:
            RuntimeError: it is another tensor.
        """
        passed_input = self._passed_input
        # Before the check, so that an error leaves no input behind for the next step.
        self._passed_input = None
        if passed_input is not input:
            raise RuntimeError(f"the layer was called without its norm. {_REMEDY}")


_REMEDY = "The model does not always call one after the other. Type precision.fuse=false."


def convert_layers(
    model: nn.Module, te: Any, multiple: int, rules: ConversionRules, fuse: bool
) -> ConversionReport:
    """Convert nn.Linear, Conv1D and nn.LayerNorm to the library's, in place.

    Args:
        model: changed in place.
        te: transformer_engine.pytorch.
        multiple: that widths and numbers of rows must have.
        rules: which modules may be converted; `te_obstacle` is their find_obstacle.
        fuse: whether a norm and the linear layer that alone takes its output become one layer.

    Returns:
        One row for each layer, converted or not, with the reason.

    Raises:
        ConfigError: no linear layer would be converted, or a pattern matches nothing.
    """
    linear = linear_classes()
    to_linear: LayerConverter = partial(_to_linear, te=te, multiple=multiple)
    converters = dict.fromkeys(linear, to_linear)
    # A model with converted norms alone would compute nothing in FP8: then none is converted.
    if any(row.is_converted for row, _ in classify_modules(model, linear, rules)):
        converters[nn.LayerNorm] = partial(_to_norm, te=te)
    report = convert_modules(model, converters, rules)
    if fuse:
        report = _fuse(model, report, te, multiple)
    return report


def module_at(model: nn.Module, path: str) -> nn.Module:
    """Return the module that a report's row names."""
    return model.get_submodule("" if path == ROOT_NAME else path)


def te_obstacle(module: nn.Module, multiple: int) -> str:
    """Return why the library cannot replace a layer; empty where it can.

    Args:
        module: a linear layer or nn.LayerNorm.
        multiple: that a linear layer's widths must have; te_recipes.KINDS says why.
    """
    if isinstance(module, linear_classes()):
        into, out = layer_widths(module)
        if into % multiple or out % multiple:
            return f"its shape {into} -> {out} is not in multiples of {multiple}"
        return ""
    assert isinstance(module, nn.LayerNorm)
    if len(module.normalized_shape) > 1:
        return f"normalises over {len(module.normalized_shape)} dimensions"
    if module.weight is None:
        return "has no weight"
    return "has no bias" if module.bias is None else ""


def _to_linear(module: nn.Module, te: Any, multiple: int, norm: nn.Module | None = None) -> None:
    """Turn a linear layer into te.Linear, in place, or with a norm into te.LayerNormLinear."""
    into, out = layer_widths(module)
    options: dict[str, Any] = {
        "params_dtype": module.weight.dtype,
        "device": "meta",
        "bias": module.bias is not None,
    }
    if norm is None:
        made = te.Linear(into, out, **options)
        kind = layer_class("TELinear", PaddedRows, te.Linear, type(module))
    else:
        made = te.LayerNormLinear(into, out, eps=norm.eps, **options)
        made._norm = (norm,)
        plain = type(module).__bases__[-1]  # the class that it had
        kind = layer_class("TELayerNormLinear", FusedNormLinear, te.LayerNormLinear, plain)
    made._multiple = multiple
    if is_transposed(module):
        # The attribute where the library looks for its weight.
        made.weight_names = ["transposed_weight"]
    # The library's empty tensor of a layer without bias would hide the parameter, None.
    vars(made).pop("bias", None)
    replace_in_place(module, made, kind)


def _to_norm(module: nn.Module, te: Any) -> None:
    """Turn a layer norm into te.LayerNorm, in place."""
    assert isinstance(module, nn.LayerNorm)
    made = te.LayerNorm(
        module.normalized_shape, eps=module.eps, dtype=module.weight.dtype, device="meta"
    )
    kind = layer_class("TELayerNorm", Norm, te.LayerNorm, type(module))
    replace_in_place(module, made, kind)


def _fuse(model: nn.Module, report: ConversionReport, te: Any, multiple: int) -> ConversionReport:
    """Fuse converted norms with their linear layers; return the report with what was fused.

    A row of a norm that was not fused says why.
    """
    converted = {path: module_at(model, path) for path in report.names(Fate.CONVERTED)}
    norms = [path for path, module in converted.items() if isinstance(module, te.LayerNorm)]
    linears = {path for path, module in converted.items() if isinstance(module, te.Linear)}
    pairs, remarks = find_pairs(model, norms, linears)
    for norm, linear in pairs.items():
        norm_module = converted[norm]
        _to_linear(converted[linear], te, multiple, norm_module)
        # The norm passes its input from now on.
        plain = type(norm_module).__bases__[-1]
        norm_module.__class__ = layer_class("PostponedLayerNorm", DeferredNorm, plain)
        norm_module._passed_input = None  # type: ignore[assignment]
        remarks[norm] = f"computed in {linear}"
        remarks[linear] = f"computes {norm} too"
    rows = (replace(row, why=remarks.get(row.module, row.why)) for row in report.modules)
    return ConversionReport(tuple(rows))


def find_pairs(
    model: nn.Module, norms: Collection[str], linears: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Find the norms whose output goes into one linear layer and nowhere else.

    The module that calls them is traced for it.

    Args:
        model: unchanged.
        norms: dotted names.
        linears: dotted names.

    Returns:
        The linear layer of each norm that has one, and why each other norm has none.
    """
    name_counts = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    graphs: dict[str, fx.Graph | str] = {}
    pairs: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for norm in norms:
        caller = _caller(model, norm)
        if caller not in graphs:
            graphs[caller] = _trace(model.get_submodule(caller))
        prefix = f"{caller}." if caller else ""
        linear, reason = _partner(graphs[caller], prefix, norm, linears)
        if not linear:
            reasons[norm] = f"not fused: {reason}"
        elif any(_is_observed(module_at(model, name), name_counts) for name in (norm, linear)):
            reasons[norm] = "not fused: it or its linear layer has hooks or two names"
        else:
            pairs[norm] = linear
    return pairs, reasons


def _is_observed(module: nn.Module, name_counts: Counter[int]) -> bool:
    """Return whether other code than a module's caller may see its inputs or outputs.

    Args:
        module: looked through for hooks of the user's.
        name_counts: how many names each module has in the model, by id.
    """
    forward_hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    backward_hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    user_hooks = [hook for hook in forward_hooks + backward_hooks if hook is not no_op_hook]
    return bool(user_hooks) or name_counts[id(module)] > 1


def _caller(model: nn.Module, name: str) -> str:
    """Return the name of the nearest module around another that has a forward.

    nn.ModuleList, for example, has none. The root's name is empty.
    """
    while "." in name:
        name = name.rpartition(".")[0]
        if type(model.get_submodule(name)).forward is not nn.Module.forward:
            return name
    return ""


class _ShallowTracer(fx.Tracer):
    """A tracer of one module's forward that enters none of the modules that it calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(module: nn.Module) -> fx.Graph | str:
    """Return the graph of a module's forward, or why it cannot be traced."""
    attributes = dict(vars(module))
    try:
        # A forward may draw random numbers, which would change the run's.
        with torch.random.fork_rng(devices=[]):
            return _ShallowTracer().trace(module)
    except Exception as error:
        return f"{type(module).__name__} cannot be traced ({type(error).__name__})"
    finally:
        # What the forward has stored on the module is a proxy of the trace and not a tensor.
        vars(module).clear()
        vars(module).update(attributes)


def _partner(
    graph: fx.Graph | str, prefix: str, norm: str, linears: Collection[str]
) -> tuple[str, str]:
    """Return the linear layer that alone takes a norm's output, or why there is none.

    Args:
        graph: of the module that calls the norm, or why it cannot be traced.
        prefix: of the names of that module's children.
        norm: dotted name.
        linears: dotted names of the converted linear layers.

    Returns:
        The dotted name and an empty reason, or an empty name and the reason.
    """
    if isinstance(graph, str):
        return "", graph

    def calls_of(name: str) -> list[fx.Node]:
        return graph.find_nodes(op="call_module", target=name.removeprefix(prefix))

    calls = calls_of(norm)
    if len(calls) != 1:
        return "", f"it is called {len(calls)} times"
    (node,) = calls
    users = list(node.users)
    is_one_call = len(users) == 1 and users[0].op == "call_module"
    linear = f"{prefix}{users[0].target}" if is_one_call else ""
    if linear not in linears or len(calls_of(linear)) != 1:
        return "", "its output is not for one converted linear layer alone"
    if users[0].args != (node,) or users[0].kwargs:
        return "", f"{linear} takes more than its output"
    return linear, ""
