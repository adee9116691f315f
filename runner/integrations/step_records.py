"""Send the records of a foreign loop's steps to the host in blocks, and hand them to callbacks."""

import logging
import time
from collections.abc import Sequence

from runner.training.callbacks.callback import Callback, dispatch
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
        block_steps: optimizer steps that are copied to the host together.
    """

    def __init__(self, state: TrainState, callbacks: Sequence[Callback], block_steps: int) -> None:
        self.state = state
        self.callbacks = callbacks
        self.block_steps = block_steps
        self._buffer = RecordBuffer(state)
        self._waiting = 0
        self._sent_at = time.monotonic()
        self._has_warned = False

    def add(self, record: DeviceStepRecord) -> None:
        """Add a step that has ended; copy the block to the host where one is due."""
        self.state.step = record.step
        self.state.epoch = record.epoch
        self._buffer.add(record)
        self._waiting += 1
        is_late = time.monotonic() - self._sent_at > MAX_BLOCK_SECONDS
        if self._waiting >= self.block_steps or is_late:
            self.send()

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
        self._buffer.restart_clock()

    def close(self) -> None:
        """Hand on every step, and close the callbacks."""
        self.send()
        for block in self._buffer.flush():
            self._dispatch(block)
        for callback in self.callbacks:
            callback.close()

    def _dispatch(self, record: Record) -> None:
        try:
            dispatch(self.callbacks, record)
        except TrackingError as error:
            # The training is another trainer's: its steps are worth more than their record.
            if not self._has_warned:
                log.warning("%s Training continues.", error)
            self._has_warned = True
