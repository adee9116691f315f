"""Apply an update rule to the 16-bit tensors that a model's own forward writes.

A teacher that follows by a moving average, or a counter, loses what is below half a unit in the
last place, as an optimizer's weights do. Each operation that writes such a tensor in place runs on
its float32 numbers here, which are stored by the rule; operations that only read it are unchanged.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from runner.precision.weight_updates import (
    STORES,
    Kahan,
    MasterWeights,
    Remainders,
    SteppedWeights,
    WeightStore,
)
from runner.utils.tensors import memory_of


class WideForward(TorchDispatchMode):
    """A context around forwards, not compiled, whose writes to some tensors follow a rule.

    Args:
        model: its 16-bit buffers and frozen weights are those tensors.
        rule: one of runner.precision.weight_updates.UPDATE_RULES but nearest.

    Attributes:
        kept: what the rule keeps beside each tensor that was written, by name; empty tensors for
            stochastic rounding.
    """

    def __init__(self, model: nn.Module, rule: str) -> None:
        super().__init__()
        self._tensors: dict[int, tuple[str, Tensor, WeightStore]] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        named = [*model.named_buffers(), *model.named_parameters()]
        counts = Counter(memory_of(tensor) for _, tensor in named)
        for name, tensor in named:
            memory = memory_of(tensor)  # 0 of one without elements
            # Tensors that share a storage would each need what is kept beside the other.
            if memory and counts[memory] == 1 and _is_narrow(tensor) and not tensor.requires_grad:
                store = STORES[rule]
                if store is MasterWeights:
                    # A copy would not follow what is written elsewhere; these are beside the value.
                    store = Remainders if tensor.dtype is torch.bfloat16 else Kahan
                self._tensors[memory] = (name, tensor.detach(), store())
        self.kept: dict[str, Tensor] = {}

    def seed(self, seed: int, step: int) -> None:
        """Seed the draws of a step: processes that hold the same tensors round them alike.

        Args:
            seed: of the run, the same in all processes.
            step: number of the step.
        """
        step_seed = ~(seed * 1_000_003 + step) % 2**63  # not that of the optimizer's step
        for device in {tensor.device for _, tensor, _ in self._tensors.values()}:
            self._generators[device] = torch.Generator(device).manual_seed(step_seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        targets = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        # What is copied was computed in 16 bits before.
        is_update = func._schema.is_mutable and "copy_" not in func.__name__
        written = {memory_of(target) for target in targets} if is_update else set()
        stepped = {key: self._widened(*self._tensors[key]) for key in written & {*self._tensors}}
        if not stepped:
            return func(*args, **kwargs)

        def widen(value: Any) -> Any:
            if memory_of(value) in stepped:
                (wide,), (base,) = stepped[memory_of(value)].wide, stepped[memory_of(value)].weights
                offset = value.storage_offset() - base.storage_offset()
                return wide.as_strided(value.size(), value.stride(), offset)
            return value.float() if _is_narrow(value) else value

        result = func(*tree_map(widen, args), **tree_map(widen, kwargs))
        for key, one in stepped.items():
            self._tensors[key][2].store(one)
        # An operation on lists returns nothing.
        return None if result is None else args[0]

    def _widened(self, name: str, tensor: Tensor, store: WeightStore) -> SteppedWeights:
        if name not in self.kept:
            state = store.new_state(tensor)
            self.kept[name] = tensor.new_empty(0) if state is None else state
        kept = [self.kept[name]]
        generator = self._generators.get(tensor.device)
        return SteppedWeights([tensor], kept, store.widen([tensor], kept), generator)


def _is_narrow(value: Any) -> bool:
    is_plain = type(value) in (Tensor, nn.Parameter)  # no shard
    return is_plain and value.itemsize == 2 and value.is_floating_point()
