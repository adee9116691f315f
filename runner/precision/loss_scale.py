"""The loss scale: a null-object pair, so that the step has no branch on precision.

DynamicScale follows torch.amp.GradScaler value for value (a test compares them over random
overflows) and differs in three points that a record of every step needs: nothing is read on
the host unless an optimizer cannot skip on the device, each optimizer has a found-inf of its
own, and its state keeps one name in checkpoints.

Source: PyTorch AMP; Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.utils.errors import ConfigError


class LossScale(ABC):
    """What the step asks of a loss scale. Tensors are scalars on the run's device."""

    @property
    @abstractmethod
    def value(self) -> Tensor | None:
        """The scale in force, float32, a tensor that later updates do not change."""

    @abstractmethod
    def multiply(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""

    @abstractmethod
    def unscale(self, grads: Sequence[Tensor]) -> Tensor | None:
        """Divide one optimizer's gradients by the scale in place; 1.0 where any was not finite."""

    @abstractmethod
    def step(self, optimizer: Optimizer, found_inf: Tensor | None) -> None:
        """Step the optimizer unless its gradients overflowed."""

    @abstractmethod
    def update(self, found_infs: Sequence[Tensor | None]) -> None:
        """Grow or back off, once per iteration, after every optimizer has stepped."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if state:
            raise ConfigError(
                "The checkpoint holds a loss scale and this precision has none. "
                "Load it with precision=16-mixed."
            )


class NoLossScale(LossScale):
    """No loss scale: every operation is the plain one."""

    value: Final = None  # type: ignore[assignment]

    def multiply(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, grads: Sequence[Tensor]) -> None:
        return None

    def step(self, optimizer: Optimizer, found_inf: Tensor | None) -> None:
        optimizer.step()

    def update(self, found_infs: Sequence[Tensor | None]) -> None:
        return None


class DynamicLossScale(LossScale):
    """Backs off at an overflow, grows after growth_interval steps without one.

    Args:
        device: where the gradients are.
        init_scale: first value; 65536 as in GradScaler.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: applied steps in a row before it grows.
        fixed: a constant scale instead; overflowing steps are skipped all the same.

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
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.fixed = int(growth_interval), fixed is not None
        self.device = device
        self._scale = torch.tensor(fixed or init_scale, dtype=torch.float32, device=device)
        self._applied_in_a_row = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def value(self) -> Tensor:
        return self._scale.clone()

    def multiply(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def unscale(self, grads: Sequence[Tensor]) -> Tensor:
        found_inf = torch.zeros((), dtype=torch.float32, device=self.device)
        inverse = self._scale.reciprocal()
        for group in _by_dtype(grads):
            torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inverse)
        return found_inf

    def step(self, optimizer: Optimizer, found_inf: Tensor | None) -> None:
        assert found_inf is not None
        if self.device.type != "cpu" and _skips_by_itself(optimizer):
            optimizer.found_inf, optimizer.grad_scale = found_inf, None  # type: ignore[attr-defined]
            try:
                optimizer.step()  # a fused kernel reads found-inf on the device and skips there
            finally:
                del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        elif not HostFlag(found_inf).raised:
            optimizer.step()

    def update(self, found_infs: Sequence[Tensor | None]) -> None:
        if self.fixed:
            return
        flags = [flag for flag in found_infs if flag is not None]
        found = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        torch._amp_update_scale_(
            self._scale,
            self._applied_in_a_row,
            found,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )

    def state_dict(self) -> dict[str, float]:
        """Read from the device; for checkpoints, never on the step path."""
        return {
            "scale": self._scale.item(),
            "applied_in_a_row": self._applied_in_a_row.item(),
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        if not state:
            raise ConfigError(
                "The checkpoint holds no loss scale: it was trained in another precision."
            )
        if not self.fixed:
            self._scale.fill_(state["scale"])
        self._applied_in_a_row.fill_(int(state["applied_in_a_row"]))


def check_loss_scale(values: dict[str, Any]) -> None:
    """Raise ConfigError with every value of `precision.loss_scale` that is out of range."""
    rules = {
        "init_scale": (lambda v: v > 0, "above 0"),
        "growth_factor": (lambda v: v > 1, "above 1"),
        "backoff_factor": (lambda v: 0 < v < 1, "between 0 and 1"),
        "growth_interval": (lambda v: v >= 1 and int(v) == v, "a whole number, 1 and up"),
        "fixed": (lambda v: v is None or v > 0, "above 0, or null for a dynamic scale"),
    }
    problems = []
    for key, value in values.items():
        if key not in rules:
            problems.append(
                f"precision.loss_scale.{key} is not known. Allowed: {', '.join(rules)}."
            )
            continue
        holds, allowed = rules[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        known = (number and math.isfinite(value)) or (value is None and key == "fixed")
        if not (known and holds(value)):
            problems.append(f"precision.loss_scale.{key}={value} cannot work. Allowed: {allowed}.")
    if problems:
        raise ConfigError(*problems)


def _skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether a fused kernel reads found-inf and skips. Not SGD before it has its momentum: torch
    allocates that without filling it and leaves the filling to the step that is skipped."""
    unfilled = not optimizer.state and any(g.get("momentum") for g in optimizer.param_groups)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not unfilled


def _by_dtype(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups that one native call takes; a complex gradient counts as its two real halves."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        real = torch.view_as_real(grad) if grad.is_complex() else grad
        groups.setdefault(real.dtype, []).append(real)
    return list(groups.values())


class HostFlag:
    """A device flag on its way to the host. Reading it waits for the flag alone, not for what
    was queued after it; on the CPU its memory is read in place."""

    __slots__ = ("_event", "_value")

    def __init__(self, flag: Tensor) -> None:
        self._event = None
        if flag.device.type == "cuda":
            self._value = torch.empty((), dtype=flag.dtype, pin_memory=True)
            self._value.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._value = flag.cpu()

    @property
    def raised(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value.numpy()[()] != 0.0)
