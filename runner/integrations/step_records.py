"""Send the records of a foreign loop's steps to the host in blocks, and hand them to callbacks."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from runner.diagnostics.numerics.numerics_callback import NumericsCallback
from runner.tracking.history import Curve
from runner.training.callbacks.callback import RunCallback, RunHandle, dispatch
from runner.training.callbacks.summary import RunSummary
from runner.training.record_buffer import RecordBuffer
from runner.training.records import DeviceStepRecord, EvalRecord, Record
from runner.training.state import TrainState
from runner.utils.errors import TrackingError

log = logging.getLogger(__name__)

MAX_BLOCK_SECONDS = 5.0
"""Longest time that a step's values stay on the device, so that slow steps show up in time."""


class StepRecords:
    """The steps of a training, on their way from the device to the callbacks.

    Args:
        state: of the training.
        callbacks: read the records, in order.
        handle: passed to the callbacks.
        block_steps: optimizer steps that are copied to the host together.
    """

    def __init__(
        self,
        state: TrainState,
        callbacks: Sequence[RunCallback],
        handle: RunHandle,
        block_steps: int,
    ) -> None:
        self.state = state
        self.callbacks = callbacks
        self.handle = handle
        self.block_steps = block_steps
        self._buffer = RecordBuffer(state)
        self._waiting = 0
        self._sent_at = time.monotonic()
        self._has_warned = False
        self._measurement = ExitStack()

    def add(self, record: DeviceStepRecord) -> None:
        """Add a step that has ended; copy the block to the host where one is due.

        The measurement of the next step begins here where one is due: it samples the weights before
        its step.
        """
        self.state.step = record.step
        self.state.epoch = record.epoch
        self._buffer.add(record)
        self._waiting += 1
        is_late = time.monotonic() - self._sent_at > MAX_BLOCK_SECONDS
        if self._waiting >= self.block_steps or is_late:
            self.send()
        self._measurement.close()
        for callback in self.callbacks:
            if isinstance(callback, NumericsCallback):
                self._measurement.enter_context(callback.around_step(record.step + 1))

    def send(self) -> None:
        """Copy the steps so far to the host, and hand on the blocks that have arrived."""
        if self._waiting:
            self._buffer.send()
            self._waiting = 0
        self._sent_at = time.monotonic()
        for block in self._buffer.ready_records():
            self._dispatch(block)

    def add_evaluation(self, record: EvalRecord) -> None:
        """Hand an evaluation to the callbacks; its time counts to no step."""
        self.send()
        self._dispatch(record)
        self.restart_clock()

    def restart_clock(self, at: float | None = None) -> None:
        """Let the next step begin now, or at a time of perf_counter(), after work that is no
        step's."""
        self._buffer.restart_clock(at)

    def close(self) -> None:
        """Hand on every step, and close the callbacks."""
        # A step that did not end is not measured.
        unfinished = InterruptedError("the training ended before the step")
        self._measurement.__exit__(type(unfinished), unfinished, None)
        self.send()
        for block in self._buffer.flush():
            self._dispatch(block)
        for callback in self.callbacks:
            callback.close()

    def _dispatch(self, record: Record) -> None:
        try:
            dispatch(self.callbacks, record, self.handle)
        except TrackingError as error:
            # The training is another trainer's: its steps are worth more than their record.
            if not self._has_warned:
                log.warning("%s Training continues.", error)
            self._has_warned = True


def restore_summary(summary: RunSummary, curves: Mapping[str, Curve], last_step: int) -> None:
    """Add the loss scale and the skipped steps of a run's earlier part to its summary.

    Args:
        summary: of the run that is continued; it has no records yet.
        curves: of the earlier part, by metric name.
        last_step: the step that the run is continued after; later ones are trained again.
    """
    for step, scale in _points(curves, "loss_scale/value", last_step):
        if not summary.scales or summary.scales[-1][1] != scale:
            summary.scales.append((step, scale))
    for step, is_skipped in _points(curves, "loss_scale/overflow", last_step):
        if is_skipped:
            summary.overflows.append(step)


def _points(curves: Mapping[str, Curve], name: str, last_step: int) -> list[tuple[int, float]]:
    """Return (step, value) of a metric up to a step; empty where it was not recorded."""
    if name not in curves:
        return []
    steps, _, values = curves[name].tolist()
    pairs = zip(steps, values, strict=True)
    return [(int(step), value) for step, value in pairs if step <= last_step]
