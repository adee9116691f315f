"""float8-* and torchao-mxfp8: torchao's FP8 training products in a bfloat16 model.

torchao's Float8Linear, or a layer around its product in MXFP8, replaces nn.Linear and Conv1D, and
scales its operands anew in every step.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from runner.core import Unavailable, accelerators, refuse, terminal
from runner.precision import devices, options
from runner.precision.base import FP8_LAYERS, ConvertingPrecision
from runner.precision.casting import autocast_input
from runner.precision.conversion import change_class, layer_class, replace_in_place
from runner.precision.layers.backward_checks import forbid_second_derivative, pad_rows
from runner.precision.layers.conv1d import is_transposed, layer_widths

NAME_BY_RECIPE = {
    "tensorwise": "float8-tensorwise",
    "rowwise": "float8-rowwise",
    "rowwise_with_gw_hp": "float8-rowwise-hp",
    "mxfp8_rceil": "torchao-mxfp8",
    "mxfp8_rceil_wgrad_with_hp": "torchao-mxfp8",
}
WEIGHT_DTYPES = ("float32", "bfloat16")
SCALED_MM_MULTIPLE = 16  # of every dimension that torch._scaled_mm takes
MXFP8_MULTIPLE = 32  # numbers that share a scale, along any dimension that a product contracts


@final
@dataclass(frozen=True, eq=False)
class Float8Precision(ConvertingPrecision):
    """torchao's FP8 products for nn.Linear and Conv1D, bfloat16 elsewhere.

    A converted layer scales activations, weights and output gradients to FP8 anew in every step
    and accumulates its products in float32; weights stay in float32 or bfloat16.

    Args beside those of ConvertingPrecision:
        recipe: torchao's: tensorwise (one scale per tensor, gradients in e5m2), rowwise (a scale
            per row, a power of two, all in e4m3), rowwise_with_gw_hp (the same, but the weight
            gradient in bfloat16), mxfp8_rceil (a power of two per 32 numbers along the contracted
            dimension, all in e4m3) or mxfp8_rceil_wgrad_with_hp.
        weights: float32 (bfloat16 compute through autocast) or bfloat16 (everything in it).
        emulate: round to FP8 and multiply in float32, on any device. Its losses are those of the
            hardware up to the order of summation; its speed means nothing.
        min_features: the least input or output width of a layer that is converted.
        float32_matmul: precision of the float32 products that remain.

    Raises:
        ConfigError: a value that is not allowed.

    Source: torchao.float8 (github.com/pytorch/ao, torchao/float8/README.md), and for MXFP8
    torchao.prototype.moe_training, whose recipes have these names.
    """

    layers_compute_in = "FP8"
    layer_formats = FP8_LAYERS
    sort_key = (-1, 1)  # type: ignore[assignment]  # after TransformerEngine's
    recipe: str
    weights: str = "float32"
    emulate: bool = False
    min_features: int = SCALED_MM_MULTIPLE
    float32_matmul: str = "highest"

    def __post_init__(self) -> None:
        problems = options.choice_problems("recipe", self.recipe, NAME_BY_RECIPE)
        problems += options.choice_problems("weights", self.weights, WEIGHT_DTYPES)
        problems += options.name_problems(self.name, "recipe", self.recipe, NAME_BY_RECIPE)
        problems += options.switch_problems(emulate=self.emulate)
        # By its type, because a bool is an int to isinstance.
        if type(self.min_features) is not int or self.min_features < 1:
            problems.append(
                f"precision.min_features={self.min_features} must be a whole number from 1."
            )
        refuse(problems + self._product_problems())
        self._derive(
            storage=options.DTYPES[self.weights],
            compute=torch.bfloat16,
            # torchao emulates its products itself, and the others are native.
            emulated=self.emulate,
        )

    @property
    def _is_mx(self) -> bool:
        return self.recipe.startswith("mxfp8")

    @property
    def _multiple(self) -> int:
        return MXFP8_MULTIPLE if self._is_mx else SCALED_MM_MULTIPLE

    @property
    def capabilities(self) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """Return the lowest compute capability of its kernels, and the lowest above them.

        Ada has both of torch's kernels: per tensor in cuBLASLt, per row in CUTLASS
        (pytorch/pytorch, aten/src/ATen/native/cuda/RowwiseScaledMM.cu). torchao's kernels that
        round to MXFP8 are compiled for 10.0 to 10.3.
        """
        return ((10, 0), (11, 0)) if self._is_mx else ((8, 9), None)

    def require(self, device: torch.device) -> None:
        where_and_why = ""
        if device.type == "mps":
            # It lacks the float64 in which scales are computed, too.
            where_and_why = "mps, not even emulated: it has no FP8 dtypes"
        elif accelerators.is_tpu(device):
            where_and_why = "a TPU, not even emulated: its recipes are those of NVIDIA GPUs"
        if where_and_why:
            raise Unavailable(
                f"precision={self.name} cannot run on {where_and_why}.",
                "Type precision=bf16-mixed, or accelerator=cpu precision.emulate=true.",
            )
        # A CPU has these products in some versions of torch, many times slower than float32, which
        # nobody would want unasked.
        if not self.emulated:
            remedy = devices.emulation_remedy(f"{devices.native_half_prefix(device)}-mixed")
            least, limit = self.capabilities
            devices.require_capability(self.name, device, least, remedy, limit)
        devices.require_torchao(self.name)

    def find_obstacle(self, module: nn.Module) -> str:
        into, out = layer_widths(module)
        shape = f"its shape {into} -> {out}"
        # torch._scaled_mm multiplies [m, k] by [k, n] with k and n in multiples of 16. Of a layer's
        # three products the forward contracts over `in` and yields `out`, the input's gradient the
        # reverse, and the weight's contracts over the rows (pad_rows) and
        # yields `in`. Emulation follows the same rule, to convert the layers that hardware would.
        # In MXFP8 each of them is contracted in blocks of 32.
        if out % self._multiple or into % self._multiple:
            return f"{shape} is not in multiples of {self._multiple}"
        if min(out, into) < self.min_features:
            return f"{shape} is below precision.min_features={self.min_features}"
        # The library refuses to convert a layer with children.
        if next(module.children(), None) is not None:
            return "holds modules of its own"
        return ""

    def convert_layer(self, module: nn.Module, device: torch.device) -> None:
        if self._is_mx:
            with terminal.suppress_warnings():
                from runner.precision.layers.mxfp8_linear import KernelPreference, Mxfp8Linear

            change_class(
                module,
                Mxfp8Linear,
                kernels=KernelPreference.EMULATED if self.emulated else KernelPreference.AUTO,
                wgrad_with_hp=self.recipe.endswith("wgrad_with_hp"),
            )
            return
        with terminal.suppress_warnings():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name(self.recipe), emulate=self.emulated)
        plain = module
        mixin: type = Float8Layer
        if is_transposed(module):
            # The library converts an nn.Linear only; the Conv1D's own tensors take its place below.
            plain = nn.Linear(*layer_widths(module), bias=False, device="meta")
            mixin = _Float8Transposed
        # Unlike Float8Linear.from_float this works around a miscompilation of FP8 in Inductor.
        made = convert_to_float8_training(plain, config=config)
        kind = layer_class(f"Float8{type(module).__name__}", mixin, type(made), type(module))
        replace_in_place(module, made, kind)


class Float8Layer:
    """Mixin before Float8Linear that adds autocast on every device and any number of rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype, or autocast's, [..., out]."""
        # The library asks CUDA's autocast only, whatever the device, through a deprecated call.
        rows = autocast_input(input)
        with torch.autocast(input.device.type, enabled=False):
            # The library cannot clone a transposed tensor that it has scaled by rows.
            output = pad_rows(self._product, rows.contiguous(), SCALED_MM_MULTIPLE)
            return forbid_second_derivative(output)

    def _product(self, input: Tensor) -> Tensor:
        """Return the library's product: [rows, in] to [rows, out]."""
        return super().forward(input)  # type: ignore[misc]


class _Float8Transposed(Float8Layer):
    """Mixin before the Float8Linear of a former Conv1D, whose weight is [in, out]."""

    def _product(self: Any, input: Tensor) -> Tensor:
        # The steps of Float8Linear.forward, which itself would transpose the weight.
        library = sys.modules["torchao.float8.float8_linear"]
        product = library.matmul_with_hp_or_float8_args
        output = product.apply(input, self.weight, self.linear_mm_config, self.config)
        return output if self.bias is None else output + self.bias.to(output.dtype)
