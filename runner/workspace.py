"""Memory that CPU kernels take inside themselves and give back: operators do not show it.

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

from runner.precision.cpu_float16 import KERNELS

# Four-byte tensors that bitsandbytes' own code makes: of the state in an 8-bit update, and of the
# product before its int8 scales are back. Bytes for a weight that it packs into four bits.
_MOMENTS, _SCALED, _PACKING = 5, 4, 10
_F32, _F64 = torch.float32, torch.float64


def inside(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, accumulates: bool
) -> int:
    """Bytes within one call of an operator.

    Args:
        func: a torch.ops overload; args, kwargs: of the call; result: what it returned.
        accumulates: whether runner.precision.cpu_float16 puts float32 kernels under float16.
    """
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not given or given[0].device.type != "cpu":
        return 0
    name = func.name().partition("::")[2].partition(".")[0]
    if accumulates and name in KERNELS and given[0].dtype is torch.float16:
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return sum(4 * t.numel() for t in (*given, *made) if t.dtype is torch.float16)
    if name == "convolution":
        return _convolution(args[0], args[1], result, args[3], args[4], reorders=1)
    if name == "convolution_backward":
        return _convolution(args[1], args[2], args[0], args[4], args[5], reorders=2)
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
    """Arithmetic on several dtypes first casts operands to the widest, and last the result into
    the tensor that it is written to."""
    wide = reduce(torch.promote_types, (t.dtype for t in given if t.ndim), given[0].dtype)
    size = sum(t.numel() for t in given if t.dtype is not wide)
    size += given[0].numel() if into not in (None, wide) else 0
    return size * wide.itemsize


def _convolution(
    inputs: Tensor,
    weight: Tensor,
    output: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    reorders: int,
) -> int:
    """oneDNN brings a bfloat16 weight into an order of its own; torch unfolds what oneDNN does not
    take, every pixel's window for the whole batch."""
    if inputs.dtype is torch.bfloat16:
        return reorders * weight.numel() * weight.element_size()
    kernel = weight.shape[2:]
    plain = max(kernel) == max(stride) == 1 and max(padding) == 0
    if inputs.dtype not in (torch.float64, torch.float16) or plain:
        return 0
    pixels = len(inputs) * math.prod(output.shape[2:])
    return pixels * weight.shape[1] * math.prod(kernel) * inputs.element_size()
