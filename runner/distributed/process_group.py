"""Base class of the DDP and FSDP strategies: process group, collectives, lost peers.

The backend is gloo for tensors on CPUs and NCCL for tensors on GPUs.
"""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.distributed import torchrun
from runner.distributed.strategy import Strategy
from runner.utils.errors import ConfigError, RunnerError

_sessions = itertools.count()
_LOST = re.compile(r"onnection (closed|reset)|Broken pipe|gloo.*(timed out|Timed out)", re.I)


class PeerLost(RunnerError):
    """Another process of the run has ended. Exit status 1."""

    exit_status = 1

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(
            f"process {rank}: the connection to another process of the run broke ({reason}). It "
            "was killed or has failed: see what it said, and ranks/<number>/error.txt."
        )


class ProcessGroupStrategy(Strategy):
    """What the strategies of several processes share.

    Args:
        timeout: seconds after which a process that waits for another one gives up.
    """

    def __init__(self, timeout: float = 1800.0) -> None:
        super().__init__()
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be above 0")
        self.timeout = timedelta(seconds=timeout)
        self._control: dist.ProcessGroup | None = None
        self._asked: tuple[Tensor, dist.Work | None] | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        if not torchrun.is_torchrun():
            raise ConfigError(
                f"strategy={self.name} needs processes, which torchrun starts: torchrun "
                "--standalone --nproc-per-node <GPUs or processes> -m runner "
                f"strategy={self.name} ... For one process leave strategy= out."
            )
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(self.place.local_rank % torch.cuda.device_count())
        here = self.place
        keys = f"runner/{here.restart}/{next(_sessions)}"  # of its own: what was there stays
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            timeout=self.timeout,
            rank=here.rank,
            world_size=here.world_size,
            store=dist.PrefixStore(keys, torchrun.rendezvous_store(here)),
        )
        try:
            group = dist.new_group(backend="gloo", timeout=self.timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._control = group
            yield
            if self._asked and self._asked[1]:
                self._asked[1].wait()
            dist.barrier(self._control)
        except RuntimeError as error:
            if _LOST.search(str(error)) or isinstance(error, dist.DistError):
                raise PeerLost(self.place.rank, str(error).partition("\n")[0]) from error
            raise
        finally:
            self._asked = self._control = None
            dist.destroy_process_group()

    def device(self, device: torch.device) -> torch.device:
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"strategy={self.name} runs on CPUs and CUDA GPUs, not on {device.type}. Leave "
                "torchrun and strategy= out."
            )
        if device.type == "cpu":
            return device
        if self.place.local_rank >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"torchrun started more processes on this machine than it has GPUs ({count}). Type "
                f"--nproc-per-node {count}, or accelerator=cpu."
            )
        return torch.device("cuda", self.place.local_rank)

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def all_reduce_max_async(self, number: int) -> int:
        before = self._asked
        flag = torch.tensor(number)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._control, async_op=True)
        self._asked = flag, work
        if before is None:
            return 0
        if before[1] is not None:
            before[1].wait()
        return int(before[0])

    def all_reduce_max(self, number: int) -> int:
        flag = torch.tensor(number)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._control)
        return int(flag)

    def gather_object(self, value: Any) -> list[Any]:
        found: list[Any] | None = [None] * self.place.world_size if self.place.is_main else None
        dist.gather_object(value, found, group=self._control)
        return found or []

    def broadcast_object(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, group=self._control)
        return values[0]

    def broadcast_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
