"""Check the dtype in which an optimizer is asked to keep its state between steps.

Source: DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.2: Adam's moments in bfloat16
beside float32 weights.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from runner.utils.errors import ConfigError
from runner.utils.tensors import dtype_name

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Values of optimizer.state_dtype."""

_LOW_BIT_LIBRARIES = ("bitsandbytes", "torchao")
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SHRINKING_LIMIT = 2**-8
"""A bfloat16 number times 1 - x can be rounded back to itself where x is below this."""


def check_state_dtype(key: str, optimizer: Optimizer, state_dtype: torch.dtype) -> None:
    """Refuse an optimizer that cannot keep its state in a dtype of the runner's choice.

    Args:
        key: that was given, as "optimizer.state_dtype".
        optimizer: its class and the dtypes of its parameters are checked.
        state_dtype: one of STATE_DTYPES.

    Raises:
        ConfigError: the optimizer has a format of its own, or evaluates the loss within its step,
            or has weights in another dtype than float32, bfloat16 and float16.
    """
    given = f"{key}={dtype_name(state_dtype)}"
    name = type(optimizer).__name__
    libraries = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    if libraries.intersection(_LOW_BIT_LIBRARIES):
        raise ConfigError(
            f"{given}: {name} keeps its state in a format of its own. Allowed: an optimizer of "
            f"torch.optim, or of your own. Leave {key} out, or type optimizer=adamw."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{given}: {name} keeps past gradients and evaluates the loss within its step. "
            f"Allowed: any other optimizer. Leave {key} out, or type optimizer=adamw."
        )
    others = _dtypes(optimizer).difference(_WEIGHT_DTYPES)
    if others:
        names = ", ".join(sorted(map(dtype_name, others)))
        raise ConfigError(
            f"{given}: {name} has weights in {names}, whose state keeps their dtype. Allowed: "
            f"weights in float32, bfloat16 or float16. Leave {key} out, or type precision=32-true."
        )


def _dtypes(optimizer: Optimizer) -> set[torch.dtype]:
    return {p.dtype for group in optimizer.param_groups for p in group["params"]}


def stuck_averages(state_dtype: torch.dtype | None, optimizer: Optimizer) -> list[str]:
    """Return the settings whose running averages bfloat16 cannot shrink, as "betas[1]=0.999".

    An average v becomes beta * v + (1 - beta) * new. Where 1 - beta is below half a unit in the
    last place, a v above its new values is rounded back to itself in every step.
    """
    if state_dtype is not torch.bfloat16:
        return []
    found: dict[str, None] = {}
    for group in optimizer.param_groups:
        for label, value in _coefficients(group):
            if isinstance(value, float) and 0 < 1 - value < SHRINKING_LIMIT:
                found[f"{label}={value:g}"] = None
    return list(found)


def _coefficients(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the coefficients of a group's running averages by their names."""
    for i, beta in enumerate(group.get("betas") or ()):
        yield f"betas[{i}]", beta
    for name in ("alpha", "rho", "momentum"):
        yield name, group.get(name)
