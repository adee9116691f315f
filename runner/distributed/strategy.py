"""The strategy contract: what the step, the loop and the checkpoints ask of the processes of a run.

`train.batch_size` counts the examples of a micro-batch over all processes, each of which takes its
part: so the same command has the same losses on any number of them. What they agree on, they agree
on in the same order: every method but the properties is called by all of them or by none.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from runner.distributed.torchrun import ProcessRank, process_rank
from runner.utils.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NOTHING = nullcontext()


def is_sharded(value: object) -> TypeGuard["DTensor"]:
    """Whether it is a tensor of which each process holds a part. Without an import of DTensor,
    which costs every run more than a second."""
    return isinstance(value, Tensor) and hasattr(value, "to_local")


class Strategy(ABC):
    """How several processes train one model.

    Attributes:
        name: the name of its yaml.
        place: this process among them.
        shards: each process holds a part of the weights only.
    """

    name: ClassVar[str]
    shards: ClassVar[bool] = False

    def __init__(self) -> None:
        self.place: ProcessRank = process_rank()

    @abstractmethod
    def session(self) -> AbstractContextManager[object]:
        """Context around the run, in which the processes are connected.

        Raises:
            ConfigError: the processes that there are do not fit.
        """

    def device(self, device: torch.device) -> torch.device:
        """The one of this process, where each has one."""
        return device

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model as the loop calls it. Called once, after conversion and before the optimizer
        exists; parameters may be other ones afterwards."""
        return model

    def accumulating(self, last: bool) -> AbstractContextManager[object]:
        """Context around a micro-batch's forward and backward; only the last one of a step has its
        gradients reduced."""
        return _NOTHING

    def local_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """What this process holds of each."""
        return tensors

    def reduce_found_inf(self, flag: Tensor | None) -> Tensor | None:
        """A found-inf flag, raised if any process's is."""
        return flag

    def reduce_norms(self, norms: Tensor) -> Tensor:
        """2-norms of whole tensors from those of this process's parts."""
        return norms

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the processes, in the dtype of the values."""
        return values

    def all_reduce_max_async(self, number: int) -> int:
        """The largest number that any process has given, in the call before this one: nobody waits
        for it."""
        return number

    def all_reduce_max(self, number: int) -> int:
        """The same, of this very call."""
        return number

    def gather_object(self, value: Any) -> list[Any]:
        """Every process's value, on the first one."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """The first process's value."""
        return value

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Parameters and buffers, whole, each once, on the host of the first process."""
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Has every process hold the first one's buffers (running statistics)."""


class Single(Strategy):
    """One process."""

    name = "single"

    def session(self) -> AbstractContextManager[object]:
        if self.place.world_size > 1:
            raise ConfigError(
                f"torchrun started {self.place.world_size} processes, and "
                "strategy=single is for one. Type strategy=ddp (every process has the whole model) "
                "or strategy=fsdp "
                "(a part)."
            )
        return _NOTHING
