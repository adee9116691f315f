"""Read how much memory there is, and estimate after a failure how much a step takes."""

import gc
import resource
import traceback
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from runner.data.loader import Batch, Loader
from runner.training.state import TrainState
from runner.training.step import loss_of
from runner.utils.tensors import stored_bytes, tensor_bytes

USABLE_MEMORY_SHARE = 0.8
"""Share of the free memory that an estimate may use: allocators leave gaps, libraries load late."""
_EIGHT_BIT_STATE_SHARE = 0.27
"""8 bits in place of 32, and the scales of the blocks that share one."""
_CGROUPS = ("memory.max", "memory/memory.limit_in_bytes")  # of version 2 and of version 1


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes that a step takes.

    Attributes:
        weights, gradients, state: of the model and its optimizers.
        fixed: of the step, whatever the batch size.
        example: for each example of a micro-batch.
        other: taken before the first step, the weights left out.
    """

    weights: float
    gradients: float
    state: float
    fixed: float
    example: float
    other: float

    def total(self, examples: int) -> float:
        """Return the bytes of a step with micro-batches of so many examples."""
        parts = self.weights + self.gradients + self.state + self.fixed + self.other
        return parts + self.example * examples

    def with_half_width(self, mixed: bool) -> "MemoryEstimate":
        """Return the estimate with numbers of half the width.

        Args:
            mixed: activations have half the width already, as in a mixed precision.
        """
        names = ["weights", "gradients", "state"]
        if not mixed:
            names.append("example")
        return replace(self, **{name: getattr(self, name) / 2 for name in names})

    def with_8bit_optimizer(self) -> "MemoryEstimate":
        """Return the estimate with an 8-bit optimizer."""
        return replace(self, state=self.state * _EIGHT_BIT_STATE_SHARE)


def memory_limit(device: torch.device) -> tuple[float, float]:
    """Return the bytes in use, this run's tensors included, and the tightest limit, in bytes."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        # Blocks that this process's allocator holds without a tensor in them can be used again.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return whole - free - unused, whole
    memory = psutil.Process().memory_info()
    # `ulimit -v` limits addresses, not pages that are in memory: it is compared with those.
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        return memory.vms, soft
    whole = psutil.virtual_memory().total
    for name in _CGROUPS:
        with suppress(OSError, ValueError):  # no such file, or "max" in it
            whole = min(whole, int(Path("/sys/fs/cgroup", name).read_text()))
    return memory.rss, whole


def free_memory(device: torch.device) -> float:
    """Return the bytes that a run may still take: the tighter of its limit and the machine's."""
    taken, whole = memory_limit(device)
    # Of a GPU the driver reports what other processes take, too.
    if device.type == "cuda":
        return whole - taken
    return max(0, min(whole - taken, psutil.virtual_memory().available))


def estimate_step_memory(
    state: TrainState, error: BaseException, loader: Loader, other: float, compiled: bool
) -> MemoryEstimate | None:
    """Estimate the memory of the step that failed, and free the tensors that it holds.

    Activations are measured on two and on four examples, and extrapolated.

    Args:
        state: whose step failed.
        error: that ended the step; the frames of its traceback are cleared.
        loader: yields the training batches.
        other: bytes that were taken before the first step, the weights left out.
        compiled: the model is compiled.

    Returns:
        The estimate; None where even so few examples find no memory.
    """
    # The frames of the failed step hold its activations alive.
    traceback.clear_frames(error.__traceback__)
    weights = stored_bytes(state.model)
    gradients = tensor_bytes(*state.trainable_parameters)
    optimizer_state = tensor_bytes(*state.optimizer_tensors())
    for parameter in state.trainable_parameters:
        parameter.grad = None
    gc.collect()
    # Compiled code would be compiled again for each size, which takes minutes, and memory.
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    # Whatever fails here, the message about the first failure must still be written.
    with suppress(Exception), eager:
        batch = next(loader.epoch(0))
        few = min(2, loader.batch_size // 2)
        small = _activation_bytes(state, batch, few)
        large = _activation_bytes(state, batch, 2 * few)
        example = (large - small) / few
        return MemoryEstimate(
            weights,
            gradients,
            optimizer_state or _expected_state_bytes(state),
            small - few * example,
            example,
            other,
        )
    return None


def _activation_bytes(state: TrainState, batch: Batch, examples: int) -> int:
    """Return the bytes that a forward keeps for its backward.

    Twice the largest tensor is added, for what the backward itself makes.
    """
    own = {t.data_ptr() for t in (*state.model.parameters(), *state.model.buffers())}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Weights are counted elsewhere, and views of one storage count once.
        if tensor.data_ptr() not in own:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    few = tree_map(lambda value: value[:examples] if isinstance(value, Tensor) else value, batch)
    state.model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(state, *few)
    del loss
    return sum(sizes.values()) + 2 * max(sizes.values(), default=0)


def _expected_state_bytes(state: TrainState) -> float:
    """Return the bytes that the optimizers will hold after their first step."""
    total = 0.0
    for scheduled in state.optimizers:
        group = scheduled.optimizer.param_groups[0]
        # Options show the averages: two in Adam's family, one in SGD with momentum.
        averages = 2 if "betas" in group else bool(group.get("momentum"))
        total += averages * tensor_bytes(*scheduled.params)
    return total


def divisors(size: int) -> Iterator[int]:
    """Return the divisors of a size, the largest first."""
    return (n for n in range(size, 0, -1) if size % n == 0)
