"""Read the steps of another trainer, and hand their records to the runner's callbacks in blocks.

Nothing of a step is read from the device before its block is sent. The order in every trainer:
backward (of each micro-batch), `read_gradients` before anything is clipped or unscaled, the
trainer's own step, `end_step`.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from runner.core import (
    ConfigError,
    RunCallback,
    RunHandle,
    TrainState,
    errors,
    fmt,
    gradients,
    step_records,
)
from runner.tracking.history import Curve
from runner.training.callbacks.runner_callbacks import RunSummary
from runner.training.expert_loads import ExpertLoads

log = logging.getLogger(__name__)

MAX_BLOCK_SECONDS = 5.0
"""Longest time that a step's values stay on the device, so that slow steps show up in time."""


class StepReader:
    """Reads loss, learning rate, gradient norms and loss scale of each step of a foreign loop.

    Args:
        scaler: that scales the loss, enabled; None for none.

    Attributes:
        losses: of the step so far, by micro-batch.

    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        self._examples: list[int] = []  # of each micro-batch
        self.losses: dict[int | None, Tensor] = {}
        self._norms: Tensor | None = None
        self._scale: Tensor | None = None
        self._lr = 0.0

    @property
    def is_step_read(self) -> bool:
        """Return whether the gradients of a step were read that has not ended."""
        return self._norms is not None

    def add_loss(
        self, loss: Tensor, micro_batch: int | None = None, is_scaled: bool = False
    ) -> None:
        """Add a loss to those of its micro-batch.

        Args:
            loss: a scalar.
            micro_batch: number of the micro-batch whose mean the loss is. The step's loss is the
                mean over its examples, however many micro-batches a trainer divides by. None: the
                loss is a share of the step's loss, which is the sum of its shares.
            is_scaled: the loss is multiplied by the loss scale.
        """
        value = loss.detach().reshape(())
        if value.itemsize < 4:
            value = value.float()
        if is_scaled and self.scaler is not None:
            value = value / scale_value(self.scaler)
        self.losses[micro_batch] = self.losses.get(micro_batch, 0) + value

    def add_examples(self, count: int) -> None:
        """Add the examples of a micro-batch to the step's; 0 where their number is not known."""
        self._examples.append(count)

    def _mean_loss(self) -> Tensor:
        """Return the loss of the step: the mean over its examples, or the sum of its shares."""
        losses = list(self.losses.values())
        is_known = len(self._examples) == len(losses) and all(self._examples)
        weights = self._examples if is_known and len(losses) > 1 else [1] * len(losses)
        return torch.stack([*map(torch.mul, losses, weights)]).sum() / sum(weights)

    def read_gradients(self, optimizer: Optimizer, is_added: bool = False) -> None:
        """Read the gradient norms, the loss scale and the learning rate of the step.

        With several micro-batches the last call counts.

        Args:
            optimizer: torch's own, not a trainer's wrapper around it.
            is_added: the gradients are added to those of another optimizer in the same step.
        """
        groups = optimizer.param_groups
        self._lr = float(groups[0]["lr"])
        params = [p for group in groups for p in group["params"]]
        gradients.finish_gradients(params)
        grads = gradients.gradients_of(params)
        with torch.no_grad():
            # A trainer may step without gradients, as after a batch that its module leaves out.
            norms = gradients.grad_norms(grads) if grads else torch.zeros(1)
        self._scale = None
        if self.scaler is not None:
            self._scale = scale_value(self.scaler)
            # torch offers no public way to ask whether the gradients are divided by the scale.
            # Lightning unscales before its hook, and a fused optimizer divides in its own step.
            stage = self.scaler._per_optimizer_states[id(optimizer)]["stage"]
            if stage is OptState.READY:
                norms = norms / self._scale
        if is_added and self._norms is not None:
            norms = torch.cat([self._norms, norms])
        self._norms = norms

    def end_step(self, step: int, epoch: int) -> step_records.DeviceStepRecord:
        """Return the values of the step that has ended, and begin the next one.

        Args:
            step: attempted steps so far, this one included.
            epoch: passes over the data begun.

        Raises:
            ConfigError: there was no loss, or no gradients were read.
        """
        if not self.losses or self._norms is None:
            raise ConfigError(
                f"step {step} had no backward of a loss, so there is nothing to record."
            )
        found_inf = None
        if self.scaler is not None and self._scale is not None:
            # A GradScaler lowers its scale in the steps that it skips, and in no other.
            found_inf = (scale_value(self.scaler) < self._scale).float()
        record = step_records.DeviceStepRecord(
            step=step,
            time_ms=fmt.now_ms(),
            epoch=epoch,
            lr=self._lr,
            ended_at=time.perf_counter(),
            examples=sum(self._examples),
            loss=self._mean_loss(),
            norms=self._norms,
            scale=self._scale,
            found_inf=found_inf,
        )
        self.discard_step()
        return record

    def discard_step(self) -> None:
        """Begin the next step without a record of this one."""
        self.losses.clear()
        self._norms = None
        self._examples.clear()


def scale_value(scaler: torch.amp.GradScaler) -> Tensor:
    """Return a GradScaler's scale as it is now, a float32 scalar on the device."""
    # get_scale() would read it on the host, which waits for the device in every step.
    value = scaler._get_scale_async()
    if value is None:  # before the first loss
        return torch.tensor(scaler.get_scale())
    return value.detach().clone()


@dataclass(eq=False)
class StepRecords:
    """The steps of a training, on their way from the device to the callbacks.

    Args:
        state: of the training.
        callbacks: read the records, in order.
        handle: passed to the callbacks.
        block_steps: optimizer steps that are copied to the host together.
    """

    state: TrainState
    callbacks: Sequence[RunCallback]
    handle: RunHandle
    block_steps: int
    _waiting: int = field(default=0, init=False)
    _has_warned: bool = field(default=False, init=False)
    _measurement: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        self._loads = ExpertLoads(self.state.plain_model)
        self._buffer = step_records.RecordBuffer(self.state, self._loads.gauges)
        self._sent_at = time.monotonic()

    def add(self, record: step_records.DeviceStepRecord) -> None:
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
            context = callback.around_step(record.step + 1)
            if context is not None:
                self._measurement.enter_context(context)

    def send(self) -> None:
        """Copy the steps so far to the host, and hand on the blocks that have arrived."""
        if self._waiting:
            self._buffer.send()
            self._waiting = 0
        self._sent_at = time.monotonic()
        for block in self._buffer.ready_records():
            self._dispatch(block)

    def add_evaluation(self, record: step_records.EvalRecord) -> None:
        """Hand an evaluation to the callbacks; its time counts to no step."""
        self.send()
        self._dispatch(record)
        self.restart_clock()

    def restart_clock(self, at: float | None = None) -> None:
        """Let the next step begin now, or at a time of perf_counter(), after other work."""
        self._buffer.restart_clock(at)

    def close(self) -> None:
        """Hand on every step, and close the callbacks."""
        # A step that did not end is not measured.
        unfinished = InterruptedError("the training ended before the step")
        self._measurement.__exit__(type(unfinished), unfinished, None)
        self.send()
        for block in self._buffer.flush():
            self._dispatch(block)
        self._loads.close()
        for callback in self.callbacks:
            callback.close()

    def _dispatch(
        self, record: Sequence[step_records.StepRecord] | step_records.EvalRecord
    ) -> None:
        try:
            for callback in self.callbacks:
                callback.dispatch(record, self.handle)
        except errors.TrackingError as error:
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
    unrecorded = np.empty((3, 0))
    for step, _, scale in curves.get("loss_scale/value", unrecorded).T.tolist():
        is_change = not summary.scales or summary.scales[-1][1] != scale
        if step <= last_step and is_change:
            summary.scales.append((int(step), scale))
    for step, _, is_skipped in curves.get("loss_scale/overflow", unrecorded).T.tolist():
        if step <= last_step and is_skipped:
            summary.overflows.append(int(step))
