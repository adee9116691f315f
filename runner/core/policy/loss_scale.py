"""Multiply the loss by a scale, so that small float16 gradients do not become zero.

NoLossScale and DynamicLossScale have the same methods, so that the training step has no branch on
the precision. DynamicLossScale follows torch.amp.GradScaler value for value (a test compares them
over random overflows) and differs in three points: nothing is read on the host unless an optimizer
cannot skip on the device, each optimizer has a found-inf of its own, and its state keeps one name
in checkpoints.

ScaledGradients follows gradients from the backward to the step of a training loop, and refuses
mistakes that would compute other numbers without an error: a clipping before the gradients are
unscaled, a plain `loss.backward()` or `optimizer.step()`, gradients that are added up over a change
of the scale.

Source: PyTorch AMP; Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.core.base.errors import ConfigError, PolicyError
from runner.core.base.fmt import first_names
from runner.core.base.module_tape import FunctionWatch
from runner.core.base.tensor_facts import cast_gradients, narrow_parameters
from runner.core.policy.gradients import (
    any_found_inf,
    clip_gradients,
    finish_gradients,
    gradients_of,
    parameters_of,
    round_gradients,
)


class LossScale:
    """A loss scale as the training step uses it; this one does nothing. Tensors are scalars on the
    run's device."""

    @property
    def value(self) -> Tensor | None:
        """Return the current scale, a float32 scalar that later updates do not change."""
        return None

    def multiply(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss

    def unscale(self, grads: Sequence[Tensor]) -> Tensor | None:
        """Divide one optimizer's gradients by the scale in place; return its found-inf, a float32
        scalar that is 1.0 where any gradient is not finite and 0.0 else."""
        return None

    def step(self, optimizer: Optimizer, found_inf: Tensor | None) -> None:
        """Step the optimizer, or skip the step where its gradients overflowed."""
        optimizer.step()

    def update(self, found_infs: Sequence[Tensor | None]) -> None:
        """Grow or back off, once per iteration, after every optimizer has stepped."""

    def step_all(
        self, optimizers: Sequence[Optimizer], found_infs: Sequence[Tensor | None]
    ) -> None:
        """Step the optimizers on their unscaled gradients, and update the scale."""
        for optimizer, found_inf in zip(optimizers, found_infs, strict=True):
            self.step(optimizer, found_inf)
        # One scale for all optimizers, so it changes once, after the last of them has used it.
        self.update(found_infs)

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint stores of the scale; empty without one."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what state_dict returned.

        Raises:
            ConfigError: the checkpoint holds a loss scale and this precision has none, or the
                reverse.
        """
        if state:
            raise ConfigError(
                "The checkpoint holds a loss scale and this precision has none. "
                "Load it with precision=16-mixed."
            )


@final
class NoLossScale(LossScale):
    """The loss scale of precisions that need none: every operation is the plain one."""


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
        # As torch's operator takes them.
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
        elif not HostFlag(found_inf).is_set:
            optimizer.step()

    def update(self, found_infs: Sequence[Tensor | None]) -> None:
        if self.is_fixed:
            return
        # An overflow in any optimizer's gradients backs the one scale off.
        found_inf = any_found_inf(found_infs)
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
        "fixed": (lambda v: v is None or v > 0, "above 0, or null for a dynamic scale"),
    }
    problems = []
    for key, value in values.items():
        if key not in rules:
            text = f"precision.loss_scale.{key} is not known. Allowed: {', '.join(rules)}."
            problems.append(text)
            continue
        is_in_range, allowed = rules[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_known = (is_number and math.isfinite(value)) or (value is None and key == "fixed")
        if not (is_known and is_in_range(value)):
            problems.append(f"precision.loss_scale.{key}={value} cannot work. Allowed: {allowed}.")
    if problems:
        raise ConfigError(*problems)


class HostFlag:
    """A scalar flag that is copied from the device to the host in the background.

    Reading it waits for the copy alone, not for what was queued on the device after it. On the CPU
    its memory is read in place.
    """

    __slots__ = ("_event", "_value")

    def __init__(self, flag: Tensor) -> None:
        self._event = None
        if flag.device.type == "cuda":
            self._value = torch.empty((), dtype=flag.dtype, pin_memory=True)
            self._value.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            # The same tensor where the flag is in host memory already.
            self._value = flag.cpu()

    @property
    def is_set(self) -> bool:
        """Return whether the flag is not zero; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value.numpy()[()] != 0.0)


# Other contexts of the runner hear of a call, too.
_CALLED_THROUGH = (
    *("torch.overrides", "torch._tensor", "torch.autograd", "torch._functorch"),
    *("runner.precision.", "runner.diagnostics.", "runner.core.base."),
)
_INNER = (
    "gradients within the forward ({}) lack the loss scale: float16 rounds those below 6e-8 to 0. "
    "Multiply what they are taken of by a factor, and divide them; or type precision=bf16-mixed."
)


def describe_hooks(places: Sequence[str]) -> str:
    """Return a text about hooks on gradients at these places in code or model; empty without."""
    if not places:
        return ""
    return (
        f"hooks see gradients times the loss scale: {first_names(places)}. Type "
        "precision=bf16-mixed, which has none; train.clip_value clips unscaled gradients."
    )


def gradient_hooks(model: nn.Module) -> list[str]:
    """Return the names of the modules and parameters with hooks of the user's own on gradients."""
    keys = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    names = []
    for name, owner in (*model.named_modules(), *model.named_parameters()):
        hooks = [hook for key in keys for hook in (getattr(owner, key, None) or {}).values()]
        if not all(_is_library(getattr(hook, "__module__", None)) for hook in hooks):
            names.append(name or type(owner).__name__)
    return names


def _is_library(module: object) -> bool:
    # Hooks of FSDP and of probes know the scale, or leave gradients as they are.
    return str(module).startswith(("torch.", "runner."))


def watch_gradient_calls(warn: Callable[[str], None]) -> FunctionWatch:
    """Return a context in which the lines of code that the loss scale disturbs are warned of, each
    once, before the backward: those that register hooks on activations, and those that compute
    gradients within a forward."""
    said: set[str] = set()

    def note(func: Any, _: object) -> None:
        if func not in (Tensor.register_hook, torch.autograd.grad, Tensor.backward):
            return
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__", "").startswith(_CALLED_THROUGH):
            frame = frame.f_back
        place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        text = describe_hooks([place]) if func is Tensor.register_hook else _INNER.format(place)
        if not _is_library(frame.f_globals.get("__name__")) and text not in said:
            said.add(text)
            warn(text)

    return FunctionWatch(note)


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
        # Of each parameter with a gradient: as the last backward left it, and as it remained after
        # the step of other parameters.
        self._computed: dict[Tensor, _GradientVersion] = {}
        self._unused: dict[Tensor, _GradientVersion] = {}
        # Parameters whose gradients were added in float32.
        self._widened: set[Tensor] = set()
        # Of each optimizer whose gradients are unscaled, its found-inf.
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
            raise PolicyError(
                "policy.backward after policy.unscale or policy.clip would add gradients that are "
                "multiplied by the loss scale to others that are not. Call policy.step(...) in "
                "between, or all backwards of a step before policy.unscale."
            )
        unused = [p for p, seen in self._unused.items() if _is_as(seen, p)]
        self._unused = {}
        if unused:
            raise PolicyError(
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
            narrow = {p for p in narrow_parameters(parameters) if p.grad is not None}
            cast_gradients(narrow, torch.float32)
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
        round_gradients([optimizer], self._widened)
        if self._is_scaled and any(p in self._computed for p in parameters_of(optimizer)):
            raise PolicyError(
                f"optimizer.step() of {type(optimizer).__name__} does not know the loss scale that "
                "its gradients are multiplied by. Write policy.step(optimizer) in its place."
            )

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, once per step."""
        if optimizer in self._found_infs:
            return
        parameters = parameters_of(optimizer)
        if self._is_scaled:
            self._check_unchanged(optimizer, parameters)
        others = [p for p in self._computed.keys() - {*parameters} if _is_as(self._computed[p], p)]
        finish_gradients(parameters)
        self._found_infs[optimizer] = self.scale.unscale(gradients_of(parameters))
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
            raise PolicyError(
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
        grads = gradients_of(parameters_of(*optimizers))
        if not grads:
            raise PolicyError("None of the optimizers' parameters has a gradient to clip.")
        # As torch's own clipping returns it: infinite or NaN where gradients are.
        return torch.linalg.vector_norm(clip_gradients(grads, norm, value))

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        """Step the optimizers on their unscaled gradients, update the scale, drop the gradients."""
        missing = [type(o).__name__ for o in self._found_infs if o not in optimizers]
        if missing:
            raise PolicyError(
                f"policy.step is not given {', '.join(missing)}, whose gradients are unscaled "
                "already. Pass all optimizers of a step: policy.step(one, other)."
            )
        if not gradients_of(parameters_of(*optimizers)):
            raise PolicyError(
                "None of the optimizers' parameters has a gradient. Is the loss computed from the "
                "model that policy.convert returned, and was zero_grad() called too early?"
            )
        found_infs = [self._found_infs[optimizer] for optimizer in optimizers]
        round_gradients(optimizers, self._widened)
        self._is_stepping = True
        try:
            self.scale.step_all(optimizers, found_infs)
        finally:
            self._is_stepping = False
        self.steps += 1
        found_inf = any_found_inf(found_infs)
        if found_inf is not None:
            self._last_found_inf = found_inf
            self._skipped += found_inf != 0
        for p in parameters_of(*optimizers):
            p.grad = None
        self.is_pending = False
        self._found_infs = {}
        self._unused = {p: seen for p, seen in self._computed.items() if p.grad is not None}
        self._computed = {}
