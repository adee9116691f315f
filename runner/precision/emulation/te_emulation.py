"""Emulate TransformerEngine's layers and recipes in float32, for machines without its hardware.

The module has the part of transformer_engine.pytorch that the runner uses, under the same names, so
that it can take the library's place. What the library's layers compute in FP8 or FP4 is rounded to
that format. Products accumulate in float32 or, with accumulate="hopper", in the 14 bits of Hopper's
tensor cores: the backward's with promotion every 128 elements, the forward's without, as the
library asks for (use_split_accumulator), but for block scaling, which promotes every block.

Source: TransformerEngine 2.20; see formats for the scaling rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.precision.emulation.formats import (
    E4M3,
    E5M2,
    BlockQuantizer,
    Format,
    Nvfp4Quantizer,
    Quantizer,
    amax_scale,
    exponent_scale,
    join_scale,
    power_of_two,
    power_of_two_scale,
    round_within_range,
)
from runner.precision.te_recipes import Accumulation, complete_recipe

GROUP = 32
"""Products that are added at once: the contracted elements of an FP8 instruction (wgmma)."""
FRACTION_BITS = 13
PROMOTION = 128
"""Elements after which partial sums are added to a float32 number where they are promoted."""
_FLOAT32_FRACTION_BITS = 23
_MAX_PRODUCTS = 1 << 23  # of one temporary tensor: 32 MiB


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
        """Return the values for each product, both float32 [rows, columns].

        Quantizers that keep the scales give both a first dimension of two.
        """
        for_columns = self.along_columns(x)
        if self.along_rows is None:
            return for_columns, for_columns
        return for_columns, self.along_rows(x.t()).mT


@dataclass(frozen=True)
class Operands:
    """The quantizers of a layer's products.

    Attributes:
        input: of [rows, in].
        weight: of [out, in].
        grad: of the output's gradient, [rows, out].
        backward: the recipe's key backward_override: None quantizes the backward's operands,
            "high_precision" takes the unquantized ones, "dequantized" those of the forward.
        narrow: whether products are summed as on Hopper; the quantizers then keep the scales.
        promotes_forward: whether a narrow forward promotes its sums, as the backward does.
    """

    input: Operand
    weight: Operand
    grad: Operand
    backward: str | None = None
    narrow: bool = False
    promotes_forward: bool = False

    def product(self, a: Tensor, b: Tensor, is_backward: bool = False) -> Tensor:
        """Return a times b transposed, of quantized operands or of those of the backward: float32
        [rows, columns]."""
        if not self.narrow or (is_backward and self.backward):
            return a @ b.mT
        return scaled_product(a, b, is_backward or self.promotes_forward)

    def values(self, operand: Tensor) -> Tensor:
        """Return the values of a quantized operand: float32 [rows, columns]."""
        return operand.prod(0) if self.narrow else operand


def quantizers_of_recipe(
    recipe: Mapping[str, Any], accumulate: Accumulation = "float32"
) -> Operands:
    """Return the quantizers of a recipe whose scales depend on the current tensors alone.

    Args:
        recipe: its kind (any but delayed) and its keys; omitted keys have their defaults.
        accumulate: how products are summed; "hopper" for the kinds current and block.
    """
    keys = complete_recipe(recipe)
    kind = keys["kind"]
    narrow = accumulate == "hopper"
    if kind == "nvfp4":
        quantizers = _nvfp4_operands(keys)
    elif kind == "current":
        # One scale for each tensor.
        rule = power_of_two_scale if keys["use_power_2_scales"] else amax_scale
        forward = Operand(BlockQuantizer(E4M3, rule, keeps_scales=narrow))
        grad = Operand(BlockQuantizer(grad_format(keys), rule, keeps_scales=narrow))
        quantizers = Operands(forward, forward, grad)
    elif kind == "mxfp8":
        # Blocks of 32 values, or weights in blocks of 32 x 32.
        line = BlockQuantizer(E4M3, exponent_scale, (1, 32))
        quantizers = _block_operands(line, keys, (1, 2 if keys["enable_2d_quantization"] else 1, 1))
    else:
        # Blocks of 128 values or of 128 x 128. Each has its own scale, so that narrow sums are
        # promoted after every block.
        rule = amax_scale if keys["use_f32_scales"] else power_of_two_scale
        line = BlockQuantizer(E4M3, rule, (1, 128), narrow)
        dimensions = [keys[f"{operand}_block_scaling_dim"] for operand in ("x", "w", "grad")]
        quantizers = replace(_block_operands(line, keys, dimensions), promotes_forward=True)
    return replace(quantizers, backward=keys["backward_override"], narrow=narrow)


def grad_format(keys: Mapping[str, Any]) -> Format:
    """Return a recipe's format of gradients: E5M2 has the range that they need, E4M3 the
    precision."""
    return E5M2 if keys.get("format") == "HYBRID" else E4M3


def _block_operands(
    line: BlockQuantizer, keys: Mapping[str, Any], dimensions: Sequence[int]
) -> Operands:
    """Return quantizers of input, weight and gradient in lines along what is contracted, or in
    square blocks where the dimensions are 2; the line quantizes to E4M3."""
    edge = line.shape[1]  # type: ignore[index]
    operands = []
    for fmt, count in zip((E4M3, E4M3, grad_format(keys)), dimensions, strict=True):
        along = replace(line, fmt=fmt)
        square = replace(along, shape=(edge, edge))
        operands.append(Operand(square) if count == 2 else Operand(along, along))
    return Operands(*operands)


def _nvfp4_operands(keys: Mapping[str, Any]) -> Operands:
    """Return NVFP4: lines of 16 values, or weights in blocks of 16 x 16.

    The Hadamard transform is for the weight's gradient, whose product contracts the rows of the
    input and of the output's gradient; only gradients are rounded stochastically.
    """
    rotates = not keys["disable_rht"]
    line = Nvfp4Quantizer()
    square = Operand(Nvfp4Quantizer((16, 16)))
    weight = Operand(line, line) if keys["disable_2d_quantization"] else square
    grad = Nvfp4Quantizer(stochastic=not keys["disable_stochastic_rounding"])
    return Operands(
        Operand(line, replace(line, rotates=rotates)),
        weight,
        Operand(grad, replace(grad, rotates=rotates)),
    )


def scaled_product(a: Tensor, b: Tensor, promotes: bool) -> Tensor:
    """Return the product of two scaled operands, a times b transposed, with Hopper's sums.

    32 products are exact. They and the accumulator are shifted to the largest exponent among
    them, cut off 13 bits below the leading one and added, and the sum is cut off to 13 bits of
    fraction. The exponent of a product is the sum of its operands' exponents: that of 1.5 * 1.5
    is 0.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.5.2, and Insights into DeepSeek-V3,
    arXiv:2505.09343, section 3.1.1 (32 products, 13 bits of fraction, an accumulator of as
    many); Khattak and Mikaitis, Accurate Models of NVIDIA Tensor Cores, arXiv:2512.07004 (the
    exponent of a product). Bit by bit the results are those of an H100 and an H200 that are
    published with the last paper, 5,000 for each of E4M3 and E5M2; all of them start from an
    accumulator of zero. That the accumulator is shifted together with the products is measured
    on an L40S alone, which adds 16 at a time.

    Args:
        a: FP8 values and, in their places, the inverse scales, which are equal in each PROMOTION
            elements of a row: float32 [2, rows, contracted].
        b: float32 [2, columns, contracted], in the same form.
        promotes: whether every PROMOTION elements the sum is scaled and added to a float32 one.
            Without, the inverse scales have to be equal in a whole row.

    Returns:
        float32 [rows, columns].
    """
    rows, contracted = a.shape[1:]
    columns = b.shape[1]
    product = torch.zeros(rows, columns, dtype=torch.float32, device=a.device)
    interval = PROMOTION if promotes else max(contracted, 1)
    height = max(1, _MAX_PRODUCTS // max(1, columns * GROUP))
    for start in range(0, contracted, interval):
        part = slice(start, start + interval)
        inverse = b[1, :, start]
        for top in range(0, rows, height):
            band = slice(top, top + height)
            sums = _narrow_sums(a[0, band, part], b[0, :, part])
            product[band] += sums * a[1, band, start, None] * inverse
    return product


def _narrow_sums(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of FP8 products: float32 [rows, contracted], [columns, contracted] to
    float32 [rows, columns]."""
    sums = a.new_zeros(len(a), len(b))
    for first in range(0, a.shape[1], GROUP):
        left = a[:, None, first : first + GROUP]
        right = b[None, :, first : first + GROUP]
        largest = (power_of_two(left) * power_of_two(right)).amax(-1)
        largest = torch.maximum(largest, power_of_two(sums))
        # Where all products are zero, any unit will do.
        unit = torch.where(largest > 0, largest * 2.0**-FRACTION_BITS, 1.0)
        # Whole numbers of fewer than 24 bits: float32 adds them exactly, in any order.
        units = (left * right / unit[..., None]).trunc_().sum(-1) + (sums / unit).trunc_()
        # Cut off to FRACTION_BITS bits of fraction.
        kept_bits = -(1 << (_FLOAT32_FRACTION_BITS - FRACTION_BITS))
        sums = ((units * unit).view(torch.int32) & kept_bits).view(torch.float32)
    return sums


class Autocast:
    """Context in which the layers quantize, as te.autocast. It can be entered again, and nested.

    Args:
        recipe: as the config gives it: its kind and all of its keys.
        accumulate: how products are summed; the library has no such parameter.
    """

    # The open contexts, the innermost last.
    active: ClassVar[list["Autocast"]] = []

    def __init__(self, recipe: Mapping[str, Any], accumulate: Accumulation = "float32") -> None:
        self.recipe = recipe
        self.narrow = accumulate == "hopper"
        is_delayed = recipe["kind"] == "delayed"
        self.operands = None if is_delayed else quantizers_of_recipe(recipe, accumulate)

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

    def quantize(self, x: Tensor, tensor: int, fmt: Format, keeps_scales: bool) -> Tensor:
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
        output = quantizers.product(inputs, weights)
        if bias is not None:
            output = output + bias.float()
        if quantizers.backward == "high_precision":
            saved = rows, weight
        elif quantizers.backward == "dequantized":
            values = quantizers.values
            saved = values(inputs).to(rows.dtype), values(weights).to(weight.dtype)
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
            grad_for_input = grad_for_weight = wide
        else:
            grad_for_input, grad_for_weight = ctx.quantizers.grad.quantize(wide)
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        multiply = partial(ctx.quantizers.product, is_backward=True)
        input_grad = weight_grad = bias_grad = None
        if wants_input:
            input_grad = multiply(grad_for_input, weights.mT).to(ctx.input_dtype)
        if wants_weight:
            weight_grad = multiply(grad_for_weight.mT, inputs.mT).to(ctx.weight_dtype)
        if ctx.has_bias and wants_bias:
            bias_grad = wide.sum(0).to(ctx.weight_dtype)
        return input_grad, weight_grad, bias_grad, None
