"""Blocks of step records on their way from the device to the host."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from runner.distributed.strategy import Single, Strategy
from runner.training.records import StepRecord, Steps
from runner.training.state import TrainState
from runner.training.step import DeviceStepRecord
from runner.utils.tensors import widest_float


class RecordBuffer:
    """Steps that the host has not seen yet: those of the block in the making, and the blocks that
    are under way. started is perf_counter() when the first step in the making began."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.started = perf_counter()
        self._pending: list[DeviceStepRecord] = []
        self._under_way: deque[HostTransfer] = deque()

    def add(self, step: DeviceStepRecord) -> None:
        self._pending.append(step)

    def send(self) -> None:
        """Ends the block in the making and has it copied."""
        gauges = self.state.precision.gauges(self.state.plain_model)
        self._under_way.append(
            HostTransfer(self._pending, self.started, gauges, self.state.strategy)
        )
        self.started, self._pending = self._pending[-1].ended, []

    def ready_records(self) -> Iterator[Steps]:
        """Blocks that are here, and all but the last one sent: in order."""
        while len(self._under_way) > 1 or (self._under_way and self._under_way[0].is_ready):
            yield self._next()

    def flush(self) -> Iterator[Steps]:
        """Every block, the one in the making too. The last step has then lasted until the device
        was done with it: this wait is counted nowhere else."""
        if self._pending:
            self.send()
        if self._under_way:
            self.started = self._under_way[-1].wait()
        while self._under_way:
            yield self._next()

    def _next(self) -> Steps:
        block = self._under_way.popleft().records(self.state.skipped)
        self.state.skipped = block[-1].skipped_steps or 0
        return block


class HostTransfer:
    """The records of a block on their way to the host, in copies that nothing waits for.

    Args:
        pending: steps in order.
        started: perf_counter() when the first of them began.
        gauges: what the precision shows at the last of them, scalars on the device.
        strategy: of the processes that the steps were taken by.
    """

    def __init__(
        self,
        pending: Sequence[DeviceStepRecord],
        started: float,
        gauges: Mapping[str, Tensor] = {},
        strategy: Strategy | None = None,
    ) -> None:
        self.pending, self.started, self.gauges = [*pending], started, [*gauges]
        self._event: torch.cuda.Event | None = None
        self._values, self._shown = _columns(pending, strategy or Single()), torch.empty(0)
        if gauges:
            self._shown = torch.stack([g.detach().float() for g in gauges.values()])
        if self._values.device.type == "cuda":
            self._values, self._shown = _pinned(self._values), _pinned(self._shown)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Whether records() would not have to wait."""
        return self._event is None or self._event.query()

    def wait(self) -> float:
        """Waits for the values, as a part of the last step; returns perf_counter() then."""
        if self._event is not None:
            self._event.synchronize()
        self._values = self._values.cpu()
        self.pending[-1] = self.pending[-1]._replace(ended=perf_counter())
        return self.pending[-1].ended

    def records(self, skipped: int) -> Steps:
        """The block, once it has arrived. skipped: steps skipped before it."""
        if self._event is not None:
            self._event.synchronize()
        values, started, records = self._values.tolist(), self.started, []
        for i, p in enumerate(self.pending):
            step_ms, started = (p.ended - started) * 1e3, p.ended
            scaled: tuple[Any, ...] = ()
            if p.scale is not None:
                skipped += int(values[3][i])
                scaled = (values[2][i], values[3][i], skipped)
            records.append(
                StepRecord(
                    p.step,
                    p.time_ms,
                    p.epoch,
                    values[0][i],
                    p.lr,
                    values[1][i],
                    step_ms,
                    p.examples,
                    *scaled,
                )
            )
        if self.gauges:
            shown = dict(zip(self.gauges, self._shown.tolist(), strict=True))
            records[-1] = records[-1]._replace(gauges=shown)
        return tuple(records)


def _pinned(values: Tensor) -> Tensor:
    """A copy in pinned memory, under way."""
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copy.copy_(values, non_blocking=True)


def _columns(pending: Sequence[DeviceStepRecord], strategy: Strategy) -> Tensor:
    """Loss, gradient norm and, where there is one, scale and found-inf: [2 or 4, len(pending)],
    wide enough to alter none of them, on the device."""
    losses = torch.stack([p.loss for p in pending])
    if len({p.norms.shape for p in pending}) == 1:
        norms = torch.linalg.vector_norm(torch.stack([p.norms for p in pending]), dim=1)
    else:
        norms = torch.stack([torch.linalg.vector_norm(p.norms) for p in pending])
    wide = widest_float(losses.device)
    if strategy.place.world_size > 1:
        losses = strategy.sum(losses.to(wide)) / strategy.place.world_size
    columns = [losses, strategy.reduce_norms(norms)]
    if pending[0].scale is not None:
        columns.append(torch.stack([p.scale for p in pending if p.scale is not None]))
        columns.append(torch.stack([p.found_inf for p in pending if p.found_inf is not None]))
    return torch.stack([column.to(wide) for column in columns])
