"""The unit roundoffs of two executions, and the errors that rounding by them explains.

A module's expected error is measured: the reference's own module gets the reference's inputs,
weights and output gradients, each element off by a random share of the unit roundoff of the format
in which the other execution holds it, and the result is compared with the reference's. To this the
rounding of the result itself is added. So a module that amplifies errors is allowed more.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runner.core import Precision, TrainState, module_tape, tensor_facts
from runner.diagnostics.divergence.boundaries import Boundary
from runner.diagnostics.divergence.reference import NarrowCode, Reference
from runner.precision.casting import KeptInFloat32
from runner.precision.conversion import is_converted

SEED = 2**40 + 1
"""Of the generator that draws the perturbations."""
POOL_SIZE = 2**20
"""Random numbers that are drawn; drawing them for every tensor would take as long as a step."""
POOL_STEP = 1_000_003
"""By how many numbers the next tensor begins later in the pool: a prime, so that places differ."""
TF32 = 2.0**-11
"""Unit roundoff of float32 operands in TF32 products, which have 10 stored bits of significand."""
_FLOAT32_ROUNDOFF = 2.0**-24


class Roundoffs:
    """The unit roundoffs with which an execution computes; 0 where none is noted.

    Attributes:
        tensors: by boundary, of the tensor's dtype, or of that which it was passed on from.
        tensor_gradients: by boundary, the same of the tensor's gradient.
        code: by module, of its own code: the widest of the dtypes that it takes and returns, or of
            the narrow format that a converted layer multiplies in.
        gradients: by module, of a converted layer's output gradients.
        parameters: of the dtype in which autocast may use any parameter.
    """

    def __init__(self) -> None:
        self.tensors: defaultdict[Boundary, float] = defaultdict(float)
        self.tensor_gradients: defaultdict[Boundary, float] = defaultdict(float)
        self.code: defaultdict[str, float] = defaultdict(float)
        self.gradients: defaultdict[str, float] = defaultdict(float)
        self.parameters = 0.0


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


def narrow_dtype(precision: Precision) -> torch.dtype:
    """Return the narrower of the dtypes that a precision computes in and stores."""
    return max(precision.compute, precision.storage, key=tensor_facts.unit_roundoff)


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
    roundoffs = Roundoffs()
    # A tensor that is narrower than the precision has it is a bug, which must not excuse itself.
    widest = tensor_facts.unit_roundoff(narrow_dtype(execution.precision))
    # Where the reference's modules pass a tensor on, it is as rounded as where it came from: what
    # one execution passes on the other may have cast, as float() of a float32 and of a bfloat16
    # tensor.
    by_tensor: defaultdict[int, float] = defaultdict(float)
    by_boundary: dict[Boundary, float] = {}
    for boundary, value in reference.values.items():
        other = min(tensor_facts.unit_roundoff(dtypes.get(boundary, value.dtype)), widest)
        roundoff = max(tensor_facts.unit_roundoff(value.dtype), other)
        by_boundary[boundary] = roundoff
        # What a module only passes on it has not rounded.
        if roundoff > by_tensor[id(value)]:
            by_tensor[id(value)] = roundoff
            owner = reference.owners[boundary]
            roundoffs.code[owner] = max(roundoffs.code[owner], roundoff)
        roundoffs.tensors[boundary] = by_tensor[id(value)]
    by_gradient: defaultdict[int, float] = defaultdict(float)
    for boundary in reversed(by_boundary):
        if boundary in reference.gradients:
            key = id(reference.gradients[boundary])
            by_gradient[key] = max(by_boundary[boundary], by_gradient[key])
            roundoffs.tensor_gradients[boundary] = by_gradient[key]
    reference_dtypes = {boundary: value.dtype for boundary, value in reference.values.items()}
    takers = _takers(reference_execution, reference, reference_dtypes)
    _add_execution(roundoffs, reference_execution, reference.narrow_code, takers)
    _add_execution(roundoffs, execution, narrow_code, _takers(execution, reference, dtypes))
    return roundoffs


def _takers(
    execution: Execution, reference: Reference, dtypes: Mapping[Boundary, torch.dtype]
) -> set[str]:
    """Return the modules that take a tensor of the execution's narrow dtype."""
    narrow = narrow_dtype(execution.precision)
    return {user for boundary, user in reference.users.items() if dtypes.get(boundary) is narrow}


def _add_execution(
    roundoffs: Roundoffs, execution: Execution, narrow_code: NarrowCode | None, takers: set[str]
) -> None:
    """Raise the roundoffs to those of an execution's own code, converted layers, products in TF32
    and autocast."""
    precision, device = execution.precision, execution.device
    uses_tf32 = precision.float32_matmul not in ("", "highest")
    rounding = set() if narrow_code is None else narrow_code.modules(takers)
    kept: set[nn.Module] = set()
    for dotted_name, module in execution.state.plain_model.named_modules():
        name = dotted_name or module_tape.ROOT
        if uses_tf32:
            roundoffs.code[name] = max(roundoffs.code[name], TF32)
        if is_converted(module):
            forward, backward = precision.operand_roundoffs
            roundoffs.code[name] = max(roundoffs.code[name], forward)
            roundoffs.gradients[name] = max(roundoffs.gradients[name], backward)
        if isinstance(module, KeptInFloat32):
            kept.update(module.modules())  # type: ignore[attr-defined]
        # Where functions are not seen, the own code of any module that has modules may round.
        elif narrow_code is None and module not in kept and next(module.children(), None):
            rounding.add(name)
    roundoff = tensor_facts.unit_roundoff(narrow_dtype(precision))
    for name in rounding:
        roundoffs.code[name] = max(roundoffs.code[name], roundoff)
    if precision.storage is torch.float32:
        with precision.forward(device):
            if torch.is_autocast_enabled(device.type):
                autocast = tensor_facts.unit_roundoff(torch.get_autocast_dtype(device.type))
                roundoffs.parameters = max(roundoffs.parameters, autocast)


class Perturber:
    """Changes tensors by a random share of a roundoff; the draws are the same for the same order.

    Args:
        roundoffs: of both executions.
        reference: whose tensors are perturbed.
        device: of the tensors.
        draw: number of the draw; others are other random numbers.
    """

    def __init__(
        self, roundoffs: Roundoffs, reference: Reference, device: torch.device, draw: int = 0
    ) -> None:
        self._roundoffs = roundoffs
        self._reference = reference
        self._generator = torch.Generator(device).manual_seed(SEED + draw)
        self._pool: Tensor | None = None
        self._place = 0

    def code_roundoff(self, module: str) -> float:
        """Return the roundoff with which a module's own code may round."""
        return self._roundoffs.code[module]

    def roundoff(self, boundary: Boundary) -> float:
        """Return the roundoff with which the module that takes a tensor may round it."""
        code = self.code_roundoff(self._reference.users[boundary])
        return max(code, self._roundoffs.tensors[boundary])

    def gradient_roundoff(self, boundary: Boundary) -> float:
        """Return the roundoff with which the module that computed a tensor may round its
        gradient."""
        owner = self._reference.owners[boundary]
        converted = self._roundoffs.gradients[owner]
        return max(self.code_roundoff(owner), converted, self._roundoffs.tensor_gradients[boundary])

    def perturbed(self, tensor: Tensor, roundoff: float) -> Tensor:
        """Return tensor * (1 + r), r random and uniform in [-roundoff, roundoff]."""
        if tensor.is_complex():
            return torch.view_as_complex(self.perturbed(tensor_facts.real_view(tensor), roundoff))
        if not (roundoff and tensor.is_floating_point()):
            return tensor
        # In float32 at least: a narrow reference would round the change away.
        wide = tensor if tensor.dtype is torch.float64 else tensor.float()
        # From one pool, each time from another place; large tensors repeat it.
        count = wide.numel()
        if self._pool is None or self._pool.dtype is not wide.dtype:
            pool = torch.empty(POOL_SIZE, dtype=wide.dtype, device=wide.device)
            self._pool = pool.uniform_(-1, 1, generator=self._generator)
        self._place += POOL_STEP
        pool = self._pool
        if count > POOL_SIZE:
            pool = pool.repeat(-(-count // POOL_SIZE) + 1)
        place = self._place % (pool.numel() - count + 1)
        draws = pool[place : place + count].view(wide.shape)
        return torch.addcmul(wide, wide, draws, value=roundoff)

    @contextmanager
    def perturbed_parameters(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which the model's parameters are as rounding may have them."""
        roundoffs: defaultdict[nn.Parameter, float] = defaultdict(float)
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                # A tied parameter belongs to several modules, and is changed once.
                code = self.code_roundoff(name or module_tape.ROOT)
                roundoffs[parameter] = max(code, roundoffs[parameter])
        changed = {p: r for p, r in roundoffs.items() if tensor_facts.unit_roundoff(p.dtype) and r}
        before = {parameter: parameter.detach().clone() for parameter in changed}
        for parameter, roundoff in changed.items():
            parameter.data.copy_(self.perturbed(parameter.detach(), roundoff))
        try:
            yield
        finally:
            for parameter, value in before.items():
                parameter.data.copy_(value)


def with_rounding(relative: float, roundoff: float, terms: int = 1) -> float:
    """Return an expected relative error, with those of adding up and of rounding the result.

    A uniform error in [-u, u] has the standard deviation u / sqrt(3). Sums may be rounded after
    each term, in float32 or wider: the partial sums of terms of random signs grow as the square
    root of their number, and so does their error.

    Args:
        relative: what the operands' rounding causes.
        roundoff: of the result.
        terms: that are added to one element of the result.
    """
    rounding = roundoff / math.sqrt(3)
    summation = min(roundoff, _FLOAT32_ROUNDOFF) * math.sqrt(terms / 3)
    return math.hypot(relative, rounding, summation)
