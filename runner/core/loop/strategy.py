"""The strategy contract: how the processes of a run train one model together.

`train.batch_size` counts the examples of a micro-batch over all processes, and each process takes
its slice of them, so that the same command has the same losses on any number of processes. Most
methods are collective: all processes call them in the same order, or none does.

ProcessGroupStrategy is the base of DDP and FSDP: process group, collectives, lost connections. Its
backend is gloo for tensors on CPUs and NCCL for tensors on GPUs.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from runner.core.base.errors import ConfigError
from runner.core.base.torchrun import ProcessRank, process_rank

_NOTHING = nullcontext()


class Strategy(ABC):
    """Contract: how several processes train one model.

    Attributes:
        name: the name of its yaml.
        rank: of this process.
        shards: whether each process holds a shard of the weights only.
        reduce_dtype: name of the dtype in which gradients are added; None: float32, or their own
            dtype where it is wider.
        cpu_ram_efficient_loading: whether only the main process makes the weights of a sharded
            model, and the others receive their shards; else each makes all weights in its host's
            memory.
    """

    name: ClassVar[str]
    shards: ClassVar[bool] = False
    reduce_dtype: str | None = None
    cpu_ram_efficient_loading: bool = True

    def __init__(self) -> None:
        self.rank: ProcessRank = process_rank()

    @abstractmethod
    def session(self) -> AbstractContextManager[object]:
        """Return the context around the run, in which the processes are connected.

        Raises:
            ConfigError: the strategy cannot run with the number of processes that was started.
        """

    def device(self, device: torch.device) -> torch.device:
        """Return the device of this process, where each process has its own."""
        return device

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model as the loop calls it.

        Called once, after conversion and before the optimizer exists; it may replace parameters.
        A strategy that shards is called before the trial forward, and the weights may be on the
        host or on the meta device.

        Args:
            model: converted.
            device: of this process, where the model computes.
        """
        return model

    def describe(self) -> str:
        """Return one line about the dtypes in which it sends weights and gradients, if a setting
        chose one; else an empty string."""
        return ""

    def accumulating(self, last: bool) -> AbstractContextManager[object]:
        """Return the context around a micro-batch's forward and backward.

        Gradients are reduced in the last micro-batch of a step only.
        """
        return _NOTHING

    def drop_gathered_weights(self) -> None:
        """Drop the copies of whole weights that a forward left, before weights are overwritten."""

    def local_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the shard of each tensor that this process holds."""
        return tensors

    def reduce_found_inf(self, flag: Tensor | None) -> Tensor | None:
        """Return the found-inf flag, raised if that of any process is."""
        return flag

    def reduce_norms(self, norms: Tensor) -> Tensor:
        """Return the 2-norms of full tensors from those of this process's shards."""
        return norms

    def sum(self, values: Tensor) -> Tensor:
        """Add values over the processes, in the dtype of the values."""
        return values

    def all_reduce_max_async(self, number: int) -> int:
        """Return the maximum over the processes of the numbers of the previous call.

        The reduction of this call's numbers is started and nobody waits for it. The first call
        returns 0.
        """
        return number

    def all_reduce_max(self, number: int) -> int:
        """All-reduce the maximum of a number and wait for the result."""
        return number

    def gather_object(self, value: Any) -> list[Any]:
        """Return the values of all processes on the main one, an empty list on the others."""
        return [value]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, in their order and on this one's device.

        They may differ in their first dimension. An empty one takes dtype and shape of the others.
        """
        return [tensor]

    def join_examples(self, tensor: Tensor, size: int) -> Tensor:
        """Return the examples of all processes in the order of their batch; gradients follow.

        Args:
            tensor: this process's share of a batch, [examples, ...].
            size: examples of the batch.
        """
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        """Return the value of the main process."""
        return value

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return full parameters and buffers by name; sharded ones on the main process only."""
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy the main process's buffers (running statistics) to all processes."""


class Single(Strategy):
    """One process."""

    name = "single"

    def session(self) -> AbstractContextManager[object]:
        if self.rank.world_size > 1:
            raise ConfigError(
                f"torchrun started {self.rank.world_size} processes, and "
                "strategy=single is for one. Type strategy=ddp (every process has the whole model) "
                "or strategy=fsdp (a part)."
            )
        return _NOTHING
