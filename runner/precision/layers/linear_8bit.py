"""int8 linear layers on bitsandbytes' kernels, each a torch.nn.Linear or a Conv1D turned in place.

They differ from the library's own module where that misleads: weights, inputs and gradients are
quantised within float16's range, by way of which the library does it; a trainable bias keeps its
dtype; the quantised copy of a weight that trains is made in every forward, so that none sees the
weight of an earlier step; and scales are a buffer, which moves, copies and loads like any other.

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
    """A weight [out, in] as int8 with the largest magnitude of each row, float32 [out]: the
    library's formula, without its way through float16."""
    wide = weight.detach().float()
    largest = wide.abs().amax(1)
    whole = largest.where(largest > 0, 1.0)
    return (wide * (127 / whole)[:, None]).round().to(torch.int8), largest


def unpack_int8(codes: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that int8 codes stand for."""
    return (codes.float() * (largest.float()[:, None] / 127)).to(dtype)


class Linear8bit(nn.Linear):
    """float [..., in] to the same dtype [..., out]; int8 weight, frozen, with the largest
    magnitude of each row in `SCB`, as bitsandbytes calls it. The bias is as it was."""

    SCB: Tensor
    compute_dtype: torch.dtype
    threshold: float

    @classmethod
    def swap(cls, module: Any, compute: torch.dtype, threshold: float) -> None:
        """Turn a linear layer into one of these, where it is."""
        codes, largest = pack_int8(weight_matrix(module))
        module.in_features, module.out_features = layer_widths(module)
        module.__class__ = low_precision_class(cls, type(module))
        module.weight = nn.Parameter(codes, requires_grad=False)
        module.register_buffer("SCB", largest)
        module.compute_dtype, module.threshold = compute, threshold

    def forward(self, input: Tensor) -> Tensor:
        state = bnb.MatmulLtState()
        state.CB, state.SCB = self.weight.data, self.SCB  # type: ignore[assignment]
        state.is_training = self.training
        return _product_int8(self, input, self.weight, state)

    def unpacked_weight(self) -> Tensor:
        """Return the weight that the codes stand for: float32 [out, in], a Conv1D's [in, out]."""
        weight = unpack_int8(self.weight.data, self.SCB, torch.float32)
        return weight.t() if is_transposed(self) else weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # type: ignore[override]
        """int8 with its scales, as it is; a plain weight is packed."""
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.is_floating_point() and is_transposed(self):
            state_dict[f"{prefix}weight"] = weight = weight.t()
        if weight is not None and weight.is_floating_point() and weight.shape == self.weight.shape:
            codes, largest = pack_int8(weight.to(self.weight.device))
            state_dict |= {f"{prefix}weight": codes, f"{prefix}SCB": largest}
        super()._load_from_state_dict(state_dict, prefix, *args)


class Linear8bitTrained(nn.Linear):
    """float [..., in] to the same dtype [..., out]; a plain weight that trains, and an int8 copy
    made anew in every forward, so that no forward sees the weight of an earlier step."""

    compute_dtype: torch.dtype
    threshold: float

    @classmethod
    def swap(cls, module: Any, compute: torch.dtype, threshold: float) -> None:
        """Turn a linear layer into one of these, where it is; its parameters stay."""
        module.in_features, module.out_features = layer_widths(module)
        module.__class__ = low_precision_class(cls, type(module))
        module.compute_dtype, module.threshold = compute, threshold

    def forward(self, input: Tensor) -> Tensor:
        state = bnb.MatmulLtState()
        weight = weight_matrix(self)
        state.CB, state.SCB = pack_int8(weight)  # type: ignore[assignment]
        # A reentrant checkpoint's first forward has no gradients, and multiplies as its second.
        state.is_training = self.training or torch.is_grad_enabled()
        # Without gradients the library asks for a kernel that CPUs lack if the weight may train.
        weight = weight if torch.is_grad_enabled() else weight.detach()
        return forbid_second_derivative(_product_int8(self, input, weight, state))


def _product_int8(
    module: Linear8bit | Linear8bitTrained, x: Tensor, weight: Tensor, state: bnb.MatmulLtState
) -> Tensor:
    """The library's product on flattened rows (its gradient fails on more dimensions)."""
    state.threshold, state.has_fp16_weights = module.threshold, False
    rows = x.reshape(-1, x.shape[-1]).to(module.compute_dtype)
    if x.device.type == "cpu" and state.is_training:  # there it multiplies unpacked weights
        made = bnb.matmul(rows, weight, state=state)
    else:
        made = int8_product(rows, weight, state)
    if module.bias is not None:
        made = made + module.bias.to(module.compute_dtype)
    return made.view(*x.shape[:-1], module.out_features).to(x.dtype)


def int8_product(rows: Tensor, weight: Any, state: bnb.MatmulLtState) -> Tensor:
    """The library's product without bias, which quantises by way of float16: rows enter it times a
    power of two, which a scale per row does not see, and so do gradients where they are quantised
    for the weight's. A threshold is on the rows as they are."""
    factor = _factor(rows) if state.threshold == 0 else 1.0
    rows = rows * factor
    box: list[Tensor] = []
    if weight.requires_grad:
        rows, weight = _Grown.apply(rows, box), _Grown.apply(weight, box)
    made = bnb.matmul(rows, weight, state=state)
    if weight.requires_grad:
        made = _Shrunk.apply(made, box)
    return made / factor  # type: ignore[operator]


def _factor(tensor: Tensor) -> Tensor:
    """The power of two, float32 on the device, that brings every magnitude below 1. Not by
    torch.ldexp of the tensor itself, whose gradient is zero in torch 2.11."""
    one = torch.ones((), device=tensor.device)
    if tensor.numel() == 0:
        return one
    return torch.ldexp(one, -torch.frexp(tensor.detach().abs().amax().float()).exponent)


class _Shrunk(torch.autograd.Function):
    """The identity; its gradient is brought below 1 by a power of two, noted in a box."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, box: list[Tensor]) -> Tensor:
        ctx.box = box
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.box[:] = [_factor(grads[0])]
        return grads[0] * ctx.box[0], None


class _Grown(torch.autograd.Function):
    """The identity; its gradient takes the power of two back."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, box: list[Tensor]) -> Tensor:
        ctx.box = box
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].float() / ctx.box[0], None
