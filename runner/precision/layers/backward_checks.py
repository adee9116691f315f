"""Refuse what low-precision layers cannot do in a backward, and pad rows for what they can.

They cannot be differentiated twice, and layers that scale by past steps (delayed scaling) cannot be
computed again. Both would give wrong gradients without an error. The weight gradient of FP8
products needs a multiple of rows, and the last batch may have any number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.core import ConfigError, module_tape


def forbid_second_derivative(output: Tensor) -> Tensor:
    """Return a layer's output with a hook that refuses to differentiate its gradient again.

    The libraries' backward rounds outside autograd, so that a second derivative through it lacks
    terms.

    Args:
        output: of the layer, any shape and dtype.

    Raises:
        ConfigError: in the backward, where create_graph=True asks for such a gradient.
    """
    # A compiler traces the backward with gradients enabled, and refuses the second order itself.
    if output.requires_grad and not torch.compiler.is_compiling():
        output = _Own.apply(output)  # type: ignore[assignment]
        output.register_hook(_refuse_graph)
    return output


class _Own(torch.autograd.Function):
    """The identity; its output is no view, so that a model may change it in place.

    torch refuses that for a view which a function of a library makes within itself.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _refuse_graph(grad: Tensor) -> None:
    """Raise ConfigError in a backward with create_graph=True; a tensor hook."""
    if torch.is_grad_enabled():  # within a backward only with create_graph=True
        raise ConfigError(
            "The model or task differentiates gradients (torch.autograd.grad with "
            "create_graph=True), and a linear layer in FP8, FP4 or int8 has first derivatives "
            "only. Type precision.ignore_modules=[<its layers>], which computes those in the "
            "precision of the rest, or precision=bf16-mixed."
        )


def refuse_recompute(module: nn.Module, args: Any) -> None:
    """Raise ConfigError for a forward that runs within a backward; a forward pre-hook."""
    if module_tape.is_in_backward():
        raise ConfigError(
            "The model computes forwards again in the backward (torch.utils.checkpoint, as in "
            "transformers' gradient_checkpointing_enable), and delayed scaling scales by past "
            "steps, which each forward updates. Type precision=transformer-engine-current, or "
            "switch the model's checkpointing off."
        )


def pad_rows(forward: Callable[[Tensor], Tensor], inputs: Tensor, multiple: int) -> Tensor:
    """Return `forward(inputs)`, computed on rows that are padded with zeros to a multiple.

    A linear layer's weight gradient contracts over the rows, so they must be such a multiple
    although the forward alone takes any number. A row of zeros changes no amax, and its gradient
    is zero, so neither outputs nor gradients depend on the padding.

    Args:
        forward: maps [rows, in] to [rows, out], row by row (a bias may be in it).
        inputs: [..., in], any dtype that forward takes. If there are rows and their number is such
            a multiple, forward takes the inputs unchanged.
        multiple: that the number of rows must have.

    Returns:
        Outputs [..., out] without the padding.
    """
    *leading, width = inputs.shape
    flat = inputs.reshape(inputs.numel() // width, width)
    rows = flat.shape[0]
    # Without rows there would be no amax to scale by.
    missing = -rows % multiple if rows else multiple
    if not missing:
        return forward(inputs)
    outputs = forward(F.pad(flat, (0, 0, 0, missing)))[:rows]
    return outputs.reshape(*leading, outputs.shape[-1])
