"""Replace converted layers by plain torch operations, so that a model can be exported.

The exported model loads without the library that trained it. Weights stay packed, so it is as
small; the outputs are those of an evaluation. The arithmetic follows bitsandbytes' kernels for
4-bit and int8 layers, torchao's float8 emulation for FP8 layers, and weight_formats for the layers
of int4, int8, nvfp4 and qat-*, whose weights are packed here.
"""

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.precision.layers.conv1d import unpacked_matrix, weight_matrix
from runner.precision.layers.weight_formats import WeightFormat

CPU_DEVICE = torch.device("cpu")
_INT8_PRODUCT_STEP = 6.200124e-05  # 1 / 127², as bitsandbytes rounds it


def exportable_copy(model: nn.Module) -> nn.Module:
    """Return a model on the CPU, without converted layers, with the same outputs in evaluation.

    It is the given model where that is on the CPU and has no converted layer, else a copy; the
    given model is not changed.

    Raises:
        NotImplementedError: a layer cannot be computed without its library.
    """
    for name, module in model.named_modules():
        if any(kind.__module__.startswith("transformer_engine") for kind in type(module).__mro__):
            kind = type(module).__name__
            raise NotImplementedError(f"{name} ({kind}) computes with TransformerEngine only")
    tensors = [*model.parameters(), *model.buffers()]
    is_on_cpu = all(tensor.device == CPU_DEVICE for tensor in tensors)
    has_converted_layer = any(_plain_class(module) for module in model.modules())
    if is_on_cpu and not has_converted_layer:
        return model
    # Tensors are copied straight to the CPU: a second model may not fit on the device. Tensors of
    # a library's own classes are copied by their own __deepcopy__.
    memo: dict[int, Any] = {id(t): _cpu_copy(t) for t in tensors if type(t) in _TORCH_TENSORS}
    copied = copy.deepcopy(model, memo)
    # First, because it reads the weights of layers that are replaced.
    for module in list(copied.modules()):
        if hasattr(module, "lora_magnitude_vector"):
            _replace_dora(module)
    for module in list(copied.modules()):
        plain_class = _plain_class(module)
        if plain_class:
            plain_class.convert_in_place(module)
    return copied.to(CPU_DEVICE)


# A subclass may hold more than its numbers, such as the scales of a packed weight.
_TORCH_TENSORS = (Tensor, nn.Parameter)


def _cpu_copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to(CPU_DEVICE)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied


def _plain_class(module: nn.Module) -> Any:
    """Return the class that replaces a converted layer; None for any other layer."""
    # By name: a module that was not imported has made no layer, and need not be imported here.
    replacements = {
        ("runner.precision.layers.linear_4bit", "Linear4bit"): Plain4bit,
        ("runner.precision.layers.linear_8bit", "Linear8bit"): Plain8bit,
        ("runner.precision.layers.linear_8bit", "Linear8bitTrained"): Plain8bit,
        ("torchao.float8.float8_linear", "Float8Linear"): PlainFloat8,
        ("runner.precision.layers.quantized_linear", "QuantizedLinear"): PlainQuantized,
        ("runner.precision.layers.quantized_linear", "FakeQuantizedLinear"): PlainQuantized,
    }
    for (module_name, class_name), plain_class in replacements.items():
        kind = getattr(sys.modules.get(module_name), class_name, None)
        if kind is not None and isinstance(module, kind):
            return plain_class
    return None


def _become(module: Any, kind: type[nn.Module], **buffers: Tensor) -> None:
    """Change a layer's class and put these buffers in the place of its weights.

    Its bias, hooks and mode stay.
    """
    for name in ("weight", "SCB", *getattr(module, "scale_names", ())):
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
    module.__class__ = kind
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor.detach().to(CPU_DEVICE))


class PlainDora(nn.Module):
    """peft's DoRA part of a layer in evaluation, where the norms of the weight's rows are constant.

    It holds the factor [out] of each row: the trained norm over the norm of weight and addition.
    """

    factor: Tensor

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor)

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Module,  # noqa: N803 - the names are peft's
        lora_B: nn.Module,  # noqa: N803
        scaling: float,
        base_layer: Any,
        base_result: Tensor,
        **rest: Any,
    ) -> Tensor:
        """Return what is added to base_result: float [..., in] to float [..., out]."""
        product = base_result if base_layer.bias is None else base_result - base_layer.bias
        return (self.factor - 1) * product + self.factor * lora_B(lora_A(x)) * scaling


@torch.no_grad()
def _replace_dora(layer: Any) -> None:
    """Put a PlainDora in the place of each DoRA part of a layer of peft."""
    for name, dora in list(layer.lora_magnitude_vector.items()):
        up, down = layer.lora_B[name].weight, layer.lora_A[name].weight
        total = unpacked_matrix(layer.get_base_layer()).to(up) + layer.scaling[name] * up @ down
        layer.lora_magnitude_vector[name] = PlainDora(dora.weight / total.norm(dim=1))


class Plain4bit(nn.Module):
    """A Linear4bit in plain operations: float [..., in] to the same dtype [..., out].

    It holds uint8 codes [elements / 2], two in a byte, float32 scales [blocks] and the float32
    table [16] of the values that the codes stand for.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor
    bias: Tensor | None
    compute_dtype: torch.dtype
    shape: tuple[int, ...]
    block: int

    @classmethod
    def convert_in_place(cls, module: Any) -> None:
        """Turn a Linear4bit into a Plain4bit, in place."""
        # Imported here, because a model without such a layer is exported without the library.
        from bitsandbytes.functional import dequantize_blockwise

        state = module.weight.quant_state
        scales = state.absmax
        # Double quantisation: the scales are quantised too, around their mean, the offset.
        if state.nested:
            scales = dequantize_blockwise(scales, state.state2) + state.offset
        codes = module.weight.data.reshape(-1)
        _become(module, cls, codes=codes, scales=scales.float(), table=state.code.float())
        module.shape = tuple(state.shape)
        module.block = state.blocksize

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype [..., out]."""
        # A layer of odd size has half a byte too many, and a last block that is not full.
        count = self.shape[0] * self.shape[1]
        codes = torch.stack((self.codes >> 4, self.codes & 15), -1).view(-1)[:count]
        element_scales = self.scales.repeat_interleave(self.block)[:count]
        weight = (self.table[codes.int()] * element_scales).view(self.shape).to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return F.linear(input.to(self.compute_dtype), weight, bias).to(input.dtype)


class Plain8bit(nn.Module):
    """A Linear8bit or Linear8bitTrained in plain operations: float [..., in] to [..., out].

    It holds int8 codes [out, in] and the largest magnitude of each row, float32 [out].
    """

    codes: Tensor
    largest: Tensor
    bias: Tensor | None
    compute_dtype: torch.dtype
    threshold: float
    relative_step = 2**-5  # between codes, at a quarter of a row's largest value

    @classmethod
    def convert_in_place(cls, module: Any) -> None:
        """Turn a Linear8bit or Linear8bitTrained into a Plain8bit, in place."""
        from runner.precision.layers.linear_8bit import pack_int8

        if module.weight.is_floating_point():
            codes, largest = pack_int8(weight_matrix(module))
        else:
            codes = module.weight.data
            largest = module.SCB
        _become(module, cls, codes=codes, largest=largest)

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype [..., out]."""
        with torch.autocast(input.device.type, enabled=False):
            rows = input.reshape(-1, input.shape[-1]).to(self.compute_dtype)
            output = self._product(rows)
            if self.bias is not None:
                output = output + self.bias.to(self.compute_dtype)
            return output.view(*input.shape[:-1], self.codes.shape[0]).to(input.dtype)

    def _product(self, rows: Tensor) -> Tensor:
        """Return the product of quantised rows and the weight: [rows, in] to [rows, out].

        The rows are quantised to int8 by way of float16, multiplied by a power of two that brings
        them into its range. Columns with an outlier (a magnitude of `threshold` or more) are
        multiplied in the rows' dtype.
        """
        factor = torch.ones((), device=rows.device)
        # A threshold is in the units of the rows.
        if not self.threshold:
            exponent = torch.frexp(rows.abs().amax().float()).exponent
            factor = torch.ldexp(factor, -exponent)
            rows = rows * factor
        half = rows.half()
        outlier = half.abs() >= (self.threshold or torch.inf)
        inner = half.masked_fill(outlier, 0)
        largest = inner.abs().amax(1, keepdim=True).float()
        # A row of zeros would divide by zero.
        codes = torch.round(inner * (127.0 / largest.where(largest > 0, 1.0)))
        outlier_columns = outlier.any(0)
        codes = codes.masked_fill(outlier_columns, 0)
        # Whole numbers in float32: exact to 2^24, and closer than the result's own dtype beyond.
        scales = largest * self.largest
        product = codes.float() @ self.codes.float().t() * scales * _INT8_PRODUCT_STEP
        product = product.to(rows.dtype)
        if self.threshold:
            weight = (self.codes * (self.largest[:, None] / 127)).to(rows.dtype)
            # Rounded once, as in the library.
            product = product.addmm(rows.masked_fill(~outlier_columns, 0), weight.t())
        return product / factor


class PlainFloat8(nn.Module):
    """torchao's Float8Linear in plain operations: float [..., in] to float [..., out].

    It holds the weight as FP8 codes [out, in] and float32 scales, [out, 1] or one. Inputs are
    rounded to FP8 with scales of their own; products are float32's, as in the library's emulation.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    config: Any
    relative_step = torch.finfo(torch.float8_e4m3fn).eps

    @classmethod
    def convert_in_place(cls, module: Any) -> None:
        """Turn a Float8Linear into a PlainFloat8, in place.

        Raises:
            NotImplementedError: its scales are not dynamic.
        """
        config = module.config
        for cast in (config.cast_config_input, config.cast_config_weight):
            if cast.scaling_type.name != "DYNAMIC":
                raise NotImplementedError(f"FP8 with {cast.scaling_type.name} scales")
        codes, scale = _to_float8(weight_matrix(module).detach(), config.cast_config_weight, config)
        _become(module, cls, codes=codes, scale=scale)

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype, or autocast's, [..., out]."""
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        with torch.autocast(device_type, enabled=False):
            codes, scale = _to_float8(input, self.config.cast_config_input, self.config)
            weight = self.codes.float() / self.scale
            output = ((codes.float() / scale) @ weight.t()).to(input.dtype)
            return output if self.bias is None else output + self.bias.to(output.dtype)


def _to_float8(values: Tensor, cast: Any, config: Any) -> tuple[Tensor, Tensor]:
    """Return values as FP8 codes and their scales, float32.

    Args:
        values: float [..., in].
        cast: torchao's CastConfig: the FP8 dtype, and one scale for all or one for each row.
        config: torchao's Float8LinearConfig.
    """
    by_row = cast.scaling_granularity.name == "AXISWISE"
    magnitudes = values.abs()
    largest = magnitudes.amax(-1, keepdim=True) if by_row else magnitudes.amax()
    limit = torch.finfo(cast.target_dtype).max
    # As torchao computes it: in float64, with its least amax.
    scale = (limit / largest.double().clamp(min=1e-12)).float()
    if config.round_scales_to_power_of_2:
        # The mantissa is in [0.5, 1), so that the exponent is one too large.
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
    codes = (values.float() * scale).clamp(-limit, limit).to(cast.target_dtype)
    return codes, scale


class PlainQuantized(nn.Module):
    """A QuantizedLinear or a FakeQuantizedLinear in plain operations: float [..., in] to the same
    dtype, or autocast's, [..., out].

    It holds the packed weight. Products are those of the rounded values in float.
    """

    bias: Tensor | None
    format: WeightFormat

    @classmethod
    def convert_in_place(cls, module: Any) -> None:
        """Turn the layer into a PlainQuantized, in place."""
        _become(module, cls, **{f"packed_{key}": part for key, part in module.packed().items()})

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype, or autocast's, [..., out]."""
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        with torch.autocast(device_type, enabled=False):
            packed = {
                name.removeprefix("packed_"): part
                for name, part in self._buffers.items()
                if name.startswith("packed_")
            }
            weight = self.format.unpack(packed)  # type: ignore[arg-type]
            rows = self.format.plain_input(input)
            output = F.linear(rows, weight.to(rows.dtype))
            return output if self.bias is None else output + self.bias.to(output.dtype)
