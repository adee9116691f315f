"""Emulate TransformerEngine's layers and recipes in float32, for machines without its hardware.

The module has the part of transformer_engine.pytorch that the runner uses, under the same names, so
that it can take the library's place. What the library's layers compute in FP8 or FP4 is rounded to
that format, and products accumulate in float32. On the hardware the forward's FP8 products
accumulate in fewer bits, and the order of summation differs.

Source: TransformerEngine 2.20; see quantizers for the scaling rules.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.precision.emulation.formats import E4M3, E5M2, Format, round_within_range
from runner.precision.emulation.quantizers import (
    BlockQuantizer,
    Nvfp4Quantizer,
    Quantizer,
    ScaleRule,
    amax_scale,
    exponent_scale,
    power_of_two_scale,
)
from runner.precision.te_recipes import complete_recipe


@dataclass(frozen=True)
class Operand:
    """The quantizers of a tensor [rows, columns] for its two products.

    Attributes:
        along_columns: for the product that contracts the columns.
        along_rows: for the product that contracts the rows, applied to the transposed tensor; None
            where that product takes the same quantized values.
    """

    along_columns: Quantizer
    along_rows: Quantizer | None = None

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values for each product, both float32 [rows, columns]."""
        for_columns = self.along_columns(x)
        if self.along_rows is None:
            return for_columns, for_columns
        return for_columns, self.along_rows(x.t()).t()


@dataclass(frozen=True)
class Operands:
    """The quantizers of a layer's products.

    Attributes:
        input: of [rows, in].
        weight: of [out, in].
        grad: of the output's gradient, [rows, out].
        backward: the recipe's key backward_override: None quantizes the backward's operands,
            "high_precision" takes the unquantized ones, "dequantized" those of the forward.
    """

    input: Operand
    weight: Operand
    grad: Operand
    backward: str | None = None


def quantizers_of_recipe(recipe: Mapping[str, Any]) -> Operands:
    """Return the quantizers of a recipe whose scales depend on the current tensors alone.

    Args:
        recipe: its kind (any but delayed) and its keys; omitted keys have their defaults.
    """
    keys = complete_recipe(recipe)
    kind = keys["kind"]
    if kind == "nvfp4":
        quantizers = _nvfp4_operands(keys)
    elif kind == "current":
        quantizers = _tensor_operands(keys)
    elif kind == "mxfp8":
        quantizers = _mxfp8_operands(keys)
    else:
        quantizers = _block_operands(keys)
    return replace(quantizers, backward=keys["backward_override"])


def _grad_format(keys: Mapping[str, Any]) -> Format:
    """Return the format of gradients: E5M2 has the range that they need, E4M3 the precision."""
    return E5M2 if keys.get("format") == "HYBRID" else E4M3


def _tensor_operands(keys: Mapping[str, Any]) -> Operands:
    """Return current scaling: one scale for each tensor."""
    rule = power_of_two_scale if keys["use_power_2_scales"] else amax_scale
    forward = Operand(BlockQuantizer(E4M3, rule))
    return Operands(forward, forward, Operand(BlockQuantizer(_grad_format(keys), rule)))


def _mxfp8_operands(keys: Mapping[str, Any]) -> Operands:
    """Return MXFP8: blocks of 32 values, or weights in blocks of 32 x 32."""
    weight_dimensions = 2 if keys["enable_2d_quantization"] else 1
    return Operands(
        _block_operand(E4M3, exponent_scale, 1, 32),
        _block_operand(E4M3, exponent_scale, weight_dimensions, 32),
        _block_operand(_grad_format(keys), exponent_scale, 1, 32),
    )


def _block_operands(keys: Mapping[str, Any]) -> Operands:
    """Return block scaling: blocks of 128 values or of 128 x 128."""
    rule = amax_scale if keys["use_f32_scales"] else power_of_two_scale
    return Operands(
        _block_operand(E4M3, rule, keys["x_block_scaling_dim"], 128),
        _block_operand(E4M3, rule, keys["w_block_scaling_dim"], 128),
        _block_operand(_grad_format(keys), rule, keys["grad_block_scaling_dim"], 128),
    )


def _block_operand(fmt: Format, rule: ScaleRule, dimensions: int, edge: int) -> Operand:
    """Return the quantizers of a tensor in square blocks or in lines along what is contracted."""
    if dimensions == 2:
        return Operand(BlockQuantizer(fmt, rule, (edge, edge)))
    line = BlockQuantizer(fmt, rule, (1, edge))
    return Operand(line, line)


def _nvfp4_operands(keys: Mapping[str, Any]) -> Operands:
    """Return NVFP4: lines of 16 values, or weights in blocks of 16 x 16.

    The Hadamard transform is for the weight's gradient, whose product contracts the rows of the
    input and of the output's gradient; only gradients are rounded stochastically.
    """
    rotates = not keys["disable_rht"]
    line = Nvfp4Quantizer()
    if keys["disable_2d_quantization"]:
        weight = Operand(line, line)
    else:
        weight = Operand(Nvfp4Quantizer((16, 16)))
    grad = Nvfp4Quantizer(stochastic=not keys["disable_stochastic_rounding"])
    return Operands(
        Operand(line, replace(line, rotates=rotates)),
        weight,
        Operand(grad, replace(grad, rotates=rotates)),
    )


class Autocast:
    """Context in which the layers quantize. It can be entered again, and nested."""

    # The open contexts, the innermost last.
    active: ClassVar[list["Autocast"]] = []

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self.recipe = recipe
        self.operands = None if recipe["kind"] == "delayed" else quantizers_of_recipe(recipe)

    def __enter__(self) -> None:
        self.active.append(self)

    def __exit__(self, *error: object) -> None:
        self.active.pop()


def autocast(enabled: bool, recipe: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return a context as te.autocast does, of a recipe as the config gives it.

    Args:
        enabled: must be true; the parameter is the library's.
        recipe: its kind and all of its keys.
    """
    assert enabled
    return Autocast(recipe)


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

    def quantize(self, x: Tensor, tensor: int, fmt: Format) -> Tensor:
        """Return a tensor quantized with the scale of past steps, and record its amax.

        Args:
            x: float32, any shape.
            tensor: index of the tensor's scale.
            fmt: of the quantized values.

        Returns:
            float32 of x's shape.
        """
        current_amax = self.amax_history[0, tensor]  # a view
        current_amax.copy_(torch.maximum(current_amax, x.abs().amax()))
        scale = self.scale[tensor]
        return round_within_range(x * scale, fmt).mul_(scale.reciprocal())

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
        quantizers = context.operands or self._delayed_operands(context.recipe)
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
            state.scale = scale.to(self.weight.device)
            state.amax_history = history.to(self.weight.device)

    def _delayed_operands(self, recipe: Mapping[str, Any]) -> Operands:
        """Return quantizers that scale by past steps and record this one."""
        if not self.fp8_meta:
            self.init_fp8_meta_tensors(recipe)
        forward = self.fp8_meta["scaling_fwd"]
        backward = self.fp8_meta["scaling_bwd"]
        grad_format = _grad_format(recipe)

        def quantize_input(x: Tensor) -> Tensor:
            return forward.quantize(x, 0, E4M3)

        def quantize_weight(x: Tensor) -> Tensor:
            return forward.quantize(x, 1, E4M3)

        def quantize_grad(x: Tensor) -> Tensor:
            quantized = backward.quantize(x, 0, grad_format)
            backward.advance(grad_format, recipe)
            return quantized

        return Operands(Operand(quantize_input), Operand(quantize_weight), Operand(quantize_grad))


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
        output = inputs @ weights.t()
        if bias is not None:
            output += bias.float()
        if quantizers.backward == "high_precision":
            saved = rows, weight
        elif quantizers.backward == "dequantized":
            saved = inputs.to(rows.dtype), weights.to(weight.dtype)
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
        input_grad = weight_grad = bias_grad = None
        if wants_input:
            input_grad = (grad_for_input @ weights).to(ctx.input_dtype)
        if wants_weight:
            weight_grad = (grad_for_weight.t() @ inputs).to(ctx.weight_dtype)
        if ctx.has_bias and wants_bias:
            bias_grad = wide.sum(0).to(ctx.weight_dtype)
        return input_grad, weight_grad, bias_grad, None
