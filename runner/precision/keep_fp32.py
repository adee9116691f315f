"""Keep what `precision.keep_fp32` names in float32 inside a model of another precision.

A parameter or buffer is stored in float32, and the model's code computes with it as torch promotes
dtypes. A module stores and computes in float32. Its class is swapped for a subclass whose forward
casts inputs and outputs (the way torch.nn.utils.parametrize does it): names, state dict, hooks,
isinstance and deepcopy survive, and torch.compile sees an ordinary forward.
"""

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.precision.casting import DefaultDtype, cast_floats, cast_nest, cast_tensor
from runner.utils.errors import ConfigError
from runner.utils.module_tape import is_in_backward
from runner.utils.modules import outermost_names, select_modules, tensors_named

KEEP_FP32_REASON = "kept in float32 by precision.keep_fp32"


class KeptInFloat32:
    """Mixin before a module's own class, whose forward computes in float32 and returns the dtype of
    the modules around it."""

    _surroundings: torch.dtype

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
        # itself; in a true precision the next layer's weights want their own dtype.
        return cast_nest(outputs, self._surroundings)


def find_kept_modules(model: nn.Module, patterns: Sequence[str], storage: torch.dtype) -> set[str]:
    """Return the dotted names of the outermost modules that the patterns of keep_fp32 match; of a
    pattern that matches no module, of the parameters and buffers that it matches.

    Args:
        model: not changed.
        patterns: see runner.utils.modules.
        storage: dtype of the surroundings.

    Raises:
        ConfigError: a pattern matches nothing, or one of the modules shares a parameter with a
            module of another dtype.
    """
    # A module that is registered twice can be meant by either name.
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    nothing = "no module of the model, and no parameter or buffer"
    chosen = select_modules("precision.keep_fp32", patterns, names, nothing, tensors)
    outermost = outermost_names(chosen)
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
            (tensor,) = tensors_named(model, name)
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
        if is_in_backward():
            self.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_in_backward():
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
        others = ", ".join(name or "the model itself" for name in outside)
        patterns = ", ".join(name or "*" for name in outside)
        raise ConfigError(
            f"precision.keep_fp32: {', '.join(sorted(kept))} shares a parameter with {others}, "
            f"which is not in it. Add {patterns}."
        )
