"""Collect step records on the device and copy them to the host in blocks, one transfer each.

Reading a value as soon as its step is launched would make the host wait for the device in every
step. So the records of `train.log_every` steps are copied together, and a block is read when the
one after it has been sent. step_metrics.py defines the columns of a block.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor

from runner.distributed.strategy import Single, Strategy
from runner.training.expert_loads import ExpertLoads
from runner.training.records import DeviceStepRecord, StepRecord, Steps
from runner.training.state import TrainState
from runner.training.step_metrics import device_columns


class RecordBuffer:
    """The steps that have not reached the host: those of the current block, and the blocks sent.

    Attributes:
        state: its count of skipped steps is updated as blocks arrive.
    """

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self._expert_loads = ExpertLoads(state.plain_model)
        self._block_start = perf_counter()  # of the first step of the current block
        self._current: list[DeviceStepRecord] = []
        self._sent: deque[HostTransfer] = deque()

    def add(self, step: DeviceStepRecord) -> None:
        """Append a step to the current block."""
        self._current.append(step)

    def restart_clock(self, at: float | None = None) -> None:
        """Let the next step begin now, after work that is no step's, such as an evaluation.

        Args:
            at: another time, of perf_counter().
        """
        self._block_start = perf_counter() if at is None else at

    def send(self) -> None:
        """End the current block and start its copy to the host."""
        shown = self.state.precision.gauges(self.state.plain_model)
        gauges = {**shown, **self._expert_loads.gauges()}
        transfer = HostTransfer(self._current, self._block_start, gauges, self.state.strategy)
        self._sent.append(transfer)
        # Without a gap between blocks, the steps' times add up to the time of the loop.
        self._block_start = self._current[-1].ended_at
        self._current = []

    def ready_records(self) -> Iterator[Steps]:
        """Yield the blocks that can be read without a long wait, in order.

        These are the blocks that have arrived, and all but the last one sent.
        """
        # A wait for all but the last one is short: the device has computed them, and works on the
        # block after them. The host is therefore two blocks ahead of the device at most.
        while len(self._sent) > 1 or (self._sent and self._sent[0].is_ready):
            yield self._next()

    def flush(self) -> Iterator[Steps]:
        """Send the current block, wait for all blocks and yield them, in order.

        The last step then lasts until the device has finished it.
        """
        if self._current:
            self.send()
        if self._sent:
            # The wait belongs to the last step, or the times of the steps would leave it out.
            self._block_start = self._sent[-1].wait()
        while self._sent:
            yield self._next()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._expert_loads.close()

    def _next(self) -> Steps:
        block = self._sent.popleft().records(self.state.skipped)
        # None for a precision without a loss scale, which skips no step.
        self.state.skipped = block[-1].skipped_steps or 0
        return block


class HostTransfer:
    """A block of step records that is being copied to the host.

    Args:
        pending: steps in order, at least one.
        start_time: perf_counter() when the first of them began, in seconds.
        gauges: what the precision and the experts show at the last of them; scalars on the device.
        strategy: the processes that took the steps together; None for one process.
    """

    def __init__(
        self,
        pending: Sequence[DeviceStepRecord],
        start_time: float,
        gauges: Mapping[str, Tensor] = {},
        strategy: Strategy | None = None,
    ) -> None:
        self.pending = [*pending]
        self.start_time = start_time
        self.gauges = [*gauges]
        # One tensor for all values: each copy from the device costs a launch of its own.
        columns = device_columns(self.pending, strategy or Single())
        self._fields = [*columns]
        self._values = torch.stack([*columns.values()])  # [fields, steps]
        self._gauge_values = torch.empty(0)
        if gauges:
            scalars = [gauge.detach().float() for gauge in gauges.values()]
            self._gauge_values = torch.stack(scalars)
        self._event: torch.cuda.Event | None = None
        if self._values.device.type == "cuda":
            self._values = _copy_to_pinned(self._values)
            self._gauge_values = _copy_to_pinned(self._gauge_values)
            # The event marks the end of these copies only, so that a wait for it does not wait for
            # the steps that were launched after them.
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Return whether records() would not have to wait."""
        return self._event is None or self._event.query()

    def wait(self) -> float:
        """Wait for the values, as a part of the last step, and return perf_counter() after it."""
        if self._event is not None:
            self._event.synchronize()
        self._values = self._values.cpu()
        self.pending[-1] = self.pending[-1]._replace(ended_at=perf_counter())
        return self.pending[-1].ended_at

    def records(self, skipped: int) -> Steps:
        """Wait for the block and return its records.

        Args:
            skipped: steps skipped before the block.
        """
        if self._event is not None:
            self._event.synchronize()
        columns = dict(zip(self._fields, self._values.tolist(), strict=True))
        previous_end = self.start_time
        records: list[StepRecord] = []
        for i, step in enumerate(self.pending):
            values = {field: column[i] for field, column in columns.items()}
            step_ms = (step.ended_at - previous_end) * 1e3
            previous_end = step.ended_at
            # The count runs on the host, over blocks in order: the device holds flags only.
            if "overflow" in values:
                skipped += int(values["overflow"])
                values["skipped_steps"] = skipped
            measured = {field: values.pop(field) for field in step.measured}
            records.append(
                StepRecord(
                    step=step.step,
                    time_ms=step.time_ms,
                    epoch=step.epoch,
                    lr=step.lr,
                    step_ms=step_ms,
                    examples=step.examples,
                    measured=measured or None,
                    rates=step.rates or None,
                    **values,  # type: ignore[arg-type]
                )
            )
        # Gauges are read when the block is sent, so they belong to its last step.
        if self.gauges:
            gauges = dict(zip(self.gauges, self._gauge_values.tolist(), strict=True))
            records[-1] = records[-1]._replace(gauges=gauges)
        return tuple(records)


def _copy_to_pinned(values: Tensor) -> Tensor:
    """Start a copy to pinned host memory; it is complete once the device has reached it."""
    # Only a copy into pinned memory overlaps with the device's computations; one into pageable
    # memory would make the host wait.
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copy.copy_(values, non_blocking=True)
