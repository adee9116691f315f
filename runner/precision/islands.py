"""keep_fp32: modules that store and compute in float32 inside a model of another precision.

The module's class is swapped for a subclass whose forward casts at the border (the way
torch.nn.utils.parametrize does it): names, state dict, hooks, isinstance and deepcopy survive,
and torch.compile sees an ordinary forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.precision.cast import cast_nest
from runner.precision.patterns import select


class Float32Island:
    """Mixin before a module's own class: float32 inside, the surroundings' dtype out."""

    _surroundings: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind = next(
            (t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), "cpu"
        )
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.autocast(kind, enabled=False):
                args, kwargs = cast_nest((args, kwargs), torch.float32)
                outputs = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            torch.set_default_dtype(previous)
        # Under autocast the surroundings are float32 storage and the next operation casts by
        # itself; in a true precision the next layer's weights want their own dtype.
        return cast_nest(outputs, self._surroundings)


def make_islands(model: nn.Module, patterns: Sequence[str], storage: torch.dtype) -> set[str]:
    """Turn the outermost modules that the patterns match into islands.

    Args:
        model: changed in place.
        patterns: see runner.precision.patterns.
        storage: dtype of the surroundings, to which outputs return.

    Returns:
        Dotted names of the islands.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    if not patterns:
        return set()
    chosen = select("precision.keep_fp32", patterns, (name for name, _ in model.named_modules()))
    outermost = {n for n in chosen if not any(n.startswith(f"{m}.") for m in chosen)}
    for name in outermost:
        module = model.get_submodule(name)
        if not isinstance(module, Float32Island):
            kind = type(module)
            module.__class__ = type(f"Float32{kind.__name__}", (Float32Island, kind), {})
            module._surroundings = storage  # type: ignore[assignment]
        module.float()
    return outermost
