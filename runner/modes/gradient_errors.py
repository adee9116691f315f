"""Explain why a loss has no gradient."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_NO_GRADIENT = ("does not require grad and does not have a grad_fn", "received a gradient")
_GRADIENT_BREAKERS = (
    "Leave out what cuts it after that: .detach(), .data, .item(), .numpy(), argmax, round, "
    "torch.no_grad()."
)


def is_loss_independent_of_weights(error: Exception) -> bool:
    """Return whether a backward failed because the loss does not depend on what trains."""
    return any(text in str(error) for text in _NO_GRADIENT)


def gradient_problem(model: nn.Module, call: Callable[[], Any]) -> str:
    """Return why a loss has no gradient: found by one more forward, module by module.

    Args:
        model: whose parameters train.
        call: runs the forward on a batch and returns its output.
    """
    # Per module: its name, whether gradients are on in it, and whether its output has one.
    seen: list[tuple[str, bool, bool]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            seen.append((name, torch.is_grad_enabled(), _requires_grad(output)))

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    try:
        with torch.enable_grad():
            output = call()
    finally:
        for handle in handles:
            handle.remove()
    without_grad = [name for name, enabled, _ in seen if not enabled]
    with_gradient = [name for name, _, requires in seen if requires]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    start = "The loss has no gradient, so nothing can train."
    if _requires_grad(output):
        return f"{start} The model's output has one: the task's loss cuts it. {_GRADIENT_BREAKERS}"
    if without_grad:
        return (
            f"{start} {type(model).__name__}.forward runs {without_grad[0]} with gradients "
            "switched off. Leave torch.no_grad() and torch.inference_mode() out of what trains."
        )
    if with_gradient:
        last = with_gradient[-1]
        return f"{start} The last module whose output has one is {last}. {_GRADIENT_BREAKERS}"
    return (
        f"{start} No parameter that trains takes part in {type(model).__name__}.forward "
        f"({', '.join(names[:4])}), or it works under torch.no_grad(). Use them in forward, or "
        "set requires_grad of those that it uses."
    )


def _requires_grad(nest: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in _leaves(nest))


def _leaves(nest: Any) -> list[Any]:
    """Return the leaves of a nest; of a mapping that torch does not know (ModelOutput), too."""
    return tree_leaves(dict(nest) if isinstance(nest, Mapping) else nest)
