"""4-bit linear layers on bitsandbytes' kernels, each a torch.nn.Linear or a Conv1D turned in place.

They differ from the library's own module where that misleads: a trainable bias keeps its dtype, a
checkpoint loads exactly or not at all, and on a CPU weights are unpacked rightly whatever their
width (the library's kernel takes the wrong scales where the width is a multiple of 16 and not of
the block of 64).

Source: Dettmers et al., QLoRA, arXiv:2305.14314 (nf4, double quantisation).
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.precision.conversion import low_precision_class
from runner.precision.layers.bnb_library import (
    QuantState,
    bnb,
    dequantize_4bit,
    unpack_tensor_to_dict,
)
from runner.precision.layers.conv1d import is_transposed, layer_widths, weight_matrix
from runner.precision.layers.linear_8bit import unpack_int8

Parts = dict[str, Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels take


def pack_4bit(weight: Tensor, quant_type: str, nested: bool) -> Any:
    """A weight [out, in] as two 4-bit codes per byte and one scale per block of 64.

    Raises:
        NotImplementedError: on the meta device, which the library would pass through unpacked.
    """
    if weight.is_meta:
        raise NotImplementedError("4-bit weights cannot be packed on the meta device")
    kind: Any = bnb.nn.Params4bit
    made = kind(_narrow(weight), quant_type=quant_type, compress_statistics=nested)
    return made.to(weight.device)  # the library quantises when it moves


def unpack_4bit(packed: Tensor, state: QuantState, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that a packed one stands for."""
    if packed.device.type == "cpu":  # one long row of even length, whose blocks the kernel finds
        shape = torch.Size(state.shape or ())
        count = shape.numel()
        row = QuantState(
            state.absmax,
            torch.Size((1, count + count % 2)),
            state.code,
            state.blocksize,
            state.quant_type,
            state.dtype,
            state.offset,
            state.state2,
        )
        return dequantize_4bit(packed, row)[0, :count].view(shape).to(dtype)
    return dequantize_4bit(packed, state).to(dtype)


def _narrow(weight: Tensor) -> Tensor:
    weight = weight.detach().contiguous()
    return weight if weight.dtype in FLOATS else weight.float()


class _Product4bit(torch.autograd.Function):
    """x @ weight.T + bias on a CPU; the weight is unpacked again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None) -> Any:
        ctx.packed, ctx.state = packed, state
        return F.linear(x, unpack_4bit(packed, state, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        wants_x, _, _, wants_bias = ctx.needs_input_grad
        weight = unpack_4bit(ctx.packed, ctx.state, grad.dtype) if wants_x else None
        for_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if wants_bias else None
        return None if weight is None else grad @ weight, None, None, for_bias


class Linear4bit(bnb.nn.Linear4bit):
    """float [..., in] to the same dtype [..., out]; computes in compute_dtype. The weight is
    frozen, the bias as it was."""

    compute_dtype: torch.dtype
    mode: tuple[str, bool]  # quant_type, nested

    @classmethod
    def swap(cls, module: Any, quant_type: str, nested: bool, compute: torch.dtype) -> None:
        """Turn a linear layer into one of these, where it is."""
        weight = pack_4bit(weight_matrix(module), quant_type, nested)
        module.in_features, module.out_features = layer_widths(module)
        module.__class__ = low_precision_class(cls, type(module))
        module.mode, module.compute_dtype, module.compute_type_is_set = (  # type: ignore[assignment]
            (quant_type, nested),
            compute,
            True,
        )
        module.quant_storage = torch.uint8  # type: ignore[assignment]
        # The library would repack the weight in an evaluation on AVX512-BF16 processors, for good:
        # a checkpoint saved after it is wrong, and widths that are no multiple of 32 fail.
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        module.quant_state = None  # type: ignore[assignment]
        module.weight = weight

    # The library names it x; a model may call nn.Linear with `input=`.
    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        rows, state = input.to(self.compute_dtype), self.weight.quant_state  # type: ignore[attr-defined]
        if input.device.type == "cpu":
            made = _Product4bit.apply(rows, self.weight, state, bias)
        else:
            made = bnb.matmul_4bit(rows, self.weight, quant_state=state, bias=bias)
        return made.to(input.dtype)  # type: ignore[union-attr]

    def unpacked_weight(self) -> Tensor:
        """Return the weight that the codes stand for, in the dtype that it was packed from: its
        shape is [out, in], a Conv1D's [in, out]."""
        state = self.weight.quant_state  # type: ignore[attr-defined]
        weight = unpack_4bit(self.weight.data, state, state.dtype)
        return weight.t() if is_transposed(self) else weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # type: ignore[override]
        """A packed weight with its scales, as it is; a plain one is packed."""
        key, stem = f"{prefix}weight", f"{prefix}weight."
        parts = {k[len(stem) :]: state_dict.pop(k) for k in list(state_dict) if k.startswith(stem)}
        weight = state_dict.get(key)
        if weight is not None:
            try:
                self.weight = self._made_from(weight, parts)
            except ValueError as error:
                args[-1].append(f"{key}: {error}")  # error_msgs
            state_dict[key] = self.weight.data
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _made_from(self, weight: Tensor, parts: Parts) -> Any:
        device = self.weight.device
        shape = (self.out_features, self.in_features)
        if weight.is_floating_point():
            weight = weight.t() if is_transposed(self) else weight
            if weight.shape != shape:
                raise ValueError(f"its shape is {list(weight.shape)}, not {list(shape)}")
            return pack_4bit(weight.to(device), *self.mode)
        found = packed_mode(weight, parts)
        if found != self.mode:
            raise ValueError(
                f"it is packed as {packing_label(*found)}, not as {packing_label(*self.mode)}"
            )
        parts = {k: v.clone() for k, v in parts.items()}  # the given ones may be a file's
        made = bnb.nn.Params4bit.from_prequantized(weight.clone(), parts, device=str(device))
        held = list(made.quant_state.shape or ())  # type: ignore[union-attr]
        if held != list(shape):
            raise ValueError(f"its shape is {held}, not {list(shape)}")
        return made


def packed_mode(weight: Tensor, parts: Parts) -> tuple[str, bool]:
    """quant_type and nesting of a packed weight in a state dict.

    Args:
        weight: the codes, uint8 [elements / 2, 1].
        parts: what stands under `weight.` beside it.

    Raises:
        ValueError: scales are missing or too few, which the library would not notice.
    """
    (key,) = [k for k in parts if k.startswith(_ABOUT)] or [""]
    if not key:
        raise ValueError("it is packed, and its scales are missing")
    about = unpack_tensor_to_dict(parts[key])
    nested = "nested_blocksize" in about
    elements = math.prod(about["shape"])
    blocks = -(-elements // about["blocksize"])
    wanted = {"absmax": blocks, "quant_map": 16}
    if nested:
        wanted |= {
            "nested_absmax": -(-blocks // about["nested_blocksize"]),
            "nested_quant_map": 256,
        }
    for name, count in wanted.items():
        if name not in parts:
            raise ValueError(f"it is packed, and its {name} is missing")
        if parts[name].numel() != count:
            raise ValueError(f"its {name} has {parts[name].numel()} values, not {count}")
    if weight.numel() != -(-elements // 2):
        raise ValueError(f"it has {weight.numel()} bytes, not {-(-elements // 2)}")
    return about["quant_type"], nested


_ABOUT = "quant_state.bitsandbytes__"


def packing_label(quant_type: str, nested: bool) -> str:
    """A packing as a precision calls it."""
    return f"{quant_type}-dq" if nested else quant_type


def plain_weights(
    state_dict: Mapping[str, Tensor], transposed: Collection[str] = ()
) -> dict[str, Tensor]:
    """A state dict with every packed weight as the float32 weight that it stands for.

    Args:
        state_dict: of a model with packed layers.
        transposed: dotted names of the layers whose weight is [in, out] when it is not packed.

    Raises:
        ValueError: a packed weight lacks its scales.
    """
    plain = dict(state_dict)
    for key, value in state_dict.items():
        if key.rpartition(".")[2] != "weight":
            continue
        scales = f"{key.removesuffix('weight')}SCB"
        if value.dtype is torch.int8:
            if scales not in state_dict:
                raise ValueError(f"{key}: it is int8, and {scales} is missing")
            plain[key] = unpack_int8(value, plain.pop(scales), torch.float32)
        elif value.dtype is torch.uint8:
            parts = {k[len(key) + 1 :]: plain.pop(k) for k in state_dict if k.startswith(f"{key}.")}
            try:
                packed_mode(value, parts)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
            state = QuantState.from_dict(parts, value.device)
            plain[key] = unpack_4bit(value, state, torch.float32)
        else:
            continue
        if key.removesuffix("weight").rstrip(".") in transposed:
            plain[key] = plain[key].t().contiguous()
    return plain
