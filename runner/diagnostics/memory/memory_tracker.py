"""Track what a step holds in memory after each operator, by kind, on real and fake tensors.

To it comes what CPU kernels allocate inside themselves, which operators do not show. These sizes
are read from the code of torch 2.15 and bitsandbytes; bench/memory_plan.py compares them with the
allocator's. The workspaces of GPU libraries are not known here.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runner.core import module_tape, tensor_facts
from runner.diagnostics.module_tensors import tensors_in
from runner.precision.emulation.cpu_kernels import KERNELS

CUDA_BLOCK = 512
"""Bytes that CUDA's allocator rounds up to (c10/cuda/CUDACachingAllocator.cpp)."""
_UPDATE_COPIES = 5
"""Float32 tensors of the state's size that bitsandbytes' 8-bit update makes."""
_INT8_PRODUCT_COPIES = 4
"""Four-byte tensors of the product's size that bitsandbytes makes before its scales are back."""
_PACKING_BYTES = 10
"""Bytes for each weight that bitsandbytes packs into four bits."""
_CHANNEL_BLOCK = 16
"""Channels that oneDNN keeps together; a layout in such blocks is a copy."""
_ARITHMETIC = ("add", "sub", "mul", "div")


class MemoryBreakdown(NamedTuple):
    """The bytes that are held at one moment of a step.

    Attributes:
        weights: parameters and buffers.
        gradients: of parameters, once they are complete.
        optimizer: its state.
        activations: the batch, and what the forward makes.
        temporaries: what the backward and the update make apart from the gradients, what
            activation checkpointing computes again, and what kernels allocate inside themselves.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(self)


WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES = range(len(MemoryBreakdown._fields))


class MemoryTracker(TorchDispatchMode):
    """Adds up the storages that are alive; `timeline` has an entry for each operator.

    Storages are counted, not tensors: views of one share its memory.

    Args:
        kind: what tensors count as that are made outside of a backward and an update.
        accumulates: see workspace_bytes.

    Attributes:
        block: bytes that the allocator rounds up to.
        timeline: what is held after each operator.
        updates: whether the optimizer's update has begun.
    """

    block = 1

    def __init__(self, kind: int = ACTIVATIONS, accumulates: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.accumulates = accumulates
        self.timeline: list[MemoryBreakdown] = []
        self._now = [0] * len(MemoryBreakdown._fields)
        # Kind, bytes, and a reference that calls _drop when it dies, by the address of a storage.
        self._held: dict[int, tuple[int, int, weakref.ref[Any]]] = {}
        self.updates = False

    def begin_update(self) -> None:
        """Count what is made from now on as temporaries of the optimizer's update."""
        self.updates = True

    def end_step(self) -> None:
        """Take note that what follows is an evaluation."""

    def add(self, kind: int, *tensors: Tensor) -> None:
        """Count the storages of tensors as a kind, also those that were counted as another."""
        # Quantized tensors and other wrappers hold several plain ones.
        parts = [part for tensor in tensors for part in tensor_facts.inner_tensors(tensor)]
        for part in parts:
            storage = part.untyped_storage()
            key = storage._cdata
            size = storage.nbytes()
            if key in self._held:
                self._drop(key)
            size += -size % (CUDA_BLOCK if part.is_cuda else self.block)
            reference = weakref.ref(storage, lambda _, key=key: self._drop(key))
            self._held[key] = kind, size, reference
            self._now[kind] += size

    def _drop(self, key: int) -> None:
        kind, size, _ = self._held.pop(key)
        self._now[kind] -= size

    def gradients_of(self, params: Sequence[Tensor]) -> module_tape.ModuleTape:
        """Return a context in which a parameter's complete gradient is counted as one."""
        tape = module_tape.ModuleTape()
        for p in params:
            tape.watch_gradient(p, lambda p: self.add(GRADIENTS, p.grad))  # type: ignore[arg-type]
        return tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = TEMPORARIES if module_tape.is_in_backward() or self.updates else self.kind
        made = tensors_in(result)
        self.add(kind, *(t for t in made if t.untyped_storage()._cdata not in self._held))
        # The workspace is freed when the operator returns: it counts at this moment alone.
        now = list(self._now)
        now[TEMPORARIES] += self.workspace(func, args, kwargs or {}, result)
        self.timeline.append(MemoryBreakdown(*now))
        return result

    def workspace(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> int:
        """Return the bytes that a kernel takes for itself in a call, see workspace_bytes."""
        return workspace_bytes(func, args, kwargs, result, self.accumulates)


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
    inputs = tensors_in((args, kwargs))
    if not inputs or inputs[0].device.type not in ("cpu", "meta"):
        return 0
    name = func.name().partition("::")[2].partition(".")[0]
    dtype = inputs[0].dtype
    if accumulates and name in KERNELS and dtype is torch.float16:
        outputs = tensors_in(result)
        output_halves = sum(t.numel() for t in outputs if t.dtype is torch.float16)
        input_halves = sum(t.numel() for t in inputs if t.dtype is torch.float16)
        # The float32 kernel has returned, and freed its workspace, before its result is rounded to
        # float16: the rounded result takes part of that memory.
        workspace = _convolution(name, args, result, torch.float32) - 2 * output_halves
        return 4 * (output_halves + input_halves) + max(0, workspace)
    if name.startswith("convolution"):
        return _convolution(name, args, result, dtype)
    if name == "_foreach_norm":
        # The dtype that the norm is computed in is its last argument, and may be left out.
        norm_dtype = [*args, *kwargs.values()][-1]
        if norm_dtype not in (torch.float32, torch.float64):
            return 0
        # One tensor of the list is cast at a time.
        casts = [t.numel() for t in inputs if t.dtype is not norm_dtype]
        return max(casts, default=0) * norm_dtype.itemsize
    if name == "optimizer_update_8bit_blockwise":
        return 4 * _UPDATE_COPIES * args[1].numel()
    if name == "int8_scaled_mm":
        return 4 * _INT8_PRODUCT_COPIES * result.numel()
    if name == "quantize_4bit":
        return _PACKING_BYTES * args[0].numel()
    if name.rstrip("_") in _ARITHMETIC:
        # A trailing underscore: the operator writes to its first tensor.
        return _cast(inputs, into=dtype if name.endswith("_") else None)
    return 0


def _cast(inputs: Sequence[Tensor], into: torch.dtype | None) -> int:
    """Return the bytes of the casts in arithmetic on several dtypes.

    Operands are cast to the widest dtype first, and the result last to that of the tensor that it
    is written to.
    """
    # Tensors without dimensions are scalars to torch's type promotion: they widen nothing.
    dtypes = (t.dtype for t in inputs if t.ndim)
    wide = reduce(torch.promote_types, dtypes, inputs[0].dtype)
    elements = sum(t.numel() for t in inputs if t.dtype is not wide)
    if into not in (None, wide):
        elements += inputs[0].numel()
    return elements * wide.itemsize


def _convolution(name: str, args: Sequence[Any], result: Any, dtype: torch.dtype) -> int:
    """Return the workspace of a convolution in bytes; 0 for other operators.

    Args:
        name: of the operator.
        args: of the call.
        result: what the call returned.
        dtype: that the kernel computes in.
    """
    if name not in ("convolution", "convolution_backward"):
        return 0
    is_backward = name == "convolution_backward"
    # The backward's arguments are those of the forward after the gradient of the output.
    output, inputs, weight, _, stride, padding = (args if is_backward else (result, *args))[:6]
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
