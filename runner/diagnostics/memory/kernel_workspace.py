"""Compute the memory that CPU kernels allocate inside themselves, which operators do not show.

Read from torch 2.15's and bitsandbytes' code and held against the allocator by
bench/memory_plan.py. What GPU libraries take is not known here.
"""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from runner.precision.emulation.float16 import KERNELS

# Four-byte tensors that bitsandbytes' own code makes: of the state in an 8-bit update, and of the
# product before its int8 scales are back. Bytes for a weight that it packs into four bits.
_MOMENTS, _SCALED, _PACKING = 5, 4, 10
_F32, _F64 = torch.float32, torch.float64
_BLOCK = 16  # channels that oneDNN keeps together


def workspace_bytes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, accumulates: bool
) -> int:
    """Return the bytes that a kernel allocates and frees within one call of an operator.

    Args:
        func: a torch.ops overload.
        args, kwargs: of the call.
        result: what the call returned.
        accumulates: runner.precision.emulation.float16 computes float16 operators with float32
            kernels.
    """
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not given or given[0].device.type != "cpu":
        return 0
    name = func.name().partition("::")[2].partition(".")[0]
    dtype = given[0].dtype
    if accumulates and name in KERNELS and dtype is torch.float16:
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        half = [t.numel() for t in made if t.dtype is torch.float16]
        wide = 4 * (sum(half) + sum(t.numel() for t in given if t.dtype is torch.float16))
        # The float32 kernel has come back before its result is rounded to float16.
        return wide + max(0, _convolution(name, args, result, torch.float32) - 2 * sum(half))
    if name.startswith("convolution"):
        return _convolution(name, args, result, dtype)
    if name == "_foreach_norm" and (dtype := [*args, *kwargs.values()][-1]) in (_F32, _F64):
        return max(t.numel() * dtype.itemsize * (t.dtype is not dtype) for t in given)
    if name == "optimizer_update_8bit_blockwise":
        return 4 * _MOMENTS * args[1].numel()
    if name == "int8_scaled_mm":
        return 4 * _SCALED * result.numel()
    if name == "quantize_4bit":
        return _PACKING * args[0].numel()
    if name.rstrip("_") in ("add", "sub", "mul", "div"):
        return _cast(given, into=given[0].dtype if name.endswith("_") else None)
    return 0


def _cast(given: Sequence[Tensor], into: torch.dtype | None) -> int:
    """Return the bytes of the casts in arithmetic on several dtypes.

    Operands are cast to the widest dtype first, and the result last to that of the tensor that it
    is written to.
    """
    wide = reduce(torch.promote_types, (t.dtype for t in given if t.ndim), given[0].dtype)
    size = sum(t.numel() for t in given if t.dtype is not wide)
    size += given[0].numel() if into not in (None, wide) else 0
    return size * wide.itemsize


def _convolution(name: str, args: Sequence[Any], result: Any, dtype: torch.dtype) -> int:
    """Return the workspace of a convolution; 0 for other operators.

    oneDNN reorders tensors into layouts of its own. What oneDNN does not take, torch unfolds: every
    pixel's window, for the whole batch.
    """
    if name == "convolution":
        inputs, weight, output, (stride, padding) = *args[:2], result, args[3:5]
    elif name == "convolution_backward":
        output, inputs, weight, (stride, padding) = *args[:3], args[4:6]
    else:
        return 0
    kernel, groups = weight.shape[2:], inputs.shape[1] // weight.shape[1]
    x, w, y = (t.numel() * dtype.itemsize for t in (inputs, weight, output))
    plain = max(kernel) == max(stride) == 1 and max(padding) == 0
    if groups > 1 or (plain and dtype is not torch.bfloat16):
        return 0
    if dtype in (torch.float64, torch.float16):
        pixels = len(inputs) * math.prod(output.shape[2:])
        return pixels * weight[0].numel() * dtype.itemsize
    if output is not result:
        return x + y + 2 * w if dtype is torch.bfloat16 else max(x + y, w)
    return x + w if inputs.shape[1] >= _BLOCK else y
