"""List the modules of a model, and the tensors that they take and return."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.core import module_tape


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model with their dotted names, and the model itself as ROOT."""
    for name, module in model.named_modules():
        yield name or module_tape.ROOT, module


def tensors_in(nest: Any) -> list[Tensor]:
    """Return the tensors of a nest of tuples, lists and mappings, in its order."""
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
