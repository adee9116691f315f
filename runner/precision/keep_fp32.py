"""Keep the modules that `precision.keep_fp32` names in float32 inside a model of another precision.

Such a module is called an island: it stores and computes in float32. Its class is swapped for a
subclass whose forward casts inputs and outputs (the way torch.nn.utils.parametrize does it): names,
state dict, hooks, isinstance and deepcopy survive, and torch.compile sees an ordinary forward.
"""

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.precision.casting import DefaultDtype, cast_floats, cast_nest
from runner.utils.errors import ConfigError
from runner.utils.module_tape import is_in_backward
from runner.utils.modules import outermost_names, select_modules

ISLAND_REASON = "kept in float32 by precision.keep_fp32"


class Float32Island:
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


def find_islands(model: nn.Module, patterns: Sequence[str], storage: torch.dtype) -> set[str]:
    """Return the dotted names of the outermost modules that the patterns match.

    Args:
        model: not changed.
        patterns: see runner.utils.modules.
        storage: dtype of the surroundings.

    Raises:
        ConfigError: a pattern matches nothing, or an island shares a parameter with a module
            of another dtype.
    """
    if not patterns:
        return set()
    # A module that is registered twice can be meant by either name.
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    chosen = select_modules("precision.keep_fp32", patterns, names)
    outermost = outermost_names(chosen)
    # In a mixed precision every parameter is in float32 anyway.
    if storage is not torch.float32:
        _refuse_ties(model, outermost)
    return outermost


def make_islands(model: nn.Module, patterns: Sequence[str], storage: torch.dtype) -> set[str]:
    """Turn the outermost modules that the patterns match into islands; return their dotted names.

    Args:
        model: changed in place.
        patterns: see runner.utils.modules.
        storage: dtype of the surroundings, to which the islands' outputs are cast.

    Raises:
        ConfigError: as find_islands.
    """
    islands = find_islands(model, patterns, storage)
    for name in islands:
        module = model.get_submodule(name)
        if not isinstance(module, Float32Island):
            module.__class__ = _island_class(type(module))
            module._surroundings = storage  # type: ignore[assignment]
            # In evaluation nn.TransformerEncoderLayer reads its parts' weights and does not call
            # their forward, unless a part has a hook.
            module.register_forward_pre_hook(no_op_hook)
            # In a mixed precision the default dtype is float32 already.
            if storage is not torch.float32:
                _RecomputationDtype(torch.float32).watch(module)
        cast_floats(module, torch.float32)
    return islands


class _RecomputationDtype(DefaultDtype):
    """Hooks on an island's parts that make float32 the default dtype while they are recomputed.

    The island's own torch.utils.checkpoint recomputes them in the backward, outside the island's
    forward. Autocast is restored by torch.
    """

    def watch(self, island: nn.Module) -> None:
        """Register the hooks on every module inside the island."""
        for part in island.modules():
            if part is not island:
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
def _island_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Float32{kind.__name__}", (Float32Island, kind), {})


def _refuse_ties(model: nn.Module, islands: Collection[str]) -> None:
    """Raise ConfigError where a parameter is shared by an island and a module outside it: a tied
    parameter has one dtype, so both modules are in float32 or neither is."""
    parts = {part for name in islands for part in model.get_submodule(name).modules()}
    island_parameters = {id(p) for part in parts for p in part.parameters(recurse=False)}
    outside = []
    for name, module in model.named_modules():
        parameters = {id(parameter) for parameter in module.parameters(recurse=False)}
        if module not in parts and parameters & island_parameters:
            outside.append(name)
    if outside:
        others = ", ".join(name or "the model itself" for name in outside)
        patterns = ", ".join(name or "*" for name in outside)
        raise ConfigError(
            f"precision.keep_fp32: {', '.join(sorted(islands))} shares a parameter with {others}, "
            f"which is not in it. Add {patterns}."
        )
