"""Note which modules' own code computes in the narrow dtype of a precision."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

_CASTS = ("to", "type", "type_as", "half", "bfloat16", "float", "double", "copy")
"""Functions that round because the code says so. They excuse no error: a cast where the precision
has none is a bug."""


@dataclass
class NarrowCode:
    """A listener that notes in which modules' own code functions of torch return a narrow dtype.

    Attributes:
        dtype: the narrow one.
        by_autocast: names of the modules in which autocast casts an operand.
        computing: names of those in which a function computes in the dtype.
    """

    dtype: torch.dtype
    by_autocast: set[str] = field(default_factory=set)
    computing: set[str] = field(default_factory=set)

    def __call__(self, module: str, name: str, arguments: Any, result: Any) -> None:
        """Note a function's call."""
        if name in _CASTS or not self._is_computed(result):
            return
        self.computing.add(module)
        leaves, _ = tree_flatten(arguments)
        # With a dtype among its arguments the code itself asked for it.
        asked = any(isinstance(leaf, torch.dtype) for leaf in leaves)
        dtypes = {t.dtype for t in leaves if isinstance(t, Tensor) and t.is_floating_point()}
        if not asked and dtypes - {self.dtype}:
            self.by_autocast.add(module)

    def _is_computed(self, result: Any) -> bool:
        """Return whether a result has the dtype, and is no view of what had it before."""
        leaves = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return any(t.dtype is self.dtype and not t._is_view() for t in tensors)

    def modules(self, takers: Iterable[str]) -> set[str]:
        """Return the names of the modules whose own code rounds to the dtype because the precision
        has it so.

        Args:
            takers: names of the modules that take a tensor of the dtype.
        """
        return self.by_autocast | self.computing.intersection(takers)
