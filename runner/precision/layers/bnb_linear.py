"""Compute linear layers with 4-bit and with int8 weights on bitsandbytes' kernels.

Each layer is a torch.nn.Linear or a Conv1D whose class was changed in place. They differ from the
library's own modules where those mislead. A trainable bias keeps its dtype.

Of 4-bit layers, a checkpoint loads exactly or not at all, and on a CPU weights of any width are
unpacked correctly (the library's kernel takes the wrong scales where the width is a multiple of 16
and not of the block of 64).

Of int8 layers, weights and inputs are scaled into float16's range, through which the library
quantises; the quantised copy of a weight that trains is made in every forward, so that none sees
the weight of an earlier step, and its gradient is not quantised; and scales are a buffer, which
moves, copies and loads like any other.

Source: Dettmers et al., QLoRA, arXiv:2305.14314 (nf4, double quantisation); LLM.int8(),
arXiv:2208.07339 (row-wise int8, outlier columns).
"""

import logging
import math
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.core import terminal
from runner.precision.conversion import change_class
from runner.precision.layers.backward_checks import forbid_second_derivative
from runner.precision.layers.conv1d import is_transposed, weight_matrix
from runner.precision.layers.quantized_linear import (
    PackedLinear,
    PackedTensors,
    PackedWeightOwner,
    Packing,
)

with terminal.suppress_warnings():
    import bitsandbytes as bnb
    from bitsandbytes.functional import (
        QuantState,
        create_dynamic_map,
        dequantize_4bit,
        name2qmap,
        quantize_4bit,
    )
    from bitsandbytes.utils import unpack_tensor_to_dict

# The library makes its map of 8-bit scales where the first weight is, also on the meta device.
name2qmap.setdefault("dynamic", create_dynamic_map())
# It warns of the cast to float16 before int8 in every forward.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


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


def unpack_int8(codes: Tensor, largest: Tensor) -> Tensor:
    """Return the weight that codes (int8 [out, in]) and rows' largest magnitudes ([out]) stand for,
    in float32."""
    return codes.float() * (largest.float()[:, None] / 127)


class Int8Rows(Packing):
    """int8 codes, and the largest magnitude of each row in `SCB`, as bitsandbytes calls it."""

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        codes, largest = pack_int8(weight)
        return {"weight": codes, "SCB": largest}

    def unpack(self, packed: PackedTensors) -> Tensor:
        return unpack_int8(packed["weight"], packed["SCB"])


class Linear8bit(PackedLinear):
    """A linear layer with a frozen int8 weight: float [..., in] to the same dtype [..., out].

    Attributes:
        compute_dtype: the dtype that inputs have before they are quantised.
        threshold: magnitude from which an input's column is not quantised; 0 for none.
    """

    SCB: Tensor
    compute_dtype: torch.dtype
    threshold: float
    format = Int8Rows()

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype [..., out]."""
        return _product_int8(self, input, self.codes.data, self.SCB)


class Linear8bitTrained(nn.Linear):
    """A linear layer whose plain weight trains: float [..., in] to the same dtype [..., out].

    Its int8 copy is made in every forward, so that no forward sees the weight of an earlier step.
    Attributes are those of Linear8bit.
    """

    compute_dtype: torch.dtype
    threshold: float

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype [..., out]."""
        weight = weight_matrix(self)
        return forbid_second_derivative(_product_int8(self, input, *pack_int8(weight), weight))


def _product_int8(
    module: Linear8bit | Linear8bitTrained,
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    trained: Tensor | None = None,
) -> Tensor:
    """Return a layer's output: the library's product, plus bias, in x's dtype.

    Args:
        module: the layer.
        x: float [..., in].
        codes: the weight, int8 [out, in].
        scales: the largest magnitude of each row of it, float32 [out].
        trained: the plain weight [out, in] that gets a gradient.
    """
    state: Any = bnb.MatmulLtState()
    state.CB = codes
    state.SCB = scales
    # A reentrant checkpoint's first forward has no gradients; it must multiply as its second.
    state.is_training = module.training or (trained is not None and torch.is_grad_enabled())
    state.threshold = module.threshold
    state.has_fp16_weights = False
    # On CPUs without AVX-512 the library multiplies codes as float32 matrices, whose exact sums
    # autocast would round.
    with torch.autocast(x.device.type, enabled=False):
        # Flattened: the library's gradient fails on more dimensions.
        rows = x.reshape(-1, x.shape[-1]).to(module.compute_dtype)
        if x.device.type == "cpu" and state.is_training:
            # There the library multiplies unpacked weights and quantises nothing.
            output = bnb.matmul(rows, codes, state=state)
        else:
            # The library quantises by way of float16, whose range is narrow. So rows are multiplied
            # by a power of two before and the product is divided by it, which changes nothing else,
            # because each row has a scale of its own. A threshold is in the units of the rows.
            factor = _normalizing_factor(rows) if state.threshold == 0 else 1.0
            output = bnb.matmul(rows * factor, codes, state=state) / factor  # type: ignore[operator]
        if trained is not None:
            output = _TrainWeight.apply(output, rows.detach(), trained)
        if module.bias is not None:
            output = output + module.bias.to(module.compute_dtype)
        return output.view(*x.shape[:-1], module.out_features).to(x.dtype)


class _TrainWeight(torch.autograd.Function):
    """The identity of a product, which gives the weight that was quantised for it a gradient.

    It is the product of the gradient and the rows as they are. The library's own, of codes, is
    wrong by its own size on a GPU (0.50): it scales the codes of rows by the columns' scales, and
    its kernel reads a transposed matrix as if it were contiguous. Source of a weight gradient in
    16 bit beside int8 products: Wortsman et al., SwitchBack, arXiv:2304.13013.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[2] else None)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (rows,) = ctx.saved_tensors
        if rows is None:
            return grad, None, None
        # Under no loss scale float16 holds neither small gradients nor large sums of them.
        wide = torch.float32 if grad.dtype is torch.float16 else grad.dtype
        return grad, None, (rows.to(wide).t() @ grad.to(wide)).t()


def _normalizing_factor(tensor: Tensor) -> Tensor:
    """Return the power of two, a float32 scalar on the device, that brings magnitudes below 1."""
    # The gradient of torch.ldexp of the tensor itself is zero in torch 2.11.
    one = torch.ones((), device=tensor.device)
    if tensor.numel() == 0:
        return one
    largest = tensor.detach().abs().amax().float()
    return torch.ldexp(one, -torch.frexp(largest).exponent)


PackedEntries = dict[str, Tensor]
"""The entries of a state dict that belong to a packed weight, by their key after `weight.`."""
PACKABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that the kernels pack
_STATE_KEY = "quant_state.bitsandbytes__"  # the library's start of the key of a packing's facts


def pack_4bit(weight: Tensor, quant_type: str, nested: bool) -> Any:
    """Return a weight as two 4-bit codes per byte and one scale per block of 64.

    Args:
        weight: float [out, in], any layout; unchanged.
        quant_type: nf4 or fp4.
        nested: whether the scales are quantised too (double quantisation).

    Returns:
        bitsandbytes' Params4bit: uint8 [elements / 2, 1] with the scales in its quant_state.
    """
    plain = weight.detach().contiguous()
    plain = plain if plain.dtype in PACKABLE_DTYPES else plain.float()
    packing: Any = {"quant_type": quant_type, "compress_statistics": nested}
    codes, state = quantize_4bit(plain, **packing)
    kind: Any = bnb.nn.Params4bit
    return kind(codes, requires_grad=False, quant_state=state, bnb_quantized=True, **packing)


def unpack_4bit(packed: Tensor, state: QuantState, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] that packed codes stand for, in a float dtype.

    Args:
        packed: uint8 codes.
        state: of the library: shape, scales and the table of the codes' values.
        dtype: of the result.
    """
    if packed.device.type == "cpu":
        # As one long row of even length: the CPU's kernel finds the blocks' scales of that only.
        shape = torch.Size(state.shape or ())
        count = shape.numel()
        row = copy(state)
        # A byte holds two codes, so that a weight of odd size has one code too many.
        row.shape = torch.Size((1, count + count % 2))
        return dequantize_4bit(packed, row)[0, :count].view(shape).to(dtype)
    return dequantize_4bit(packed, state).to(dtype)


class _Product4bit(torch.autograd.Function):
    """The product x @ weight.T + bias on a CPU: x [..., in] to [..., out], in x's dtype.

    The weight is unpacked again for the backward, so that it is not stored unpacked. It is frozen:
    only x and the bias have gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None) -> Any:
        ctx.packed = packed
        ctx.state = state
        return F.linear(x, unpack_4bit(packed, state, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        wants_x, _, _, wants_bias = ctx.needs_input_grad
        x_grad = bias_grad = None
        if wants_x:
            x_grad = grad @ unpack_4bit(ctx.packed, ctx.state, grad.dtype)
        if wants_bias:
            bias_grad = grad.reshape(-1, grad.shape[-1]).sum(0)
        return x_grad, None, None, bias_grad


class Linear4bit(PackedWeightOwner, bnb.nn.Linear4bit):  # type: ignore[misc]
    """A linear layer with a 4-bit weight: float [..., in] to the same dtype [..., out].

    It computes in compute_dtype. The weight is frozen; the bias keeps its dtype and trains if it
    did before the conversion.
    """

    compute_dtype: torch.dtype
    packing: tuple[str, bool]  # quant_type, nested

    @classmethod
    def convert_in_place(cls, module: Any, packing: tuple[str, bool], compute: torch.dtype) -> None:
        """Turn a linear layer into a Linear4bit, in place.

        Args:
            module: nn.Linear or Conv1D.
            packing: the further arguments of pack_4bit.
            compute: the dtype of the products.
        """
        weight = pack_4bit(weight_matrix(module), *packing)
        change_class(
            module,
            cls,
            packing=packing,
            compute_dtype=compute,
            compute_type_is_set=True,
            quant_storage=torch.uint8,
            # Otherwise the library permanently repacks the weight in an evaluation on processors
            # with AVX512-BF16: later checkpoints are wrong, and widths that are no multiple of 32
            # fail.
            support_avx512bf16_for_cpu=False,
            quant_state=None,
        )
        module.weight = weight

    # The library names the argument x; a model may call nn.Linear with `input=`.
    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        """Return the outputs: float [..., in] to the same dtype [..., out]."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        rows = input.to(self.compute_dtype)
        state = self.scales
        if input.device.type == "cpu":
            output = _Product4bit.apply(rows, self.codes, state, bias)
        else:
            output = bnb.matmul_4bit(rows, self.codes, quant_state=state, bias=bias)
        return output.to(input.dtype)  # type: ignore[union-attr]

    def unpacked_weight(self) -> Tensor:
        """Return the weight that the codes stand for, in the dtype that it was packed from.

        Its shape is [out, in], a Conv1D's [in, out].
        """
        state: Any = self.scales
        weight = unpack_4bit(self.codes.data, state, state.dtype)
        return weight.t() if is_transposed(self) else weight

    @property
    def scales(self) -> QuantState:
        """Return the scales of the weight, its shape and the values of its codes."""
        held_by_weight = getattr(self.codes, "quant_state", None)
        return self.quant_state if held_by_weight is None else held_by_weight

    def separate_scales(self, device: torch.device) -> None:
        """Hold the scales beside the weight, which becomes a plain parameter that can be sharded.

        The parameter is uint8 [elements / 2, 1] and frozen; only the scales move to the device.
        """
        self.quant_state = self.scales
        self.quant_state.to(device)
        self.weight = nn.Parameter(self.codes.data, requires_grad=False)  # type: ignore[misc]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        for key, part in self.scales.as_dict(packed=True).items():
            destination[f"{prefix}weight.{key}"] = part

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # type: ignore[override]
        """Load a packed weight with its scales unchanged; pack a plain weight."""
        key = f"{prefix}weight"
        parts = _pop_parts(state_dict, key)
        weight = state_dict.get(key)
        if weight is not None:
            try:
                self.weight = self._weight_from_state(weight, parts)  # type: ignore[misc]
            except ValueError as error:
                # nn.Module's last argument, error_msgs: load_state_dict raises all of them at once.
                args[-1].append(f"{key}: {error}")
            # nn.Module copies this into the weight, which has it already.
            state_dict[key] = self.codes.data
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _weight_from_state(self, weight: Tensor, parts: PackedEntries) -> Any:
        """Return the packed weight of a state dict's plain or packed one.

        Raises:
            ValueError: it has another shape or packing, or its scales are missing.
        """
        device = self.codes.device
        shape = [self.out_features, self.in_features]
        if weight.is_floating_point():
            weight = weight.t() if is_transposed(self) else weight
            if [*weight.shape] != shape:
                raise ValueError(f"its shape is {[*weight.shape]}, not {shape}")
            return pack_4bit(weight.to(device), *self.packing)
        packing = packed_mode(weight, parts)
        if packing != self.packing:
            raise ValueError(
                f"it is packed as {packing_label(*packing)}, not as {packing_label(*self.packing)}"
            )
        # Copies: the state dict's tensors may be mapped from a file.
        parts = {k: v.clone() for k, v in parts.items()}
        packed = bnb.nn.Params4bit.from_prequantized(weight.clone(), parts, device=str(device))
        packed_shape = [*(packed.quant_state.shape or ())]  # type: ignore[union-attr]
        if packed_shape != shape:
            raise ValueError(f"its shape is {packed_shape}, not {shape}")
        return packed


def packed_mode(weight: Tensor, parts: PackedEntries) -> tuple[str, bool]:
    """Return the quant_type and whether scales are nested, of a packed weight in a state dict.

    Args:
        weight: the codes, uint8 [elements / 2, 1].
        parts: the entries of the state dict under `weight.`.

    Raises:
        ValueError: scales are missing or too few, which the library would not notice.
    """
    (key,) = [k for k in parts if k.startswith(_STATE_KEY)] or [""]
    if not key:
        raise ValueError("it is packed, and its scales are missing")
    facts = unpack_tensor_to_dict(parts[key])
    nested = "nested_blocksize" in facts
    elements = math.prod(facts["shape"])
    blocks = -(-elements // facts["blocksize"])
    # A 4-bit code has 16 values; double quantisation stores scales in 8 bits, which have 256.
    counts = {"absmax": blocks, "quant_map": 16}
    if nested:
        counts["nested_absmax"] = -(-blocks // facts["nested_blocksize"])
        counts["nested_quant_map"] = 256
    for name, count in counts.items():
        if name not in parts:
            raise ValueError(f"it is packed, and its {name} is missing")
        if parts[name].numel() != count:
            raise ValueError(f"its {name} has {parts[name].numel()} values, not {count}")
    if weight.numel() != -(-elements // 2):
        raise ValueError(f"it has {weight.numel()} bytes, not {-(-elements // 2)}")
    return facts["quant_type"], nested


def packing_label(quant_type: str, nested: bool) -> str:
    """Return a packing's name as in precision.mode: nf4, nf4-dq, fp4 or fp4-dq."""
    return f"{quant_type}-dq" if nested else quant_type


def pop_unpacked(state_dict: dict[str, Tensor], key: str) -> Tensor:
    """Return the float32 weight that a 4-bit or int8 entry of a state dict stands for; its scales
    are removed from the state dict.

    Raises:
        ValueError: the scales are missing.
    """
    packed = state_dict[key]
    if packed.dtype is torch.int8:
        scales = f"{key.removesuffix('weight')}SCB"
        if scales not in state_dict:
            raise ValueError(f"{key}: it is int8, and {scales} is missing")
        return unpack_int8(packed, state_dict.pop(scales))
    parts = _pop_parts(state_dict, key)
    try:
        packed_mode(packed, parts)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    state = QuantState.from_dict(parts, packed.device)
    return unpack_4bit(packed, state, torch.float32)


def _pop_parts(state_dict: dict[str, Any], key: str) -> PackedEntries:
    """Return the entries that belong to a packed weight; they are removed from the state dict."""
    part_keys = [each for each in state_dict if each.startswith(f"{key}.")]
    return {each.removeprefix(f"{key}."): state_dict.pop(each) for each in part_keys}
