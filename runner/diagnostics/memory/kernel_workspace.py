"""Compute the memory that CPU kernels allocate inside themselves, which operators do not show.

The sizes are read from the code of torch 2.15 and bitsandbytes; bench/memory_plan.py compares them
with the allocator's. The workspaces of GPU libraries are not known here.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from runner.precision.emulation.cpu_kernels import KERNELS

_UPDATE_COPIES = 5
"""Float32 tensors of the state's size that bitsandbytes' 8-bit update makes."""
_INT8_PRODUCT_COPIES = 4
"""Four-byte tensors of the product's size that bitsandbytes makes before its scales are back."""
_PACKING_BYTES = 10
"""Bytes for each weight that bitsandbytes packs into four bits."""
_CHANNEL_BLOCK = 16
"""Channels that oneDNN keeps together; a layout in such blocks is a copy."""
_ARITHMETIC = ("add", "sub", "mul", "div")


def workspace_bytes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, accumulates: bool
) -> int:
    """Return the bytes that a kernel allocates and frees within one call of an operator.

    Args:
        func: a torch.ops overload.
        args, kwargs: of the call.
        result: what the call returned.
        accumulates: runner.precision.emulation.cpu_kernels computes float16 operators with float32
            kernels.
    """
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not given or given[0].device.type != "cpu":
        return 0
    name = func.name().partition("::")[2].partition(".")[0]
    dtype = given[0].dtype
    if accumulates and name in KERNELS and dtype is torch.float16:
        return _accumulation(name, given, args, result)
    if name.startswith("convolution"):
        return _convolution(name, args, result, dtype)
    if name == "_foreach_norm":
        # The dtype that the norm is computed in is its last argument, and may be left out.
        norm_dtype = [*args, *kwargs.values()][-1]
        if norm_dtype not in (torch.float32, torch.float64):
            return 0
        # One tensor of the list is cast at a time.
        casts = [t.numel() for t in given if t.dtype is not norm_dtype]
        return max(casts, default=0) * norm_dtype.itemsize
    if name == "optimizer_update_8bit_blockwise":
        return 4 * _UPDATE_COPIES * args[1].numel()
    if name == "int8_scaled_mm":
        return 4 * _INT8_PRODUCT_COPIES * result.numel()
    if name == "quantize_4bit":
        return _PACKING_BYTES * args[0].numel()
    if name.rstrip("_") in _ARITHMETIC:
        # A trailing underscore: the operator writes to its first tensor.
        return _cast(given, into=given[0].dtype if name.endswith("_") else None)
    return 0


def _accumulation(name: str, given: Sequence[Tensor], args: Sequence[Any], result: Any) -> int:
    """Return the bytes of a float16 operator that a float32 kernel computes.

    Args:
        name: of the operator.
        given: the tensors among its arguments.
        args: of the call.
        result: what the call returned.
    """
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    made_halves = sum(t.numel() for t in made if t.dtype is torch.float16)
    given_halves = sum(t.numel() for t in given if t.dtype is torch.float16)
    casts = 4 * (made_halves + given_halves)
    # The float32 kernel has returned, and freed its workspace, before its result is rounded to
    # float16: the rounded result takes part of that memory.
    return casts + max(0, _convolution(name, args, result, torch.float32) - 2 * made_halves)


def _cast(given: Sequence[Tensor], into: torch.dtype | None) -> int:
    """Return the bytes of the casts in arithmetic on several dtypes.

    Operands are cast to the widest dtype first, and the result last to that of the tensor that it
    is written to.
    """
    # Tensors without dimensions are scalars to torch's type promotion: they widen nothing.
    dtypes = (t.dtype for t in given if t.ndim)
    wide = reduce(torch.promote_types, dtypes, given[0].dtype)
    elements = sum(t.numel() for t in given if t.dtype is not wide)
    if into not in (None, wide):
        elements += given[0].numel()
    return elements * wide.itemsize


def _convolution(name: str, args: Sequence[Any], result: Any, dtype: torch.dtype) -> int:
    """Return the workspace of a convolution in bytes; 0 for other operators.

    Args:
        name: of the operator.
        args: of the call.
        result: what the call returned.
        dtype: that the kernel computes in.
    """
    is_backward = name == "convolution_backward"
    if is_backward:
        output, inputs, weight = args[:3]
        stride, padding = args[4:6]
    elif name == "convolution":
        output = result
        inputs, weight = args[:2]
        stride, padding = args[3:5]
    else:
        return 0
    groups = inputs.shape[1] // weight.shape[1]
    x, w, y = (t.numel() * dtype.itemsize for t in (inputs, weight, output))
    # A convolution of single pixels is a product of matrices, which only bfloat16 reorders.
    plain = max(weight.shape[2:]) == max(stride) == 1 and max(padding) == 0
    bfloat16_is_reordered = dtype is torch.bfloat16 and _onednn_takes_bfloat16()
    if groups > 1 or (plain and not bfloat16_is_reordered):
        return 0
    # What oneDNN does not take, torch computes by unfolding every pixel's window, in the whole
    # batch.
    if not (dtype is torch.float32 or bfloat16_is_reordered):
        pixels = len(inputs) * math.prod(output.shape[2:])
        return pixels * weight[0].numel() * dtype.itemsize
    # oneDNN reorders tensors into layouts of its own.
    if is_backward:
        return x + y + 2 * w if bfloat16_is_reordered else max(x + y, w)
    return x + w if inputs.shape[1] >= _CHANNEL_BLOCK else y


@cache
def _onednn_takes_bfloat16() -> bool:
    """Return whether oneDNN's bfloat16 kernels run here: on x86 they need AVX-512."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
