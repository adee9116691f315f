"""Compare an exported program with the model that it was made from."""

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.checkpoint.program_inputs import (
    ExportError,
    error_line,
    first_rows,
    program_arguments,
)
from runner.precision.contract import CPU_DEVICE, Precision
from runner.precision.layers.exportable import Plain8bit, PlainFloat8

_DEVICE_EPS = 2**-10
"""Least relative error of a device's operations: TF32 has ten bits, and sums another order."""


def tolerance_of(plain: nn.Module, precision: Precision, device: torch.device) -> float:
    """Return the relative error that is allowed: half the digits of the compute dtype."""
    eps = torch.finfo(precision.compute).eps
    if device.type != "cpu":
        eps = max(eps, _DEVICE_EPS)
    # A last bit that differs in the input of such a layer may move a value to the next of the few
    # values that its format has.
    for module in plain.modules():
        if isinstance(module, Plain8bit | PlainFloat8):
            eps = max(eps, module.relative_step)
    # The square root halves the exponent, that is, the number of digits.
    return math.sqrt(eps)


def compare(loaded: Any, example: Any, expected: Any, tolerance: float) -> None:
    """Run the program on the batch and on its first row, and compare it with the model.

    Args:
        loaded: the program, read from its file.
        example: the batch that was traced.
        expected: the model's outputs of it.
        tolerance: greatest relative error in the 2-norm of each output.

    Raises:
        ExportError: the program fails, or its outputs differ.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outputs = loaded(*program_arguments(example))
            outputs_of_one = loaded(*program_arguments(first_rows(example, 1)))
        except Exception as error:
            raise ExportError(f"the program does not run: {error_line(error)}") from error
    wanted = output_tensors(expected)
    found = output_tensors(outputs)
    if [t.shape for t in wanted] != [t.shape for t in found]:
        raise ExportError("the program's outputs have other shapes than the model's")
    distances = [_distance(a, b) for a, b in zip(wanted, found, strict=True)]
    # NumPy's maximum is NaN if any distance is; Python's depends on their order.
    error = np.max(distances, initial=0.0)
    # `not <=` refuses NaN, too.
    if not error <= tolerance:
        raise ExportError(
            f"the program's outputs differ from the model's by {error:.2g} of their size, more "
            f"than rounding explains ({tolerance:.2g})"
        )
    if [t.dtype for t in output_tensors(outputs_of_one)] != [t.dtype for t in wanted]:
        raise ExportError("the program's outputs have other dtypes than the model's")


def output_tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors of nested containers."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _distance(wanted: Tensor, found: Tensor) -> float:
    """Return the 2-norm of the difference relative to the wanted values, where these are finite.

    It is infinite or NaN if a found value is not finite where the wanted one is.
    """
    # The outputs may be float16, whose squares overflow in a norm.
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a = wanted.detach().to(CPU_DEVICE, wide).flatten()
    b = found.detach().to(wide).flatten()
    # A model that has diverged is exported, too.
    finite = a.isfinite()
    a = a[finite]
    b = b[finite]
    # Equal values first, because zeros would give 0 / 0.
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a))
