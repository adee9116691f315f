"""Multiply the loss by a scale, so that small float16 gradients do not become zero.

DynamicLossScale follows torch.amp.GradScaler value for value (a test compares them over random
overflows) and differs in three points: nothing is read on the host unless an optimizer cannot skip
on the device, each optimizer has a found-inf of its own, and its state keeps one name in
checkpoints.

Source: PyTorch AMP; Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.core import ConfigError, LossScale, gradients, refuse, tensor_facts


class DynamicLossScale(LossScale):
    """A loss scale that backs off at an overflow and grows after a row of steps without one.

    Args:
        device: where the gradients are.
        init_scale: first value; 65536 as in GradScaler.
        growth_factor: multiplies the scale when it grows; above 1.
        backoff_factor: multiplies the scale at an overflow; between 0 and 1.
        growth_interval: applied steps in a row before it grows.
        fixed: a constant scale in place of a dynamic one; overflowing steps are skipped, too.

    Raises:
        ConfigError: a value outside its range.
    """

    def __init__(
        self,
        device: torch.device,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        fixed: float | None = None,
    ) -> None:
        check_loss_scale(
            {
                "init_scale": init_scale,
                "growth_factor": growth_factor,
                "fixed": fixed,
                "backoff_factor": backoff_factor,
                "growth_interval": growth_interval,
            }
        )
        self.device = device
        # In the order in which torch's operator takes them.
        self.growth = (growth_factor, backoff_factor, int(growth_interval))
        self.is_fixed = fixed is not None
        self._scale = torch.tensor(fixed or init_scale, dtype=torch.float32, device=device)
        self._applied_in_a_row = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def value(self) -> Tensor:
        # _scale is updated in place, and a step's record keeps what this returns.
        return self._scale.clone()

    def multiply(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def unscale(self, grads: Sequence[Tensor]) -> Tensor:
        found_inf = torch.zeros((), dtype=torch.float32, device=self.device)
        # GradScaler's: multiplying by the inverse is one fused kernel, and exact for powers of two.
        inverse = self._scale.reciprocal()
        # The native call takes gradients of one dtype, complex ones as real and imaginary parts.
        groups: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            real = torch.view_as_real(grad) if grad.is_complex() else grad
            groups.setdefault(real.dtype, []).append(real)
        for group in groups.values():
            torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inverse)
        return found_inf

    def step(self, optimizer: Optimizer, found_inf: Tensor | None) -> None:
        assert found_inf is not None
        # SGD does not skip before it has its momentum: torch allocates that without filling it and
        # leaves the filling to the step that would be skipped.
        has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
        is_unfilled = has_momentum and not optimizer.state
        skips = getattr(optimizer, "_step_supports_amp_scaling", False) and not is_unfilled
        if self.device.type != "cpu" and skips:
            # A fused kernel reads found-inf on the device and skips there, so that the host does
            # not wait. grad_scale is None because the gradients are unscaled already.
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        elif not tensor_facts.HostFlag(found_inf).is_set:
            optimizer.step()

    def update(self, found_infs: Sequence[Tensor | None]) -> None:
        if self.is_fixed:
            return
        # An overflow in any optimizer's gradients backs the one scale off.
        found_inf = gradients.any_found_inf(found_infs)
        assert found_inf is not None
        torch._amp_update_scale_(self._scale, self._applied_in_a_row, found_inf, *self.growth)

    def state_dict(self) -> dict[str, float]:
        """Return the scale and its growth counter. Reading them waits for the device, so this is
        for checkpoints, never for the step."""
        return {"scale": self._scale.item(), "applied_in_a_row": self._applied_in_a_row.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if not state:
            raise ConfigError(
                "The checkpoint holds no loss scale: it was trained in another precision."
            )
        if not self.is_fixed:
            self._scale.fill_(state["scale"])
        self._applied_in_a_row.fill_(int(state["applied_in_a_row"]))


def check_loss_scale(values: dict[str, Any]) -> None:
    """Raise ConfigError with every value of `precision.loss_scale` that is out of range."""
    rules = {
        "init_scale": (lambda v: v > 0, "above 0"),
        "growth_factor": (lambda v: v > 1, "above 1"),
        "backoff_factor": (lambda v: 0 < v < 1, "between 0 and 1"),
        # 2e3 in a yaml is a float.
        "growth_interval": (lambda v: v >= 1 and int(v) == v, "a whole number, 1 and up"),
        "fixed": (lambda v: v > 0, "above 0, or null for a dynamic scale"),
    }
    problems = []
    for key, value in values.items():
        if key not in rules:
            text = f"precision.loss_scale.{key} is not known. Allowed: {', '.join(rules)}."
            problems.append(text)
            continue
        if key == "fixed" and value is None:
            continue
        is_in_range, allowed = rules[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and is_in_range(value)):
            problems.append(f"precision.loss_scale.{key}={value} cannot work. Allowed: {allowed}.")
    refuse(problems)
