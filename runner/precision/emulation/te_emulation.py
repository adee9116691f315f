"""TransformerEngine's layers and recipes in float32 arithmetic, for machines without its hardware.

The part of transformer_engine.pytorch that the runner uses, under the same names: what its layers
hold in FP8 or FP4 is rounded to that format, and products accumulate in float32. On the hardware
the forward's FP8 products accumulate in fewer bits, and the order of summation is another.
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
    Rule,
    amax_scale,
    exponent_scale,
    power_of_two_scale,
)
from runner.precision.te_recipes import complete_recipe


@dataclass(frozen=True)
class Operand:
    """How a tensor [rows, columns] is quantized for its two products.

    Attributes:
        along: for the product that contracts its columns.
        across: for the one that contracts its rows, of the transposed; None where the first serves.
    """

    along: Quantizer
    across: Quantizer | None = None

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        along = self.along(x)
        return along, along if self.across is None else self.across(x.t()).t()


@dataclass(frozen=True)
class Operands:
    """Of a layer's products: the input [rows, in], the weight [out, in] and the output's gradient
    [rows, out]; backward as the recipe's key backward_override."""

    input: Operand
    weight: Operand
    grad: Operand
    backward: str | None = None


def operands(recipe: Mapping[str, Any]) -> Operands:
    """What a recipe without a memory does.

    Args:
        recipe: its kind and its keys, those that are left out at their defaults.
    """
    keys = complete_recipe(recipe)
    kind, backward = keys["kind"], keys["backward_override"]
    low = E5M2 if keys.get("format") == "HYBRID" else E4M3
    if kind == "nvfp4":
        return replace(_nvfp4(keys), backward=backward)
    if kind == "current":
        rule = power_of_two_scale if keys["use_power_2_scales"] else amax_scale
        wide, narrow = Operand(BlockQuantizer(E4M3, rule)), Operand(BlockQuantizer(low, rule))
        return Operands(wide, wide, narrow, backward)
    if kind == "mxfp8":
        square = 2 if keys["enable_2d_quantization"] else 1
        dims, edge, rule = (1, square, 1), 32, exponent_scale
    else:
        dims = tuple(keys[f"{part}_block_scaling_dim"] for part in ("x", "w", "grad"))
        edge, rule = 128, amax_scale if keys["use_f32_scales"] else power_of_two_scale
    x, weight, grad = dims
    return Operands(
        _blocks(E4M3, rule, x, edge),
        _blocks(E4M3, rule, weight, edge),
        _blocks(low, rule, grad, edge),
        backward,
    )


def _blocks(fmt: Format, rule: Rule, dim: int, edge: int) -> Operand:
    if dim == 2:
        return Operand(BlockQuantizer(fmt, rule, (edge, edge)))
    line = BlockQuantizer(fmt, rule, (1, edge))
    return Operand(line, line)


def _nvfp4(keys: Mapping[str, Any]) -> Operands:
    turns, random = not keys["disable_rht"], not keys["disable_stochastic_rounding"]
    line = Nvfp4Quantizer()
    weight = (
        Operand(line, line)
        if keys["disable_2d_quantization"]
        else Operand(Nvfp4Quantizer((16, 16)))
    )
    grad = Nvfp4Quantizer(stochastic=random)
    return Operands(
        Operand(line, replace(line, rotates=turns)),
        weight,
        Operand(grad, replace(grad, rotates=turns)),
    )


class Autocast:
    """Context in which the layers quantize; it serves again, and nests."""

    entered: ClassVar[list["Autocast"]] = []

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self.recipe = recipe
        self.operands = None if recipe["kind"] == "delayed" else operands(recipe)

    def __enter__(self) -> None:
        self.entered.append(self)

    def __exit__(self, *error: object) -> None:
        self.entered.pop()


def autocast(enabled: bool, recipe: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """As te.autocast, but the recipe is what the config says."""
    assert enabled
    return Autocast(recipe)


class LayerNorm(nn.LayerNorm):
    """As te.LayerNorm."""


class DelayedScalingState:
    """Of delayed scaling, for the tensors of one direction.

    Attributes:
        scale: [tensors], float32.
        amax_history: [steps, tensors], float32. The first row is the step under way, the others
            are past steps, the latest last.
    """

    def __init__(self, steps: int, tensors: int, device: torch.device) -> None:
        self.scale = torch.ones(tensors, dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(steps, tensors, dtype=torch.float32, device=device)

    def quantize(self, x: Tensor, tensor: int, fmt: Format) -> Tensor:
        """By the scale of past steps; the amax goes into the history."""
        now = self.amax_history[0, tensor]
        now.copy_(torch.maximum(now, x.abs().amax()))
        scale = self.scale[tensor]
        return round_within_range(x * scale, fmt).mul_(scale.reciprocal())

    def advance(self, fmt: Format, recipe: Mapping[str, Any]) -> None:
        """At the end of a step: the next scales."""
        latest = recipe["amax_compute_algo"] == "most_recent"
        amax = self.amax_history[0] if latest else self.amax_history.amax(0)
        scale = amax_scale(amax, fmt) / 2 ** recipe["margin"]
        known = (amax > 0) & amax.isfinite()
        self.scale = torch.where(known, scale, self.scale)
        self.amax_history = self.amax_history.roll(-1, 0)
        self.amax_history[0] = 0


class Linear(nn.Module):
    """As te.Linear. A layer that is called twice in a step moves its scales twice."""

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
        self.in_features, self.out_features = in_features, out_features
        made = {"dtype": params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **made))
        self.bias = nn.Parameter(torch.empty(out_features, **made)) if bias else None
        self.fp8_meta: dict[str, Any] = {}

    def forward(self, input: Tensor) -> Tensor:
        weight = getattr(self, self.weight_names[0])
        if not Autocast.entered:
            return F.linear(input, weight, self.bias)
        context = Autocast.entered[-1]
        how = context.operands or self._delayed(context.recipe)
        rows = input.reshape(-1, self.in_features)
        output: Tensor = _Products.apply(rows, weight, self.bias, how)  # type: ignore[assignment]
        if context.operands is None and torch.is_grad_enabled():
            self.fp8_meta["scaling_fwd"].advance(E4M3, context.recipe)
        return output.reshape(*input.shape[:-1], self.out_features)

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        return bool(self.fp8_meta)

    def init_fp8_meta_tensors(self, recipe: Mapping[str, Any]) -> None:
        """Scales of 1 and empty histories: of input, weight and output, and of their gradients."""
        steps, device = recipe["amax_history_len"], self.weight.device
        self.fp8_meta["scaling_fwd"] = DelayedScalingState(steps, 3, device)
        self.fp8_meta["scaling_bwd"] = DelayedScalingState(steps, 2, device)

    def get_fp8_meta_tensors(self) -> dict[str, list[Tensor]] | None:
        """Copies of scales and histories; None before there are any."""
        if not self.fp8_meta:
            return None
        return {
            key: [held.scale.clone(), held.amax_history.clone()]
            for key, held in self.fp8_meta.items()
            if isinstance(held, DelayedScalingState)
        }

    def reset_fp8_meta_tensors(self, tensors: Mapping[str, list[Tensor]] | None = None) -> None:
        """Back to what was given; to the beginning without."""
        if tensors is None:
            self.fp8_meta.clear()
            return
        for key, (scale, history) in tensors.items():
            memory, device = self.fp8_meta[key], self.weight.device
            memory.scale, memory.amax_history = scale.to(device), history.to(device)

    def _delayed(self, recipe: Mapping[str, Any]) -> Operands:
        if not self.fp8_meta:
            self.init_fp8_meta_tensors(recipe)
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        low = E5M2 if recipe["format"] == "HYBRID" else E4M3

        def grad(x: Tensor) -> Tensor:
            quantized = backward.quantize(x, 0, low)
            backward.advance(low, recipe)
            return quantized

        input, weight = (lambda x, i=i: forward.quantize(x, i, E4M3) for i in (0, 1))
        return Operands(Operand(input), Operand(weight), Operand(grad))


class LayerNormLinear(Linear):
    """As te.LayerNormLinear."""

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor

    def __init__(self, in_features: int, out_features: int, eps: float, **keywords: Any) -> None:
        super().__init__(in_features, out_features, **keywords)
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        shape = (self.in_features,)
        parts = self.layer_norm_weight, self.layer_norm_bias
        return super().forward(F.layer_norm(input, shape, *parts, self.eps))


class _Products(torch.autograd.Function):
    """A linear layer's three products."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, how: Operands
    ) -> Tensor:
        inputs, inputs_across = how.input.both(rows.float())
        weights, weights_across = how.weight.both(weight.float())
        output = inputs @ weights.t()
        if bias is not None:
            output += bias.float()
        if how.backward == "high_precision":
            kept = rows, weight
        elif how.backward == "dequantized":
            kept = inputs.to(rows.dtype), weights.to(weight.dtype)
        else:
            kept = inputs_across, weights_across
        ctx.save_for_backward(*kept)
        ctx.how, ctx.biased, ctx.dtypes = how, bias is not None, (rows.dtype, weight.dtype)
        return output.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        inputs, weights = (held.float() for held in ctx.saved_tensors)
        wide = grad.float()
        along, across = (wide, wide) if ctx.how.backward else ctx.how.grad.both(wide)
        wants, (dtype, stored) = ctx.needs_input_grad, ctx.dtypes
        return (
            (along @ weights).to(dtype) if wants[0] else None,
            (across.t() @ inputs).to(stored) if wants[1] else None,
            wide.sum(0).to(stored) if ctx.biased and wants[2] else None,
            None,
        )
