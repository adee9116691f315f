"""Keep what `precision.keep_fp32` names in float32 inside a model of another precision, and what
the model itself declares or froze in its dtype.

A parameter or buffer is stored in float32, and the model's code computes with it as torch promotes
dtypes. A module stores and computes in float32. Its class is swapped for a subclass whose forward
casts inputs and outputs (the way torch.nn.utils.parametrize does it): names, state dict, hooks,
isinstance and deepcopy survive, and torch.compile sees an ordinary forward.

Models of transformers declare float32: a list names parameters and persistent buffers, and a
constructor may give a tensor float32 explicitly, as the frequencies of rotary embeddings. Loading
one in 16 bits keeps both, and the model's own forward casts at their borders.

Source: transformers, modeling_utils.py (_keep_in_fp32_modules for float16, its strict form for
bfloat16, too) and core_model_loading.py.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.core import ConfigError, fmt, module_tape, module_tree, tensor_facts, terminal
from runner.precision.casting import DefaultDtype, cast_fields, cast_floats, cast_nest, cast_tensor

_CPU = torch.device("cpu")
KEEP_FP32_REASON = "kept in float32 by precision.keep_fp32"


class KeptInFloat32:
    """Mixin before a module's own class, whose forward computes in float32 and returns the dtype of
    the modules around it."""

    _surroundings: torch.dtype
    # Dtypes of the outputs, by key or position, that are not cast to the surroundings'.
    _wide_outputs: Mapping[str | int, torch.dtype] = MappingProxyType({})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = (*self.parameters(recurse=False), *tree_leaves((args, kwargs)))  # type: ignore[attr-defined]
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        device_type = "cpu" if first is None else first.device.type
        # Not by DefaultDtype, which torch.compile does not trace.
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.autocast(device_type, enabled=False):
                args, kwargs = cast_nest((args, kwargs), torch.float32)
                outputs = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            torch.set_default_dtype(previous)
        # Under autocast the surroundings are float32 storage and the next operation casts by
        # itself; in a true precision the next layer's weights want their own dtype, and outputs
        # that no such layer takes stay as they are, see runner.precision.wide_values.
        return cast_fields(outputs, self._surroundings, self._wide_outputs)


def find_kept_modules(model: nn.Module, patterns: Sequence[str], storage: torch.dtype) -> set[str]:
    """Return the dotted names of the outermost modules that the patterns of keep_fp32 match; of a
    pattern that matches no module, of the parameters and buffers that it matches.

    Args:
        model: not changed.
        patterns: see runner.core.base.module_tree.
        storage: dtype of the surroundings.

    Raises:
        ConfigError: a pattern matches nothing, or one of the modules shares a parameter with a
            module of another dtype.
    """
    # A module that is registered twice can be meant by either name.
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    nothing = "no module of the model, and no parameter or buffer"
    chosen = module_tree.select_modules(
        "precision.keep_fp32", patterns, names, nothing, _named_tensors(model)
    )
    outermost = module_tree.outermost_names(chosen)
    # In a mixed precision every parameter is in float32 anyway.
    if storage is not torch.float32:
        _refuse_ties(model, outermost.intersection(names))
    return outermost


def keep_in_float32(model: nn.Module, names: Collection[str], storage: torch.dtype) -> None:
    """Make modules store and compute in float32, and single tensors be in float32.

    Args:
        model: changed in place.
        names: dotted names, as find_kept_modules returns them.
        storage: dtype of the surroundings, to which the modules' outputs are cast.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        module = modules.get(name)
        if module is None:
            (tensor,) = module_tree.tensors_named(model, name)
            tensor.data = cast_tensor(tensor.data, torch.float32)
            continue
        if not isinstance(module, KeptInFloat32):
            module.__class__ = _float32_class(type(module))
            module._surroundings = storage  # type: ignore[assignment]
            # In evaluation nn.TransformerEncoderLayer reads its parts' weights and does not call
            # their forward, unless a part has a hook.
            module.register_forward_pre_hook(no_op_hook)
            # In a mixed precision the default dtype is float32 already.
            if storage is not torch.float32:
                _RecomputationDtype(torch.float32).watch(module)
        cast_floats(module, torch.float32)


class _RecomputationDtype(DefaultDtype):
    """Hooks on a kept module's parts that make float32 the default dtype while they are recomputed.

    The module's own torch.utils.checkpoint recomputes them in the backward, outside the module's
    forward. Autocast is restored by torch.
    """

    def watch(self, kept: nn.Module) -> None:
        """Register the hooks on every module inside the kept one."""
        for part in kept.modules():
            if part is not kept:
                part.register_forward_pre_hook(self._before)
                part.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        if module_tape.is_in_backward():
            self.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if module_tape.is_in_backward():
            self.__exit__()


def no_op_hook(module: nn.Module, args: Any) -> None:
    """Do nothing: a module with a hook is called where a fast path would read its weights."""


@cache
def _float32_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Float32{kind.__name__}", (KeptInFloat32, kind), {"__module__": kind.__module__})


def _refuse_ties(model: nn.Module, kept: Collection[str]) -> None:
    """Raise ConfigError where a parameter is shared by a kept module and one outside it: a tied
    parameter has one dtype, so both modules are in float32 or neither is."""
    parts = {part for name in kept for part in model.get_submodule(name).modules()}
    kept_parameters = {id(p) for part in parts for p in part.parameters(recurse=False)}
    outside = []
    for name, module in model.named_modules():
        parameters = {id(parameter) for parameter in module.parameters(recurse=False)}
        if module not in parts and parameters & kept_parameters:
            outside.append(name)
    if outside:
        others = ", ".join(name or "*" for name in outside)
        raise ConfigError(
            f"precision.keep_fp32: {', '.join(sorted(kept))} shares a parameter with {others}, "
            f"which is not in it. Add {others}."
        )


def double_parts(model: nn.Module) -> dict[str, Tensor]:
    """Return the float64 parameters and buffers by name, of a model whose first matrix is of
    another dtype: one that is built in float64 throughout has no such parts."""
    first = next((p.dtype for p in model.parameters() if p.ndim > 1), torch.float64)
    named = _named_tensors(model).items() if first is not torch.float64 else ()
    return {name: tensor for name, tensor in named if tensor.dtype is torch.float64}


def find_kept_tensors(
    model: nn.Module, storage: torch.dtype, device: torch.device = _CPU
) -> tuple[dict[str, torch.dtype], tuple[str, ...]]:
    """Return what keeps its dtype where the other floating tensors get the storage dtype.

    Returns:
        By name float32 for the parameters and buffers that the model declares so, and the dtypes of
        those that it froze in one of their own or built in float64; lines for the console.
    """
    kept: dict[str, torch.dtype] = {}
    lines: list[str] = []
    for path, part in module_tree.frozen_parts(model).items():
        # float32 is what torch makes unless it is asked for another dtype.
        dtypes = {n: t.dtype for n, t in _named_tensors(part).items() if t.is_floating_point()}
        own = {n: d for n, d in dtypes.items() if d not in (torch.float32, storage)}
        kept |= {f"{path}.{name}": dtype for name, dtype in own.items()}
        for dtype in {*own.values()}:
            lines.append(f"stays in {tensor_facts.dtype_name(dtype)}, frozen by the model: {path}")
    if storage is not torch.float64 and tensor_facts.widest_float(device) is torch.float64:
        kept = {**dict.fromkeys(double_parts(model), torch.float64), **kept}
    declared: list[str] = []
    if storage.itemsize == 2:
        models = [n for n, m in model.named_modules() if hasattr(m, "_keep_in_fp32_modules")]
        # The lists of a model hold those of the models in it, whose names begin with its own.
        for path in sorted(module_tree.outermost_names(models)):
            names = _declared_of(model.get_submodule(path), storage)
            declared += [f"{path}.{name}".lstrip(".") for name in names]
    if declared:
        lines.append(f"stays in float32, as the model declares: {fmt.first_names(declared, 8)}")
    return {**dict.fromkeys(declared, torch.float32), **kept}, tuple(lines)


def _declared_of(model: Any, storage: torch.dtype) -> Iterator[str]:
    """Yield the names of the float32 tensors of a model of transformers."""
    patterns = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if storage is torch.float16:
        patterns |= {*(model._keep_in_fp32_modules or ())}
    listed = re.compile("|".join(p.replace("*", ".*") for p in patterns) or "$^")
    persistent = model.state_dict(keep_vars=True)
    explicit = _explicit_float32(model, storage)
    for name, tensor in _named_tensors(model).items():
        is_listed = name in persistent and listed.search(name)
        if tensor.is_floating_point() and (is_listed or name in explicit):
            yield name


def _explicit_float32(model: Any, storage: torch.dtype) -> set[str]:
    """Return the names of the tensors that a model's constructor makes in float32 where torch's
    default dtype is the storage dtype."""
    try:
        # Without memory, as transformers' own loading builds it first.
        with torch.device("meta"), torch.random.fork_rng(devices=[]), terminal.suppress_warnings():
            built = type(model)._from_config(deepcopy(model.config), dtype=storage)
    except Exception:
        # A class of one's own may take more than a config. Every architecture has these in float32.
        return {name for name, _ in model.named_buffers() if name.endswith("inv_freq")}
    return {name for name, tensor in _named_tensors(built).items() if tensor.dtype is torch.float32}


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by dotted name; a shared one by each of its names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}
