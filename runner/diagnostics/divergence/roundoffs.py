"""The unit roundoffs with which two executions compute each tensor and each module's own code."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from runner.diagnostics.divergence.boundaries import ROOT, Boundary
from runner.diagnostics.divergence.expected_error import (
    FP8_ROUNDOFFS,
    Roundoffs,
    unit_roundoff,
)
from runner.diagnostics.divergence.reference import Reference
from runner.precision.contract import Precision
from runner.precision.conversion import is_converted
from runner.precision.gathered_weights import autocast_dtype
from runner.precision.keep_fp32 import Float32Island
from runner.training.state import TrainState

FOUR_BITS = 2.0**-2
"""Unit roundoff that stands for formats of 4 bits with a scale for each block, whose error of
normal weights is near 0.1 in norm (Dettmers et al., arXiv:2305.14314)."""
TF32 = 2.0**-11
"""Unit roundoff of float32 operands in TF32 products, which have 10 stored bits of significand."""
EIGHT_BITS = 2.0**-6
"""The same for integers of 8 bits with a scale for each row."""


@dataclass(frozen=True)
class Execution:
    """A model in one precision, ready to compute.

    Attributes:
        label: for messages and pages.
        state: model, precision, task and device.
        scale: loss scale.
    """

    label: str
    state: TrainState
    scale: float = 1.0

    @property
    def precision(self) -> Precision:
        """Return the precision."""
        return self.state.precision

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return self.state.device


def is_island(module: nn.Module) -> bool:
    """Return whether precision.keep_fp32 keeps a module in float32."""
    return isinstance(module, Float32Island)


def find_roundoffs(
    reference_execution: Execution,
    execution: Execution,
    reference: Reference,
    dtypes: Mapping[Boundary, torch.dtype],
) -> Roundoffs:
    """Return the wider of the roundoffs of two executions.

    Args:
        reference_execution: of the reference.
        execution: is compared with it.
        reference: its tensors.
        dtypes: of the other execution's tensors.
    """
    tensors: dict[Boundary, float] = {}
    code: dict[str, float] = {}
    precision = execution.precision
    # A tensor that is narrower than the precision has it is a bug, which must not excuse itself.
    widest = max(unit_roundoff(precision.compute), unit_roundoff(precision.storage))
    for boundary, value in reference.values.items():
        other = min(unit_roundoff(dtypes.get(boundary, value.dtype)), widest)
        roundoff = max(unit_roundoff(value.dtype), other)
        tensors[boundary] = roundoff
        for module in (reference.owners[boundary], reference.users[boundary]):
            code[module] = max(code.get(module, 0.0), roundoff)
    gradients: dict[str, float] = {}
    parameters = 0.0
    for one in (reference_execution, execution):
        _add_modules(one, code, gradients)
        parameters = max(parameters, _autocast_roundoff(one))
    return Roundoffs(tensors, code, gradients, parameters)


def _add_modules(execution: Execution, code: dict[str, float], gradients: dict[str, float]) -> None:
    """Raise the roundoffs of converted layers, and of code in which autocast may round."""
    precision = execution.precision
    products = 0.0
    options = getattr(precision, "options", None)
    if options is not None and options.float32_matmul != "highest":
        products = TF32
    half = _autocast_roundoff(execution)
    islands: set[nn.Module] = set()
    for dotted, module in execution.state.plain_model.named_modules():
        name = dotted or ROOT
        if is_island(module):
            islands.update(module.modules())
        if products:
            code[name] = max(code.get(name, 0.0), products)
        if is_converted(module):
            forward, backward = operand_roundoffs(precision, module)
            code[name] = max(code.get(name, 0.0), forward)
            gradients[name] = max(gradients.get(name, 0.0), backward)
        elif half and module not in islands and next(module.children(), None):
            code[name] = max(code.get(name, 0.0), half)


def _autocast_roundoff(execution: Execution) -> float:
    """Return the unit roundoff of the dtype to which autocast casts; 0 without autocast."""
    half = autocast_dtype(execution.precision, execution.device)
    return unit_roundoff(half) if half is not None else 0.0


def operand_roundoffs(precision: Precision, layer: nn.Module) -> tuple[float, float]:
    """Return the unit roundoffs of a converted layer's operands, and of its output gradients."""
    base = unit_roundoff(precision.compute)
    if hasattr(layer, "unpacked_weight"):
        weight = layer._parameters["weight"]
        unpacked = layer.unpacked_weight()  # type: ignore[operator]
        bits = 8 * weight.nbytes / unpacked.numel() if weight is not None else 8
        return (FOUR_BITS if bits < 8 else EIGHT_BITS), base
    if "FP4" in precision.compute_format or "4" in precision.trains_for:
        return FOUR_BITS, FOUR_BITS
    if precision.trains_for:
        return EIGHT_BITS, base
    return FP8_ROUNDOFFS
