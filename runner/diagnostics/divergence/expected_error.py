"""What rounding explains: the error that operands rounded to a format cause in a module's result.

A module's expected error is measured: the reference's own module gets the reference's inputs,
weights and output gradients, each element off by a random share of the unit roundoff of the format
in which the other execution holds it, and the result is compared with the reference's. To this the
rounding of the result itself is added. So a module that amplifies errors is allowed more.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runner.diagnostics.divergence.boundaries import Boundary
from runner.diagnostics.divergence.reference import Reference

SEED = 2**40 + 1
"""Of the generator that draws the perturbations."""
POOL_SIZE = 2**20
"""Random numbers that are drawn; drawing them for every tensor would take as long as a step."""
POOL_STEP = 1_000_003
"""By how many numbers the next tensor begins later in the pool: a prime, so that places differ."""


@dataclass
class Roundoffs:
    """The unit roundoffs with which an execution computes.

    Attributes:
        tensors: by boundary, of the tensor's dtype, or of that which it was passed on from.
        tensor_gradients: by boundary, the same of the tensor's gradient.
        code: by module, of its own code: the widest of the dtypes that it takes and returns, or of
            the narrow format that a converted layer multiplies in.
        gradients: by module, of a converted layer's output gradients.
        parameters: of the dtype in which autocast may use any parameter.
    """

    tensors: Mapping[Boundary, float] = field(default_factory=dict)
    tensor_gradients: Mapping[Boundary, float] = field(default_factory=dict)
    code: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    parameters: float = 0.0


_FLOAT32_ROUNDOFF = 2.0**-24


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
        return self._roundoffs.code.get(module, 0.0)

    def roundoff(self, boundary: Boundary) -> float:
        """Return the roundoff with which the module that takes a tensor may round it."""
        code = self.code_roundoff(self._reference.users[boundary])
        return max(code, self._roundoffs.tensors.get(boundary, 0.0))

    def gradient_roundoff(self, boundary: Boundary) -> float:
        """Return the roundoff with which the module that computed a tensor may round its
        gradient."""
        owner = self._reference.owners[boundary]
        code = max(self._roundoffs.code.get(owner, 0.0), self._roundoffs.gradients.get(owner, 0.0))
        return max(code, self._roundoffs.tensor_gradients.get(boundary, 0.0))

    def perturbed(self, tensor: Tensor, roundoff: float) -> Tensor:
        """Return tensor * (1 + r), r random and uniform in [-roundoff, roundoff]."""
        if not (roundoff and tensor.is_floating_point()):
            return tensor
        # In float32 at least: a narrow reference would round the change away.
        wide = tensor if tensor.dtype is torch.float64 else tensor.float()
        return torch.addcmul(wide, wide, self._draws(wide), value=roundoff)

    def _draws(self, like: Tensor) -> Tensor:
        """Return random numbers, uniform in [-1, 1], of a tensor's shape and dtype.

        They come from one pool, each time from another place; large tensors repeat it.
        """
        count = like.numel()
        if self._pool is None or self._pool.dtype is not like.dtype:
            pool = torch.empty(POOL_SIZE, dtype=like.dtype, device=like.device)
            self._pool = pool.uniform_(-1, 1, generator=self._generator)
        self._place += POOL_STEP
        pool = self._pool
        if count > POOL_SIZE:
            pool = pool.repeat(-(-count // POOL_SIZE) + 1)
        place = self._place % (pool.numel() - count + 1)
        return pool[place : place + count].view(like.shape)

    @contextmanager
    def perturbed_parameters(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which the model's parameters are as rounding may have them."""
        roundoffs: dict[nn.Parameter, float] = {}
        for name, module in model.named_modules():
            code = self._roundoffs.code.get(name or "(model)", 0.0)
            for parameter in module.parameters(recurse=False):
                # A tied parameter belongs to several modules, and is changed once.
                roundoffs[parameter] = max(code, roundoffs.get(parameter, 0.0))
        changed = {p: r for p, r in roundoffs.items() if p.is_floating_point() and r}
        kept = {parameter: parameter.detach().clone() for parameter in changed}
        for parameter, roundoff in changed.items():
            parameter.data.copy_(self.perturbed(parameter.detach(), roundoff))
        try:
            yield
        finally:
            for parameter, value in kept.items():
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
