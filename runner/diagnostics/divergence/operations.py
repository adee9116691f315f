"""Find the operation of a module's own code in which two executions part."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from runner.diagnostics.divergence.tensor_error import measure_error

Operation = tuple[str, Tensor]
"""The name of a function of torch, and what it returned."""


class OperationTrace:
    """A listener that records what the functions of torch return in one module's own code.

    Args:
        module: name of the module.

    Attributes:
        operations: of the module's calls, in their order.
    """

    def __init__(self, module: str) -> None:
        self.operations: list[Operation] = []
        self._module = module

    def __call__(self, module: str, name: str, arguments: Any, result: Any) -> None:
        """Record the floating tensors among a function's results."""
        if module != self._module:
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.operations.append((name, leaf.detach()))


def first_different_operation(
    operations: Sequence[Operation], reference: Sequence[Operation], error: float
) -> str:
    """Return the name of the operation in which two executions of a module's code part.

    Args:
        operations: of the execution.
        reference: of the reference.
        error: relative error of the module's result.

    Returns:
        The first operation whose result is not finite where the reference's is, or is off by half
        the module's error; empty where there is none, or the two run other operations.
    """
    for (name, found), (other, wanted) in zip(operations, reference, strict=False):
        if name != other or found.shape != wanted.shape:
            return ""
        measured = measure_error(found, wanted)
        if measured.nonfinite or measured.relative > error / 2 > 0:
            return name
    return ""
