"""Share a run among the processes of a torch.distributed group."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.core import ConfigError, RunnerError, Strategy, torchrun

# Texts of the RuntimeErrors that gloo raises when another process has ended; NCCL raises DistError.
_LOST_CONNECTION = re.compile(
    r"onnection (closed|reset)|Broken pipe|gloo.*(timed out|Timed out)", re.I
)


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
        self._control = None
        # The reduction that all_reduce_max_async has started last: its result, and the work.
        self._pending_max = None

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
        values = None
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


_sessions = itertools.count()


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
