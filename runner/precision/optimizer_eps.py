"""Refuse an optimizer's eps that squares of gradients in float16 do not allow."""

import math
import warnings
from collections.abc import Sequence

import torch

from runner.core import ConfigError

# How far one step may move a weight, as an absolute number, before check_eps warns and before it
# refuses: 0.2 hurts, and 1 destroys any initialisation.
MAX_SAFE_STEP = 0.2
MAX_ALLOWED_STEP = 1.0


def check_eps(name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse, or warn of, an eps that is too small for squared gradients in float16.

    Args:
        name: of the precision, for messages.
        optimizers: an attribute `wide_state` marks one whose state is wider than float16.

    Raises:
        ConfigError: eps is 0 in float16, or a single step can move a weight by more than
            MAX_ALLOWED_STEP.
    """
    for optimizer in optimizers:
        # Groups of parameters may have an eps of their own; the smallest one underflows first.
        groups = [group.get("eps") for group in optimizer.param_groups]
        eps = min((e for e in groups if isinstance(e, float)), default=0.0)
        # The state has the weights' dtype, float16, unless the optimizer says otherwise.
        if getattr(optimizer, "wide_state", False) or eps <= 0:
            continue
        key = "optimizer.eps" if len(optimizers) == 1 else "optimizer.<name>.eps"
        setting = f"{key}={eps:g}: {type(optimizer).__name__} keeps its state in float16 "
        gradient, step_times_eps = _largest_underflow_step(optimizer)
        # The least power of ten that keeps a step below MAX_SAFE_STEP, from 1e-4. The 1e-9 keeps
        # an exact power of ten, whose logarithm may be rounded up.
        least_eps = max(1e-4, step_times_eps / MAX_SAFE_STEP)
        suggested = 10.0 ** math.ceil(math.log10(least_eps) - 1e-9)
        remedy = f"Type {key}={suggested:.0e}, or precision=16-mixed.".replace("e-0", "e-")
        # Such an eps adds nothing to a square that rounds to 0, so that the denominator is 0.
        if torch.tensor(eps).half().item() == 0.0:
            raise ConfigError(
                f"{setting}under precision={name}, where {eps:g} is 0 (the least above is 6e-08), "
                f"and divides by it at a step whose squared gradients underflow. {remedy}"
            )
        # A square that rounds to 0 leaves eps alone in the denominator, so that a gradient g moves
        # its weight by lr * g / eps.
        step = step_times_eps / eps
        if step <= MAX_SAFE_STEP:
            continue
        message = (
            f"{setting}under precision={name}, where the squares of gradients under {gradient:.2g} "
            f"round to 0, so that one step can move a weight by lr * {gradient:.2g} / eps = "
            f"{step:.2g}. {remedy}"
        )
        if step > MAX_ALLOWED_STEP:
            raise ConfigError(message)
        warnings.warn(message, stacklevel=2)


def _largest_underflow_step(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Return the gradient under which an optimizer's squares round to 0 in float16, and its product
    with the learning rate, of the parameter group where the product is largest; zeros for an
    optimizer that keeps no squares."""
    largest = (0.0, 0.0)
    for group in optimizer.param_groups:
        # The factor of a new squared gradient in the optimizer's state; 0 without squares.
        weight = 0.0
        if isinstance(optimizer, torch.optim.Adagrad):
            weight = 1.0
        elif isinstance(optimizer, torch.optim.RMSprop):
            weight = 1 - group["alpha"]
        # Adamax stores magnitudes, not squares.
        elif "betas" in group and not isinstance(optimizer, torch.optim.Adamax):
            weight = 1 - group["betas"][1]
        if weight > 0:
            # Half of float16's least number above 0, 2**-24, rounds to 0.
            gradient = math.sqrt(2**-25 / weight)
            step_times_eps = float(group["lr"]) * gradient
            largest = max(largest, (gradient, step_times_eps), key=lambda pair: pair[1])
    return largest
