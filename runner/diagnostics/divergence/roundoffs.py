"""The unit roundoffs with which two executions compute each tensor and each module's own code."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runner.diagnostics.divergence.boundaries import ROOT, Boundary
from runner.diagnostics.divergence.expected_error import Roundoffs
from runner.diagnostics.divergence.narrow_code import NarrowCode
from runner.diagnostics.divergence.reference import Reference
from runner.precision.contract import Precision
from runner.precision.conversion import is_converted
from runner.precision.keep_fp32 import Float32Island
from runner.training.state import TrainState
from runner.utils.tensors import unit_roundoff

TF32 = 2.0**-11
"""Unit roundoff of float32 operands in TF32 products, which have 10 stored bits of significand."""


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


def narrow_dtype(precision: Precision) -> torch.dtype:
    """Return the narrower of the dtypes that a precision computes in and stores."""
    return max(precision.compute, precision.storage, key=unit_roundoff)


def find_roundoffs(
    reference_execution: Execution,
    execution: Execution,
    reference: Reference,
    dtypes: Mapping[Boundary, torch.dtype],
    narrow_code: NarrowCode | None,
) -> Roundoffs:
    """Return the wider of the roundoffs of two executions.

    Args:
        reference_execution: of the reference.
        execution: is compared with it.
        reference: its tensors.
        dtypes: of the other execution's tensors.
        narrow_code: of the other execution; None where its functions are not seen.
    """
    # A tensor that is narrower than the precision has it is a bug, which must not excuse itself.
    widest = unit_roundoff(narrow_dtype(execution.precision))
    own: dict[Boundary, float] = {}
    for boundary, value in reference.values.items():
        other = min(unit_roundoff(dtypes.get(boundary, value.dtype)), widest)
        own[boundary] = max(unit_roundoff(value.dtype), other)
    tensors = _passed_on(own, reference.values)
    code: dict[str, float] = {}
    passed: dict[int, float] = {}
    for boundary, value in reference.values.items():
        # What a module only passes on it has not rounded.
        if own[boundary] > passed.get(id(value), 0.0):
            owner = reference.owners[boundary]
            code[owner] = max(code.get(owner, 0.0), own[boundary])
        passed[id(value)] = tensors[boundary]
    reference_dtypes = {boundary: value.dtype for boundary, value in reference.values.items()}
    gradients: dict[str, float] = {}
    parameters = 0.0
    for one, noted, its_dtypes in (
        (reference_execution, reference.narrow_code, reference_dtypes),
        (execution, narrow_code, dtypes),
    ):
        takers = {
            user
            for boundary, user in reference.users.items()
            if its_dtypes.get(boundary) is narrow_dtype(one.precision)
        }
        rounding = _possibly_rounding(one) if noted is None else noted.modules(takers)
        roundoff = unit_roundoff(narrow_dtype(one.precision))
        for name in rounding:
            code[name] = max(code.get(name, 0.0), roundoff)
        _add_modules(one, code, gradients)
        parameters = max(parameters, _autocast_roundoff(one))
    backward = {b: own[b] for b in reversed(own) if b in reference.gradients}
    tensor_gradients = _passed_on(backward, reference.gradients)
    return Roundoffs(tensors, tensor_gradients, code, gradients, parameters)


def _passed_on(
    own: Mapping[Boundary, float], tensors: Mapping[Boundary, Tensor]
) -> dict[Boundary, float]:
    """Return the roundoff at each boundary where a tensor that the reference's modules pass on is
    as rounded as where it came from. What one execution passes on the other may have cast, as
    float() of a float32 and of a bfloat16 tensor.

    Args:
        own: roundoffs of the tensors' dtypes by boundary, in the order in which they are passed.
        tensors: of the reference, the same one at several boundaries where it is passed on.
    """
    passed: dict[int, float] = {}
    found: dict[Boundary, float] = {}
    for boundary, roundoff in own.items():
        tensor = id(tensors[boundary])
        found[boundary] = passed[tensor] = max(roundoff, passed.get(tensor, 0.0))
    return found


def _possibly_rounding(execution: Execution) -> set[str]:
    """Return the modules whose own code may round to the narrow dtype, where its functions are not
    seen: all that have modules, but those that are kept in float32."""
    islands: set[nn.Module] = set()
    names: set[str] = set()
    for name, module in execution.state.plain_model.named_modules():
        if is_island(module):
            islands.update(module.modules())
        if module not in islands and next(module.children(), None):
            names.add(name or ROOT)
    return names


def _add_modules(execution: Execution, code: dict[str, float], gradients: dict[str, float]) -> None:
    """Raise the roundoffs of converted layers, and of products in TF32."""
    precision = execution.precision
    products = 0.0
    options = getattr(precision, "options", None)
    if options is not None and options.float32_matmul != "highest":
        products = TF32
    for dotted, module in execution.state.plain_model.named_modules():
        name = dotted or ROOT
        if products:
            code[name] = max(code.get(name, 0.0), products)
        if is_converted(module):
            forward, backward = precision.operand_roundoffs
            code[name] = max(code.get(name, 0.0), forward)
            gradients[name] = max(gradients.get(name, 0.0), backward)


def _autocast_roundoff(execution: Execution) -> float:
    """Return the unit roundoff of the dtype to which autocast casts; 0 without autocast."""
    precision, device = execution.precision, execution.device
    if precision.storage is not torch.float32:
        return 0.0
    with precision.forward(device):
        if not torch.is_autocast_enabled(device.type):
            return 0.0
        return unit_roundoff(torch.get_autocast_dtype(device.type))
