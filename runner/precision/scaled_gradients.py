"""Follow gradients from the backward to the step of a training loop of one's own.

Mistakes that would compute other numbers without an error are refused: a clipping before the
gradients are unscaled, a plain `loss.backward()` or `optimizer.step()`, gradients that are added up
over a change of the scale.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from runner.core import LossScale, errors, gradients, tensor_facts

_GradientVersion = tuple[Tensor, int]
"""A gradient as a backward left it, and its version, in which torch counts a tensor's changes."""


def _is_as(seen: _GradientVersion | None, parameter: Tensor) -> bool:
    """Return whether a parameter's gradient is still as it was seen."""
    return seen is not None and parameter.grad is seen[0] and seen[0]._version == seen[1]


class ScaledGradients:
    """The gradients of a training loop, multiplied by its loss scale until they are unscaled.

    Args:
        scale: of the loop.
        device: where the gradients are.

    Attributes:
        scale: the loss scale.
        steps: steps that were attempted.
        is_pending: whether gradients were computed that no step has used.
    """

    def __init__(self, scale: LossScale, device: torch.device) -> None:
        self.scale = scale
        self.steps = 0
        # Asked once: each value of a scale is a copy on the device.
        self._is_scaled = scale.value is not None
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._last_found_inf: Tensor | None = None
        self.is_pending = False
        self._is_stepping = False
        # The gradient of each parameter as the last backward left it, and as it remained after
        # the step of other parameters.
        self._computed: dict[Tensor, _GradientVersion] = {}
        self._unused: dict[Tensor, _GradientVersion] = {}
        # Parameters whose gradients were added in float32.
        self._widened: set[Tensor] = set()
        # The found-inf of each optimizer whose gradients are unscaled.
        self._found_infs: dict[Optimizer, Tensor | None] = {}

    @property
    def skipped_steps(self) -> int:
        """Return how many steps overflowed and were skipped; waits for the device."""
        return int(self._skipped.item())

    @property
    def was_last_step_skipped(self) -> bool:
        """Return whether the last step overflowed; waits for the device."""
        return self._last_found_inf is not None and bool(self._last_found_inf.item())

    def restore_counts(self, steps: int, skipped: int) -> None:
        """Set the numbers of attempted and of skipped steps."""
        self.steps = steps
        self._skipped.fill_(skipped)

    def check_backward(self) -> None:
        """Raise PolicyError where a backward would add to gradients from before the last step."""
        if self._found_infs:
            raise errors.PolicyError(
                "policy.backward after policy.unscale or policy.clip would add gradients that are "
                "multiplied by the loss scale to others that are not. Call policy.step(...) in "
                "between, or all backwards of a step before policy.unscale."
            )
        unused = [p for p, seen in self._unused.items() if _is_as(seen, p)]
        self._unused = {}
        if unused:
            raise errors.PolicyError(
                f"{len(unused)} parameters still have a gradient from before the last policy.step, "
                "whose optimizers do not hold them, as a generator's loss leaves them in its "
                "discriminator; this backward would add to it. Call zero_grad() of their "
                "optimizer, pass all optimizers to one policy.step, or freeze them with "
                "requires_grad_(False)."
            )

    def widen(self, parameters: Iterable[Tensor]) -> None:
        """Have backwards add to the gradients of 16-bit parameters in float32 until they are used.

        Of several processes DistributedDataParallel reduces them, in the parameters' dtype alone.
        """
        has_processes = dist.is_available() and dist.is_initialized()
        if not (has_processes and dist.get_world_size() > 1):
            # A gradient that begins with this backward has nothing to add to.
            narrow = {p for p in tensor_facts.narrow_parameters(parameters) if p.grad is not None}
            tensor_facts.cast_gradients(narrow, torch.float32)
            self._widened |= narrow

    def record_backward(self, parameters: Iterable[Tensor]) -> None:
        """Note which gradients a backward has computed."""
        self.is_pending = True
        self._record(parameters)

    def check_own_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise PolicyError for an optimizer that steps by itself on scaled gradients, and round
        the others' gradients to its parameters' dtypes; a hook of all optimizers' steps."""
        if self._is_stepping:
            return
        gradients.round_gradients([optimizer], self._widened)
        if self._is_scaled and any(p in self._computed for p in gradients.parameters_of(optimizer)):
            raise errors.PolicyError(
                f"optimizer.step() of {type(optimizer).__name__} does not know the loss scale that "
                "its gradients are multiplied by. Write policy.step(optimizer) in its place."
            )

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, once per step."""
        if optimizer in self._found_infs:
            return
        parameters = gradients.parameters_of(optimizer)
        if self._is_scaled:
            self._check_unchanged(optimizer, parameters)
        others = [p for p in self._computed.keys() - {*parameters} if _is_as(self._computed[p], p)]
        gradients.finish_gradients(parameters)
        self._found_infs[optimizer] = self.scale.unscale(gradients.gradients_of(parameters))
        # Gradients that are views of one buffer, as DistributedDataParallel's may be, share their
        # version: unscaling some counts as a change of the others.
        self._record(others)

    def _record(self, parameters: Iterable[Tensor]) -> None:
        for p in parameters:
            if p.grad is not None:
                self._computed[p] = p.grad, p.grad._version

    def _check_unchanged(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Raise PolicyError for gradients that are not those of policy.backward."""
        trained = [p for p in parameters if p.grad is not None]
        changed = sum(not _is_as(self._computed.get(p), p) for p in trained)
        if changed:
            raise errors.PolicyError(
                f"{changed} gradients of {type(optimizer).__name__} are not as policy.backward "
                "left them, multiplied by the loss scale: they were changed, computed by another "
                "backward, or belong to two optimizers. Clip by policy.step(optimizer, "
                "clip_norm=...), call policy.unscale(optimizer) before you change gradients, and "
                "write policy.backward(loss) in place of loss.backward()."
            )

    def clip(
        self, optimizers: Sequence[Optimizer], norm: float | None, value: float | None
    ) -> Tensor:
        """Clip unscaled gradients in place; return their 2-norm before that, a scalar.

        Args:
            optimizers: whose gradients count together.
            norm: largest 2-norm of all gradients; None does not limit it.
            value: largest magnitude of each element; None does not limit it.
        """
        grads = gradients.gradients_of(gradients.parameters_of(*optimizers))
        if not grads:
            raise errors.PolicyError("None of the optimizers' parameters has a gradient to clip.")
        # torch's own clipping returns it so: infinite or NaN where gradients are.
        return torch.linalg.vector_norm(gradients.clip_gradients(grads, norm, value))

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        """Step the optimizers on their unscaled gradients, update the scale, drop the gradients."""
        missing = [type(o).__name__ for o in self._found_infs if o not in optimizers]
        if missing:
            raise errors.PolicyError(
                f"policy.step is not given {', '.join(missing)}, whose gradients are unscaled "
                "already. Pass all optimizers of a step: policy.step(one, other)."
            )
        if not gradients.gradients_of(gradients.parameters_of(*optimizers)):
            raise errors.PolicyError(
                "None of the optimizers' parameters has a gradient. Is the loss computed from the "
                "model that policy.convert returned, and was zero_grad() called too early?"
            )
        found_infs = [self._found_infs[optimizer] for optimizer in optimizers]
        gradients.round_gradients(optimizers, self._widened)
        self._is_stepping = True
        try:
            self.scale.step_all(optimizers, found_infs)
        finally:
            self._is_stepping = False
        self.steps += 1
        found_inf = gradients.any_found_inf(found_infs)
        if found_inf is not None:
            self._last_found_inf = found_inf
            self._skipped += found_inf != 0
        for p in gradients.parameters_of(*optimizers):
            p.grad = None
        self.is_pending = False
        self._found_infs = {}
        self._unused = {p: seen for p, seen in self._computed.items() if p.grad is not None}
        self._computed = {}
