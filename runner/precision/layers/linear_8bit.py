"""Compute linear layers in int8 on bitsandbytes' kernels.

Each layer is a torch.nn.Linear or a Conv1D whose class was changed in place. They differ from the
library's own module where that misleads: weights and inputs are scaled into float16's range,
through which the library quantises; a trainable bias keeps its dtype; the quantised copy of a
weight that trains is made in every forward, so that none sees the weight of an earlier step, and
its gradient is not quantised; and scales are a buffer, which moves, copies and loads like others.

Source: Dettmers et al., LLM.int8(), arXiv:2208.07339 (row-wise int8, outlier columns).
"""

from typing import Any

import torch
from torch import Tensor, nn

from runner.precision.conversion import low_precision_class
from runner.precision.layers.backward_checks import forbid_second_derivative
from runner.precision.layers.bnb_library import bnb
from runner.precision.layers.conv1d import is_transposed, layer_widths, weight_matrix


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


class Linear8bit(nn.Linear):
    """A linear layer with a frozen int8 weight: float [..., in] to the same dtype [..., out].

    The largest magnitude of each row is in `SCB`, as bitsandbytes calls it. The bias keeps its
    dtype and trains if it did before the conversion.
    """

    SCB: Tensor
    compute_dtype: torch.dtype
    threshold: float

    @classmethod
    def convert_in_place(cls, module: Any, compute: torch.dtype, threshold: float) -> None:
        """Turn a linear layer into a Linear8bit, in place.

        Args:
            module: nn.Linear or Conv1D.
            compute: the dtype that inputs have before they are quantised.
            threshold: magnitude from which an input's column is not quantised; 0 for none.
        """
        codes, largest = pack_int8(weight_matrix(module))
        module.in_features, module.out_features = layer_widths(module)
        module.__class__ = low_precision_class(cls, type(module))
        module.weight = nn.Parameter(codes.contiguous(), requires_grad=False)
        module.register_buffer("SCB", largest)
        module.compute_dtype = compute
        module.threshold = threshold

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype [..., out]."""
        state = bnb.MatmulLtState()
        state.CB = self.weight.data  # type: ignore[assignment]
        state.SCB = self.SCB  # type: ignore[assignment]
        state.is_training = self.training
        return _product_int8(self, input, state)

    def unpacked_weight(self) -> Tensor:
        """Return the weight that the codes stand for: float32 [out, in], a Conv1D's [in, out]."""
        weight = unpack_int8(self.weight.data, self.SCB, torch.float32)
        return weight.t() if is_transposed(self) else weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # type: ignore[override]
        """Load an int8 weight with its scales unchanged; pack a plain weight."""
        key = f"{prefix}weight"
        weight = state_dict.get(key)
        if weight is not None and weight.is_floating_point():
            if is_transposed(self):
                weight = weight.t()
                state_dict[key] = weight
            # nn.Module below reports a weight of another shape.
            if weight.shape == self.weight.shape:
                codes, largest = pack_int8(weight.to(self.weight.device))
                state_dict[key] = codes
                state_dict[f"{prefix}SCB"] = largest
        super()._load_from_state_dict(state_dict, prefix, *args)


class Linear8bitTrained(nn.Linear):
    """A linear layer whose plain weight trains: float [..., in] to the same dtype [..., out].

    Its int8 copy is made in every forward, so that no forward sees the weight of an earlier step.
    """

    compute_dtype: torch.dtype
    threshold: float

    @classmethod
    def convert_in_place(cls, module: Any, compute: torch.dtype, threshold: float) -> None:
        """Turn a linear layer into a Linear8bitTrained, in place; its parameters stay.

        Args:
            module: nn.Linear or Conv1D.
            compute: the dtype that inputs have before they are quantised.
            threshold: magnitude from which an input's column is not quantised; 0 for none.
        """
        module.in_features, module.out_features = layer_widths(module)
        module.__class__ = low_precision_class(cls, type(module))
        module.compute_dtype = compute
        module.threshold = threshold

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype [..., out]."""
        state = bnb.MatmulLtState()
        weight = weight_matrix(self)
        state.CB, state.SCB = pack_int8(weight)  # type: ignore[assignment]
        # A reentrant checkpoint's first forward has no gradients; it must multiply as its second.
        state.is_training = self.training or torch.is_grad_enabled()
        return forbid_second_derivative(_product_int8(self, input, state, weight))


def _product_int8(
    module: Linear8bit | Linear8bitTrained,
    x: Tensor,
    state: bnb.MatmulLtState,
    trained: Tensor | None = None,
) -> Tensor:
    """Return a layer's output: the library's product, plus bias, in x's dtype.

    Args:
        module: the layer.
        x: float [..., in].
        state: of the library, with the int8 weight and its scales.
        trained: the plain weight [out, in] that gets a gradient.
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
            output = bnb.matmul(rows, state.CB, state=state)  # type: ignore[arg-type]
        else:
            output = _product_of_scaled_rows(rows, state)
        if trained is not None:
            output = _TrainWeight.apply(output, rows.detach(), trained)
        if module.bias is not None:
            output = output + module.bias.to(module.compute_dtype)
        return output.view(*x.shape[:-1], module.out_features).to(x.dtype)


def _product_of_scaled_rows(rows: Tensor, state: bnb.MatmulLtState) -> Tensor:
    """Return the library's product without bias: rows [rows, in] to [rows, out].

    The library quantises by way of float16, whose range is narrow. So rows are multiplied by a
    power of two before and the product is divided by it, which changes nothing else, because each
    row has a scale of its own. With a threshold the rows stay as they are, since it is in their
    units.
    """
    factor = _normalizing_factor(rows) if state.threshold == 0 else 1.0
    return bnb.matmul(rows * factor, state.CB, state=state) / factor  # type: ignore[arg-type, operator]


class _TrainWeight(torch.autograd.Function):
    """The identity of a product, which gives the weight that was quantised for it a gradient.

    It is the product of the gradient and the rows as they are. The library's own, of codes, is
    wrong by its own size on a GPU (0.50): it scales the codes of rows by the columns' scales, and
    its kernel reads a transposed matrix as if it were contiguous. Source of a weight gradient in
    16 bit beside int8 products: Wortsman et al., SwitchBack, arXiv:2304.13013.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.rows = rows
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weight_grad = (ctx.rows.t() @ grad).t() if ctx.needs_input_grad[2] else None
        return grad, None, weight_grad


def _normalizing_factor(tensor: Tensor) -> Tensor:
    """Return the power of two, a float32 scalar on the device, that brings magnitudes below 1."""
    # Not by torch.ldexp of the tensor itself, whose gradient is zero in torch 2.11.
    one = torch.ones((), device=tensor.device)
    if tensor.numel() == 0:
        return one
    largest = tensor.detach().abs().amax().float()
    return torch.ldexp(one, -torch.frexp(largest).exponent)
