"""Converted layers in plain torch operations, so that a copy of a model can be exported and loaded
without the library that trained it. Weights stay as small as they were packed; the products are
those of an evaluation."""

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.precision.layers.conv1d import weight_matrix

CPU = torch.device("cpu")
_STEP = 6.200124e-05  # bitsandbytes' 1 / 127²


def exportable_copy(model: nn.Module) -> nn.Module:
    """A model on the CPU that computes what this one does in an evaluation: itself where it is
    there and holds no converted layer, else a copy. The given one is not changed.

    Raises:
        NotImplementedError: a layer computes on its library's own device only.
    """
    for name, module in model.named_modules():
        if any(kind.__module__.startswith("transformer_engine") for kind in type(module).__mro__):
            kind = type(module).__name__
            raise NotImplementedError(f"{name} ({kind}) computes with TransformerEngine only")
    tensors = [*model.parameters(), *model.buffers()]
    if all(t.device == CPU for t in tensors) and not any(map(_stand_in, model.modules())):
        return model
    # Straight to the CPU, not by way of a second model on the device.
    memo: dict[int, Any] = {id(t): _on_cpu(t) for t in tensors if type(t) in _PLAIN}
    made = copy.deepcopy(model, memo)
    for module in list(made.modules()):
        if stand_in := _stand_in(module):
            stand_in.swap(module)
    return made.to(CPU)


_PLAIN = (Tensor, nn.Parameter)


def _on_cpu(tensor: Tensor) -> Tensor:
    there = tensor.detach().to(CPU)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(there, requires_grad=tensor.requires_grad)
    return there


def _stand_in(module: nn.Module) -> Any:
    """What stands in for a converted layer; None for any other. A library that was not imported
    made no layer."""
    known = {
        ("runner.precision.layers.linear_4bit", "Linear4bit"): Plain4bit,
        ("runner.precision.layers.linear_8bit", "Linear8bit"): Plain8bit,
        ("runner.precision.layers.linear_8bit", "Linear8bitTrained"): Plain8bit,
        ("torchao.float8.float8_linear", "Float8Linear"): PlainFloat8,
    }
    for (source, name), stand_in in known.items():
        kind = getattr(sys.modules.get(source), name, None)
        if kind is not None and isinstance(module, kind):
            return stand_in
    return None


def _become(module: Any, kind: type[nn.Module], **buffers: Tensor) -> None:
    """Turn a layer into another kind that holds these buffers in place of its weights; its bias,
    hooks and mode stay."""
    for name in ("weight", "SCB"):
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
    module.__class__ = kind
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor.detach().to(CPU))


class Plain4bit(nn.Module):
    """Linear4bit: float [..., in] to the same dtype [..., out]. Holds uint8 codes [elements / 2],
    float32 scales [blocks] and the float32 table [16] of what the codes mean."""

    codes: Tensor
    scales: Tensor
    table: Tensor
    bias: Tensor | None
    compute_dtype: torch.dtype
    shape: tuple[int, ...]
    block: int

    @classmethod
    def swap(cls, module: Any) -> None:
        """Turn a Linear4bit into one of these, where it is."""
        from bitsandbytes.functional import dequantize_blockwise

        packed, state = module.weight, module.weight.quant_state
        scales = state.absmax
        if state.nested:
            scales = dequantize_blockwise(scales, state.state2) + state.offset
        shape, block = tuple(state.shape), state.blocksize
        codes = packed.data.reshape(-1)
        _become(module, cls, codes=codes, scales=scales.float(), table=state.code.float())
        module.shape, module.block = shape, block

    def forward(self, input: Tensor) -> Tensor:
        count = self.shape[0] * self.shape[1]
        codes = torch.stack((self.codes >> 4, self.codes & 15), -1).view(-1)[:count]
        each = self.scales.repeat_interleave(self.block)[:count]
        weight = (self.table[codes.int()] * each).view(self.shape).to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return F.linear(input.to(self.compute_dtype), weight, bias).to(input.dtype)


class Plain8bit(nn.Module):
    """Linear8bit and Linear8bitTrained: float [..., in] to the same dtype [..., out]. Holds int8
    codes [out, in] and the largest magnitude of each row, float32 [out]."""

    codes: Tensor
    largest: Tensor
    bias: Tensor | None
    compute_dtype: torch.dtype
    threshold: float
    coarse = 2**-5  # relative step of a quarter of a row's largest value

    @classmethod
    def swap(cls, module: Any) -> None:
        """Turn either into one of these, where it is."""
        from runner.precision.layers.linear_8bit import pack_int8

        if module.weight.is_floating_point():
            codes, largest = pack_int8(weight_matrix(module))
        else:
            codes, largest = module.weight.data, module.SCB
        _become(module, cls, codes=codes, largest=largest)

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            rows = input.reshape(-1, input.shape[-1]).to(self.compute_dtype)
            made = self._product(rows)
            if self.bias is not None:
                made = made + self.bias.to(self.compute_dtype)
            return made.view(*input.shape[:-1], self.codes.shape[0]).to(input.dtype)

    def _product(self, rows: Tensor) -> Tensor:
        """Rows as int8 by way of float16, times a power of two that brings them into its range;
        outliers, and with them their columns, are multiplied as they are."""
        factor = torch.ones((), device=rows.device)
        if not self.threshold:
            exponent = torch.frexp(rows.abs().amax().float()).exponent
            factor = torch.ldexp(factor, -exponent)
            rows = rows * factor
        half = rows.half()
        outlier = half.abs() >= (self.threshold or torch.inf)
        inner = half.masked_fill(outlier, 0)
        largest = inner.abs().amax(1, keepdim=True).float()
        codes = torch.round(inner * (127.0 / largest.where(largest > 0, 1.0)))
        outlying = outlier.any(0)
        codes = codes.masked_fill(outlying, 0)
        # Whole numbers in float32: exact to 2^24, and closer than the result's own dtype beyond.
        made = codes.float() @ self.codes.float().t() * (largest * self.largest) * _STEP
        made = made.to(rows.dtype)
        if self.threshold:
            weight = (self.codes * (self.largest[:, None] / 127)).to(rows.dtype)
            made = made + rows.masked_fill(~outlying, 0) @ weight.t()
        return made / factor


class PlainFloat8(nn.Module):
    """torchao's Float8Linear: float [..., in] to float [..., out]. Holds the weight as FP8 codes
    [out, in] and float32 scales, [out, 1] or one; inputs are rounded as they come, in float32's
    arithmetic, which is what the library emulates with."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    config: Any
    coarse = torch.finfo(torch.float8_e4m3fn).eps

    @classmethod
    def swap(cls, module: Any) -> None:
        """Turn a Float8Linear into one of these, where it is."""
        config = module.config
        for cast in (config.cast_config_input, config.cast_config_weight):
            if cast.scaling_type.name != "DYNAMIC":
                raise NotImplementedError(f"FP8 with {cast.scaling_type.name} scales")
        codes, scale = _to_float8(weight_matrix(module).detach(), config.cast_config_weight, config)
        _become(module, cls, codes=codes, scale=scale)

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            codes, scale = _to_float8(input, self.config.cast_config_input, self.config)
            weight = self.codes.float() / self.scale
            made = ((codes.float() / scale) @ weight.t()).to(input.dtype)
            return made if self.bias is None else made + self.bias.to(made.dtype)


def _to_float8(values: Tensor, cast: Any, config: Any) -> tuple[Tensor, Tensor]:
    """Values as FP8 and their scales, one for all or one for each of the last dimension's rows."""
    rows = cast.scaling_granularity.name == "AXISWISE"
    magnitudes = values.abs()
    largest = magnitudes.amax(-1, keepdim=True) if rows else magnitudes.amax()
    limit = torch.finfo(cast.target_dtype).max
    scale = (limit / largest.double().clamp(min=1e-12)).float()
    if config.round_scales_to_power_of_2:
        mantissa, exponent = torch.frexp(scale)  # in [0.5, 1): one power too many
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
    codes = (values.float() * scale).clamp(-limit, limit).to(cast.target_dtype)
    return codes, scale
