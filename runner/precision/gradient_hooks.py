"""Find code and modules whose gradients the loss scale would disturb without an error."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.core import fmt, module_tape

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
        f"hooks see gradients times the loss scale: {fmt.first_names(places)}. Type "
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


def watch_gradient_calls(warn: Callable[[str], None]) -> module_tape.FunctionWatch:
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

    return module_tape.FunctionWatch(note)
