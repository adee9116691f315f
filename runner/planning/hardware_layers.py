"""What layers of a library hold on its hardware, where an emulation stands in for them."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.core import module_tape
from runner.precision.layers.conv1d import weight_matrix
from runner.precision.transformer_engine import TransformerEnginePrecision

_BYTES = {"nvfp4": 9 / 16, "mxfp8": 33 / 32, "block": 33 / 32}
"""Bytes of an element with its share of the scales, by kind of recipe; 1 for the others."""


class _Footprint(NamedTuple):
    """Bytes of an element that a layer's products hold.

    Attributes:
        input: of the input, until the backward.
        weight: of the weight, until the backward.
        copy: of an operand, within a call; of the output's gradient twice.
    """

    input: float
    weight: float
    copy: float


class _FootprintProducts(torch.autograd.Function):
    """The products of a linear layer for tensors without values, with what a library holds."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Any, held: _Footprint) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(_codes(rows, held.input), _codes(weight, held.weight))
        ctx.like = rows.new_empty(0), weight.shape, rows.shape, held, bias is not None
        _codes(rows, held.copy)
        output = rows @ weight.t()
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        like, weight_shape, rows_shape, held, has_bias = ctx.like
        copies = _codes(grad, 2 * held.copy)
        wants_rows, wants_weight, *_ = ctx.needs_input_grad
        rows_grad = like.new_empty(rows_shape) if wants_rows else None
        weight_grad = like.new_empty(weight_shape) if wants_weight else None
        del copies
        return rows_grad, weight_grad, grad.sum(0) if has_bias else None, None


def _codes(tensor: Tensor, size: float) -> Tensor:
    return tensor.new_empty(round(tensor.numel() * size), dtype=torch.uint8)


def _forward(layer: Any, held: _Footprint, input: Tensor) -> Tensor:
    weight = weight_matrix(layer)
    rows = input.reshape(-1, layer.in_features).to(getattr(layer, "compute_dtype", weight.dtype))
    output: Any = _FootprintProducts.apply(rows, weight, layer.bias, held)
    return output.view(*input.shape[:-1], layer.out_features)


def as_on_hardware(model: nn.Module, precision: Any) -> module_tape.ModuleTape:
    """Return a context in which layers that compute otherwise on a CPU hold what they do on a GPU.

    TransformerEngine's save the input in the layout of the weight's gradient, and the weight in
    both layouts (2.20, pytorch/module/linear.py). Those of bitsandbytes that train save the input
    as it is and in float16, and the codes of the weight (0.50, autograd/_functions.py).

    Args:
        model: converted, of tensors without values.
        precision: that converted it.
    """
    tape = module_tape.ModuleTape()
    size = 1.0
    if isinstance(precision, TransformerEnginePrecision):
        size = _BYTES.get(precision.recipe["kind"], 1.0)
    held = {"te_emulation": _Footprint(size, 2 * size, size), "bnb_linear": _Footprint(4, 1, 1)}
    for module in model.modules():
        for kind in type(module).__mro__:
            # A layer fused with its norm computes more than this.
            if kind.__name__ == "LayerNormLinear":
                break
            if kind.__name__ in ("Linear", "Linear8bitTrained"):
                library = kind.__module__.rpartition(".")[2]
                if library in held:
                    tape.replace_forward(module, partial(_forward, module, held[library]))
    return tape
