"""The strategy contract: how the processes of a run train one model together.

`train.batch_size` counts the examples of a micro-batch over all processes, and each process takes
its slice of them, so that the same command has the same losses on any number of processes. Most
methods are collective: all processes call them in the same order, or none does.

ProcessGroupStrategy is the base of DDP and FSDP: process group, collectives, lost connections. Its
backend is gloo for tensors on CPUs and NCCL for tensors on GPUs.
"""

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.core.base import torchrun
from runner.core.base.errors import ConfigError, RunnerError
from runner.core.base.torchrun import ProcessRank, process_rank

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NOTHING = nullcontext()


def is_sharded(value: object) -> TypeGuard["DTensor"]:
    """Return whether a value is a DTensor, of which each process holds a shard."""
    # Importing DTensor for isinstance would cost every run more than a second.
    return isinstance(value, Tensor) and hasattr(value, "to_local")


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


_sessions = itertools.count()
# Texts of the RuntimeErrors that gloo raises when another process has ended; NCCL raises DistError.
_LOST_CONNECTION = re.compile(
    r"onnection (closed|reset)|Broken pipe|gloo.*(timed out|Timed out)", re.I
)


class PeerLost(RunnerError):
    """Another process of the run has ended. Exit status 1."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(
            f"process {rank}: the connection to another process of the run broke ({reason}). It "
            "was killed or has failed: see what it said, and ranks/<number>/error.txt."
        )


class _Summed(torch.autograd.Function):
    """The sum of a tensor over all processes, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        whole = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _Summed.forward(ctx, *grads)


class ProcessGroupStrategy(Strategy):
    """Base class of the strategies of several processes: their process group and collectives.

    Args:
        timeout: seconds after which a process that waits for another one gives up.
    """

    def __init__(self, timeout: float = 1800.0) -> None:
        super().__init__()
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be above 0")
        self.timeout = timedelta(seconds=timeout)
        self._control: dist.ProcessGroup | None = None
        # The reduction that all_reduce_max_async has started last: its result, and the work.
        self._pending_max: tuple[Tensor, dist.Work | None] | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        if not torchrun.is_torchrun():
            raise ConfigError(
                f"strategy={self.name} needs processes, which torchrun starts: torchrun "
                "--standalone --nproc-per-node <GPUs or processes> -m runner "
                f"strategy={self.name} ... For one process leave strategy= out."
            )
        has_cuda = torch.cuda.is_available()
        if has_cuda:
            # NCCL takes the current device; accelerator=cpu may run more processes than GPUs.
            torch.cuda.set_device(self.rank.local_rank % torch.cuda.device_count())
        rank = self.rank
        # The store keeps the keys of earlier sessions and restarts: each session has a prefix.
        prefix = f"runner/{rank.restart}/{next(_sessions)}"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_cuda else "gloo",
            timeout=self.timeout,
            rank=rank.index,
            world_size=rank.world_size,
            store=dist.PrefixStore(prefix, torchrun.rendezvous_store(rank)),
        )
        try:
            # The flag of a stop and other objects of the host go over gloo between the hosts.
            group = dist.new_group(backend="gloo", timeout=self.timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._control = group
            yield
            if self._pending_max and self._pending_max[1]:
                self._pending_max[1].wait()
            # No process leaves while another one still needs its connection.
            dist.barrier(self._control)
        except RuntimeError as error:
            if _LOST_CONNECTION.search(str(error)) or isinstance(error, dist.DistError):
                raise PeerLost(self.rank.index, str(error).partition("\n")[0]) from error
            raise
        finally:
            self._pending_max = None
            self._control = None
            dist.destroy_process_group()

    def device(self, device: torch.device) -> torch.device:
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"strategy={self.name} runs on CPUs and CUDA GPUs, not on {device.type}. Leave "
                "torchrun and strategy= out."
            )
        if device.type == "cpu":
            return device
        count = torch.cuda.device_count()
        if self.rank.local_rank >= count:
            raise ConfigError(
                f"torchrun started more processes on this machine than it has GPUs ({count}). Type "
                f"--nproc-per-node {count}, or accelerator=cpu."
            )
        return torch.device("cuda", self.rank.local_rank)

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def all_reduce_max_async(self, number: int) -> int:
        previous = self._pending_max
        maximum = torch.tensor(number)
        work = dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self._control, async_op=True)
        self._pending_max = (maximum, work)
        if previous is None:
            return 0
        previous_maximum, previous_work = previous
        if previous_work is not None:
            previous_work.wait()
        return int(previous_maximum)

    def all_reduce_max(self, number: int) -> int:
        maximum = torch.tensor(number)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self._control)
        return int(maximum)

    def gather_object(self, value: Any) -> list[Any]:
        # torch takes a list on the receiving process, and None on the others.
        values: list[Any] | None = None
        if self.rank.is_main:
            values = [None] * self.rank.world_size
        dist.gather_object(value, values, group=self._control)
        return values or []

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        parts: list[Any] = [None] * self.rank.world_size
        dist.all_gather_object(parts, tensor.cpu(), group=self._control)
        like = next((part for part in parts if part.numel()), parts[0])
        empty = like.new_empty((0, *like.shape[1:]))
        return [(part if part.numel() else empty).to(tensor.device) for part in parts]

    def join_examples(self, tensor: Tensor, size: int) -> Tensor:
        share = self.rank.batch_slice(size)
        # A process without a share has another process's example, only to have a batch. NCCL and
        # gloo do not add booleans.
        own = tensor[: share.stop - share.start]
        own = own.to(torch.uint8) if own.dtype is torch.bool else own
        whole = own.new_zeros((size, *own.shape[1:]))
        summed = _Summed.apply(whole.slice_scatter(own, start=share.start, end=share.stop))
        return summed.to(tensor.dtype)  # type: ignore[no-any-return]

    def broadcast_object(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, group=self._control)
        return values[0]

    def broadcast_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
