"""Find the operation of a module's own code in which two executions part."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from runner.diagnostics.divergence.passes import Substitution
from runner.diagnostics.divergence.tensor_error import measure_error

Operation = tuple[str, Tensor]
"""The name of a function of torch, and what it returned."""


class OperationTrace(TorchFunctionMode):
    """A context that records what the functions of torch return in one module's own code.

    Args:
        module: name of the module.
        visitor: knows whose code runs.

    Attributes:
        operations: of the module's calls, in their order.
    """

    def __init__(self, module: str, visitor: Substitution) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._module = module
        self._visitor = visitor

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A visit's own functions, and those inside modules, are none of the module's.
        if self._visitor.running_code == self._module:
            name = getattr(func, "__name__", str(func)).strip("_")
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    self.operations.append((name, leaf.detach()))
        return result


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
