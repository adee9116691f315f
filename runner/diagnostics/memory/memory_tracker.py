"""Track what a step holds in memory after each operator, by kind, on real and fake tensors."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.diagnostics.memory.kernel_workspace import workspace_bytes
from runner.utils.module_tape import ModuleTape, is_in_backward
from runner.utils.tensors import inner_tensors

_CUDA_BLOCK = 512
"""Bytes that CUDA's allocator rounds up to (c10/cuda/CUDACachingAllocator.cpp)."""


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
        accumulates: see runner.diagnostics.memory.kernel_workspace.workspace_bytes.
    """

    def __init__(self, kind: int = ACTIVATIONS, accumulates: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.accumulates = accumulates
        self.timeline: list[MemoryBreakdown] = []
        self._now = [0] * len(MemoryBreakdown._fields)
        # By the address of a storage: kind, bytes, and a reference that calls _drop when it dies.
        self._held: dict[int, tuple[int, int, weakref.ref[Any]]] = {}
        self._updates = False

    def begin_update(self) -> None:
        """Count what is made from now on as temporaries of the optimizer's update."""
        self._updates = True

    def add(self, kind: int, *tensors: Tensor) -> None:
        """Count the storages of tensors as a kind, also those that were counted as another."""
        # Quantized tensors and other wrappers hold several plain ones.
        parts = [part for tensor in tensors for part in inner_tensors(tensor)]
        for part in parts:
            storage = part.untyped_storage()
            key = storage._cdata
            size = storage.nbytes()
            if key in self._held:
                self._drop(key)
            if part.is_cuda:
                size += -size % _CUDA_BLOCK
            reference = weakref.ref(storage, lambda _, key=key: self._drop(key))
            self._held[key] = kind, size, reference
            self._now[kind] += size

    def _drop(self, key: int) -> None:
        kind, size, _ = self._held.pop(key)
        self._now[kind] -= size

    def gradients_of(self, params: Sequence[Tensor]) -> ModuleTape:
        """Return a context in which a parameter's complete gradient is counted as one."""
        tape = ModuleTape()
        for p in params:
            tape.watch_gradient(p, self._gradient)
        return tape

    def _gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.add(GRADIENTS, parameter.grad)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = TEMPORARIES if is_in_backward() or self._updates else self.kind
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.add(kind, *(t for t in leaves if t.untyped_storage()._cdata not in self._held))
        # The workspace is freed when the operator returns: it counts at this moment alone.
        now = list(self._now)
        now[TEMPORARIES] += workspace_bytes(func, args, kwargs or {}, result, self.accumulates)
        self.timeline.append(MemoryBreakdown(*now))
        return result
