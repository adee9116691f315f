"""Compute linear layers in int8 on bitsandbytes' kernels.

Each layer is a torch.nn.Linear or a Conv1D whose class was changed in place. They differ from the
library's own module where that misleads: weights, inputs and gradients are
scaled into float16's range, through which the library quantises; a trainable bias keeps its
dtype; the quantised copy of a weight that trains is made in every forward, so that none sees the
weight of an earlier step; and scales are a buffer, which moves, copies and loads like any other.

Source: Dettmers et al., LLM.int8(), arXiv:2208.07339 (row-wise int8, outlier columns).
"""

from typing import Any

import torch
from torch import Tensor, nn

from runner.precision.layers.backward_checks import forbid_second_derivative
from runner.precision.layers.bnb_library import bnb
from runner.precision.layers.conv1d import weight_matrix
from runner.precision.layers.quantized_linear import PackedLinear
from runner.precision.layers.weight_formats import PackedTensors


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as int8 codes and the largest magnitude of each row.

    It is the library's formula, round(weight * 127 / largest), without its conversion to float16.

    Args:
        weight: float [out, in]; unchanged.

    Returns:
        int8 [out, in] and float32 [out].
    """
    wide = weight.detach().float()
    largest = wide.abs().amax(1)
    # A row of zeros would divide by zero.
    divisor = largest.where(largest > 0, 1.0)
    return (wide * (127 / divisor)[:, None]).round().to(torch.int8), largest


def unpack_int8(codes: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight that codes (int8 [out, in]) and rows' largest magnitudes ([out]) stand for,
    in a float dtype."""
    return (codes.float() * (largest.float()[:, None] / 127)).to(dtype)


class Linear8bit(PackedLinear):
    """A linear layer with a frozen int8 weight: float [..., in] to the same dtype [..., out].

    The largest magnitude of each row is in `SCB`, as bitsandbytes calls it.

    Attributes:
        compute_dtype: the dtype that inputs have before they are quantised.
        threshold: magnitude from which an input's column is not quantised; 0 for none.
    """

    SCB: Tensor
    compute_dtype: torch.dtype
    threshold: float

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        codes, largest = pack_int8(weight)
        return {"weight": codes, "SCB": largest}

    def unpack(self, packed: PackedTensors) -> Tensor:
        return unpack_int8(packed["weight"], packed["SCB"], torch.float32)

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype [..., out]."""
        state = bnb.MatmulLtState()
        state.CB = self.weight.data  # type: ignore[assignment]
        state.SCB = self.SCB  # type: ignore[assignment]
        state.is_training = self.training
        return _product_int8(self, input, self.weight, state)


class Linear8bitTrained(nn.Linear):
    """A linear layer whose plain weight trains: float [..., in] to the same dtype [..., out].

    Its int8 copy is made in every forward, so that no forward sees the weight of an earlier step.
    Attributes are those of Linear8bit.
    """

    compute_dtype: torch.dtype
    threshold: float

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype [..., out]."""
        state = bnb.MatmulLtState()
        weight = weight_matrix(self)
        state.CB, state.SCB = pack_int8(weight)  # type: ignore[assignment]
        # A reentrant checkpoint's first forward has no gradients; it must multiply as its second.
        state.is_training = self.training or torch.is_grad_enabled()
        # Without gradients the library asks for a kernel that CPUs lack if the weight may train.
        weight = weight if torch.is_grad_enabled() else weight.detach()
        return forbid_second_derivative(_product_int8(self, input, weight, state))


def _product_int8(
    module: Linear8bit | Linear8bitTrained, x: Tensor, weight: Tensor, state: bnb.MatmulLtState
) -> Tensor:
    """Return a layer's output: the library's product, plus bias, in x's dtype.

    Args:
        module: the layer.
        x: float [..., in].
        weight: [out, in], int8, or the plain weight that trains.
        state: of the library, with the int8 weight and its scales.
    """
    state.threshold = module.threshold
    state.has_fp16_weights = False
    # On CPUs without AVX-512 the library multiplies codes as float32 matrices, whose exact sums
    # autocast would round.
    with torch.autocast(x.device.type, enabled=False):
        # Flattened: the library's gradient fails on more dimensions.
        rows = x.reshape(-1, x.shape[-1]).to(module.compute_dtype)
        if x.device.type == "cpu" and state.is_training:
            # There the library multiplies unpacked weights and quantises nothing.
            output = bnb.matmul(rows, weight, state=state)
        else:
            output = int8_product(rows, weight, state)
        if module.bias is not None:
            output = output + module.bias.to(module.compute_dtype)
        return output.view(*x.shape[:-1], module.out_features).to(x.dtype)


def int8_product(rows: Tensor, weight: Any, state: bnb.MatmulLtState) -> Tensor:
    """Return the library's product without bias: rows [rows, in] to [rows, out].

    The library quantises by way of float16, whose range is narrow. So rows are multiplied by a
    power of two before and the product is divided by it, which changes nothing else, because each
    row has a scale of its own. Gradients, which are quantised for the weight's gradient, are
    treated likewise. With a threshold the rows stay as they are, since it is in their units.

    Args:
        rows: float.
        weight: [out, in], int8, or the plain weight that trains.
        state: of the library, with the int8 weight and its scales.
    """
    factor = _normalizing_factor(rows) if state.threshold == 0 else 1.0
    rows = rows * factor
    grad_factor: list[Tensor] = []  # one value, which the backward sets
    if weight.requires_grad:
        rows = _RestoreGrad.apply(rows, grad_factor)
        weight = _RestoreGrad.apply(weight, grad_factor)
    output = bnb.matmul(rows, weight, state=state)
    if weight.requires_grad:
        output = _NormalizeGrad.apply(output, grad_factor)
    return output / factor  # type: ignore[operator]


def _normalizing_factor(tensor: Tensor) -> Tensor:
    """Return the power of two, a float32 scalar on the device, that brings magnitudes below 1."""
    # Not by torch.ldexp of the tensor itself, whose gradient is zero in torch 2.11.
    one = torch.ones((), device=tensor.device)
    if tensor.numel() == 0:
        return one
    largest = tensor.detach().abs().amax().float()
    return torch.ldexp(one, -torch.frexp(largest).exponent)


class _NormalizeGrad(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a power of two that brings it below 1.

    The power of two is stored in a list that _RestoreGrad shares.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad_factor: list[Tensor]) -> Tensor:
        ctx.grad_factor = grad_factor
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.grad_factor[:] = [_normalizing_factor(grads[0])]
        return grads[0] * ctx.grad_factor[0], None


class _RestoreGrad(torch.autograd.Function):
    """The identity, whose gradient is divided by the power of two of _NormalizeGrad."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, grad_factor: list[Tensor]) -> Tensor:
        ctx.grad_factor = grad_factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].float() / ctx.grad_factor[0], None
