"""The state of a run: everything that changes while it trains."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from runner.distributed.strategy import Single, Strategy
from runner.precision.loss_scale import HostFlag, LossScale
from runner.precision.precision import Precision
from runner.training.sparse_gradients import sparse_parameters
from runner.training.tasks.task import Task


@dataclass
class ScheduledOptimizer:
    """An optimizer with its schedule and its own parameters.

    Attributes:
        optimizer: over a part of the model's parameters, or all of them.
        scheduler: counts applied steps; None for a constant learning rate.
        pending_found_inf: the found-inf flag of the last step until the schedule has read it. A
            schedule counts applied steps only, and reading the flag at once would stall the host.
        params: the optimizer's parameters, in the order of its groups.
    """

    optimizer: Optimizer
    scheduler: Any = None
    pending_found_inf: HostFlag | None = None
    params: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.params = [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def advance_schedule(self) -> None:
        """Advance the schedule if the last step was applied, waiting for its found-inf flag."""
        if self.pending_found_inf is not None and not self.pending_found_inf.is_set:
            self.scheduler.step()
        self.pending_found_inf = None


@dataclass
class TrainState:
    """What a step changes.

    Attributes:
        step: attempted optimizer steps.
        epoch: passes begun.
        position: micro-batches of this pass that were taken.
        skipped: steps skipped, as far as the records have arrived.
        evaluated: the step of the last evaluation.
        stagnant: share of elements that the last step left where they were, see
            evaluation.Stagnation.
        before_update: called before weights and optimizer state change.
    """

    model: nn.Module
    precision: Precision
    task: Task
    scale: LossScale
    optimizers: list[ScheduledOptimizer]
    device: torch.device
    clip_norm: float | None = None
    strategy: Strategy = field(default_factory=Single)
    step: int = 0
    epoch: int = 0
    position: int = 0
    skipped: int = 0
    evaluated: int = 0
    stagnant: float | None = None
    before_update: Callable[[], None] | None = None

    @property
    def plain_model(self) -> nn.Module:
        """Return the module inside the wrappers of torch.compile and DDP."""
        model = getattr(self.model, "_orig_mod", self.model)
        return model.module if isinstance(model, DistributedDataParallel) else model

    @cached_property
    def trainable(self) -> list[Tensor]:
        return [p for d in self.optimizers for p in d.params]

    @cached_property
    def complex(self) -> list[Tensor]:
        return [p for p in self.trainable if p.is_complex()]

    @cached_property
    def sparse(self) -> list[Tensor]:
        """Return the parameters whose gradients are sparse."""
        return [*sparse_parameters(self.plain_model).values()]

    @cached_property
    def takes_closure(self) -> bool:
        """Return whether the only optimizer evaluates the loss by itself, as LBFGS does."""
        return len(self.optimizers) == 1 and isinstance(
            self.optimizers[0].optimizer, torch.optim.LBFGS
        )

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the optimizers' state."""
        for d in self.optimizers:
            for values in d.optimizer.state.values():
                yield from (v for v in values.values() if isinstance(v, Tensor))
