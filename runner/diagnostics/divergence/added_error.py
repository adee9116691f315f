"""The error that a module adds to one tensor, and whether rounding explains it."""

import math
from dataclasses import dataclass

import torch

from runner.diagnostics.divergence.tensor_error import TensorError

LARGEST_EXPLAINED = 2.0
"""Error that rounding explains, as a multiple of the expected error, of a layer of torch.nn or a
converted one: operands and result are rounded once, as the expected error has it."""
LARGEST_EXPLAINED_OF_CODE = 5.0
"""The same for any other code, which may round several times on its way."""
LARGEST_EXPLAINED_OF_INTEGERS = 4.0
"""The same of integers and truth values, for the number of elements that differ."""
_FEW_ELEMENTS = 32
WRITTEN_INPUT = "input after the call"
PASSED = "input of "
"""How the name of a tensor begins that a module passes to another one."""


@dataclass(frozen=True)
class AddedError:
    """The error of one tensor that a module computed from the reference's own tensors.

    Attributes:
        tensor: which one, in words.
        found: its error.
        expected: relative error that rounding explains.
        dtype: name of the dtype that the tensor has in the other execution.
        position: number of the tensor's boundary in the order of the forward.
        limit: error of many elements that rounding explains, as a multiple of `expected`.
        operation: name of the function in which the module's code goes wrong first; empty where
            that was not looked for or found.
    """

    tensor: str
    found: TensorError
    expected: float
    dtype: str
    position: int
    limit: float = LARGEST_EXPLAINED
    operation: str = ""

    @property
    def ratio(self) -> float:
        """Return the error as a multiple of what rounding explains."""
        relative = self.found.relative
        if not relative or math.isinf(self.expected):
            return 0.0
        return relative / self.expected if self.expected else math.inf

    @property
    def largest_ratio(self) -> float:
        """Return the largest ratio that rounding explains."""
        if self.found.is_discrete:
            return self.limit
        # The expected error of few elements, as of a loss, is that of few draws: by chance small.
        return self.limit * (1 + _FEW_ELEMENTS / max(self.found.elements, 1))

    @property
    def ulps(self) -> float:
        """Return the relative error in units in the last place of the tensor's dtype; NaN for
        integers."""
        if not self.dtype or self.found.is_discrete:
            return math.nan
        return self.found.relative / torch.finfo(getattr(torch, self.dtype)).eps

    @property
    def is_unexplained(self) -> bool:
        """Return whether rounding does not explain the error."""
        if self.found.other_shape:
            # Rounding explains it where the perturbed reference has another shape, too.
            return math.isfinite(self.expected)
        if self.found.nonfinite:
            return True
        return self.ratio > self.largest_ratio
