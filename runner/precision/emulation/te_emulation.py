"""Emulate TransformerEngine's layers and recipes in float32, for machines without its hardware.

The module has the part of transformer_engine.pytorch that the runner uses, under the same names, so
that it can take the library's place. What the library's layers compute in FP8 or FP4 is rounded to
that format. Products accumulate in float32 or, with accumulate="hopper", in the 14 bits of Hopper's
tensor cores: the backward's with promotion every 128 elements, the forward's without, as the
library asks for (use_split_accumulator), but for block scaling, which promotes every block.

Source: TransformerEngine 2.20; see te_operands for the quantizers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.precision.emulation.formats import E4M3, Format, round_within_range
from runner.precision.emulation.quantizers import amax_scale, join_scale
from runner.precision.emulation.te_operands import (
    Operand,
    Operands,
    grad_format,
    quantizers_of_recipe,
)
from runner.precision.te_recipes import Accumulation


class Autocast:
    """Context in which the layers quantize, as te.autocast. It can be entered again, and nested.

    Args:
        enabled: must be true; the parameter is the library's.
        recipe: as the config gives it: its kind and all of its keys.
        accumulate: how products are summed; the library has no such parameter.
    """

    # The open contexts, the innermost last.
    active: ClassVar[list["Autocast"]] = []

    def __init__(
        self, enabled: bool, recipe: Mapping[str, Any], accumulate: Accumulation = "float32"
    ) -> None:
        assert enabled
        self.recipe = recipe
        self.narrow = accumulate == "hopper"
        self.operands: Operands | None = None
        if recipe["kind"] != "delayed":
            self.operands = quantizers_of_recipe(recipe, accumulate)

    def __enter__(self) -> None:
        self.active.append(self)

    def __exit__(self, *error: object) -> None:
        self.active.pop()


autocast = Autocast  # the library's name


class LayerNorm(nn.LayerNorm):
    """A layer norm with te.LayerNorm's name: the library's computes the same, unquantized."""


class DelayedScalingState:
    """The scales and amax histories of delayed scaling, for the tensors of one direction.

    Attributes:
        scale: [tensors], float32.
        amax_history: [steps, tensors], float32. The first row is the current step, the others are
            past steps, the latest last.
    """

    def __init__(self, steps: int, tensors: int, device: torch.device) -> None:
        self.scale = torch.ones(tensors, dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(steps, tensors, dtype=torch.float32, device=device)

    def quantize(self, x: Tensor, tensor: int, fmt: Format, keeps_scales: bool = False) -> Tensor:
        """Return a tensor quantized with the scale of past steps, and record its amax.

        Args:
            x: float32, any shape.
            tensor: index of the tensor's scale.
            fmt: of the quantized values.
            keeps_scales: whether values and inverse scales are returned apart.

        Returns:
            float32 of x's shape, or [2, *x's shape].
        """
        current_amax = self.amax_history[0, tensor]  # a view
        current_amax.copy_(torch.maximum(current_amax, x.abs().amax()))
        scale = self.scale[tensor]
        codes = round_within_range(x * scale, fmt)
        return join_scale(codes, scale.reciprocal(), keeps_scales)

    def advance(self, fmt: Format, recipe: Mapping[str, Any]) -> None:
        """Compute the next scales from the history and start its next row; call it after a step."""
        most_recent = recipe["amax_compute_algo"] == "most_recent"
        amax = self.amax_history[0] if most_recent else self.amax_history.amax(0)
        scale = amax_scale(amax, fmt) / 2 ** recipe["margin"]
        # A tensor of zeros, inf or NaN says nothing about the next step: its scale stays.
        usable = (amax > 0) & amax.isfinite()
        self.scale = torch.where(usable, scale, self.scale)
        self.amax_history = self.amax_history.roll(-1, 0)
        self.amax_history[0] = 0


class Linear(nn.Module):
    """A linear layer as te.Linear: float [..., in] to the same dtype [..., out].

    With delayed scaling, a layer that is called twice in a step updates its scales twice.
    """

    weight: Tensor
    bias: Tensor | None
    weight_names: Sequence[str] = ("weight",)  # of the attributes that hold the weight, [out, in]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        params_dtype: torch.dtype,
        device: str,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        options = {"dtype": params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **options))
        self.bias = nn.Parameter(torch.empty(out_features, **options)) if bias else None
        self.fp8_meta: dict[str, Any] = {}

    def forward(self, input: Tensor) -> Tensor:
        weight = getattr(self, self.weight_names[0])
        if not Autocast.active:
            return F.linear(input, weight, self.bias)
        context = Autocast.active[-1]
        quantizers = context.operands or self._delayed_operands(context)
        rows = input.reshape(-1, self.in_features)
        output: Tensor = _LinearProducts.apply(rows, weight, self.bias, quantizers)  # type: ignore[assignment]
        # An evaluation does not change the scales.
        if context.operands is None and torch.is_grad_enabled():
            self.fp8_meta["scaling_fwd"].advance(E4M3, context.recipe)
        return output.reshape(*input.shape[:-1], self.out_features)

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        """Return whether there are scales and histories; the name is the library's."""
        return bool(self.fp8_meta)

    def init_fp8_meta_tensors(self, recipe: Mapping[str, Any]) -> None:
        """Set scales of 1 and empty histories of the forward's and the backward's tensors.

        As in the library, the forward's are input, weight and output, the backward's the gradients
        of output and input.
        """
        steps = recipe["amax_history_len"]
        device = self.weight.device
        self.fp8_meta["scaling_fwd"] = DelayedScalingState(steps, 3, device)
        self.fp8_meta["scaling_bwd"] = DelayedScalingState(steps, 2, device)

    def get_fp8_meta_tensors(self) -> dict[str, list[Tensor]] | None:
        """Return copies of scales and histories by direction; None before there are any."""
        if not self.fp8_meta:
            return None
        return {
            key: [state.scale.clone(), state.amax_history.clone()]
            for key, state in self.fp8_meta.items()
            if isinstance(state, DelayedScalingState)
        }

    def reset_fp8_meta_tensors(self, tensors: Mapping[str, list[Tensor]] | None = None) -> None:
        """Restore scales and histories from get_fp8_meta_tensors; remove them without an
        argument."""
        if tensors is None:
            self.fp8_meta.clear()
            return
        for key, (scale, history) in tensors.items():
            state = self.fp8_meta[key]
            state.scale = scale.to(self.weight.device, copy=True)
            state.amax_history = history.to(self.weight.device, copy=True)

    def _delayed_operands(self, context: Autocast) -> Operands:
        """Return quantizers that scale by past steps and record this one."""
        recipe = context.recipe
        if not self.fp8_meta:
            self.init_fp8_meta_tensors(recipe)
        forward = self.fp8_meta["scaling_fwd"]
        backward = self.fp8_meta["scaling_bwd"]
        backward_format = grad_format(recipe)

        def quantize_grad(x: Tensor) -> Tensor:
            quantized = backward.quantize(x, 0, backward_format, context.narrow)
            backward.advance(backward_format, recipe)
            return quantized

        return Operands(
            Operand(lambda x: forward.quantize(x, 0, E4M3, context.narrow)),
            Operand(lambda x: forward.quantize(x, 1, E4M3, context.narrow)),
            Operand(quantize_grad),
            narrow=context.narrow,
        )


class LayerNormLinear(Linear):
    """A layer norm and the linear layer after it in one, as te.LayerNormLinear.

    A subclass holds the norm's weight and bias.
    """

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor

    def __init__(self, in_features: int, out_features: int, eps: float, **keywords: Any) -> None:
        super().__init__(in_features, out_features, **keywords)
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        normalised = F.layer_norm(
            input, (self.in_features,), self.layer_norm_weight, self.layer_norm_bias, self.eps
        )
        return super().forward(normalised)


class _LinearProducts(torch.autograd.Function):
    """A linear layer's three products on quantized operands: output and two gradients.

    rows [rows, in], weight [out, in], bias [out] to [rows, out] in the rows' dtype.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, quantizers: Operands
    ) -> Tensor:
        inputs, inputs_for_grad = quantizers.input.quantize(rows.float())
        weights, weights_for_grad = quantizers.weight.quantize(weight.float())
        output = quantizers.forward_product(inputs, weights)
        if bias is not None:
            output += bias.float()
        if quantizers.backward == "high_precision":
            saved = rows, weight
        elif quantizers.backward == "dequantized":
            saved = (
                quantizers.values(inputs).to(rows.dtype),
                quantizers.values(weights).to(weight.dtype),
            )
        else:
            saved = inputs_for_grad, weights_for_grad
        ctx.save_for_backward(*saved)
        ctx.quantizers = quantizers
        ctx.has_bias = bias is not None
        ctx.input_dtype = rows.dtype
        ctx.weight_dtype = weight.dtype
        return output.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        inputs, weights = (saved.float() for saved in ctx.saved_tensors)
        wide = grad.float()
        if ctx.quantizers.backward:
            grad_for_input = wide
            grad_for_weight = wide
        else:
            grad_for_input, grad_for_weight = ctx.quantizers.grad.quantize(wide)
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        multiply = ctx.quantizers.backward_product
        input_grad = weight_grad = bias_grad = None
        if wants_input:
            input_grad = multiply(grad_for_input, weights.mT).to(ctx.input_dtype)
        if wants_weight:
            weight_grad = multiply(grad_for_weight.mT, inputs.mT).to(ctx.weight_dtype)
        if ctx.has_bias and wants_bias:
            bias_grad = wide.sum(0).to(ctx.weight_dtype)
        return input_grad, weight_grad, bias_grad, None
