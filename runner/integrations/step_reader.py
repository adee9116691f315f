"""Read the values of an optimizer step that another trainer takes, without a read from the device.

The order in every trainer: backward (of each micro-batch), `read_gradients` before anything is
clipped or unscaled, the trainer's own step, `end_step`.
"""

from time import perf_counter

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from runner.precision.gradients import finish_gradients, grad_norms, gradients_of
from runner.training.records import DeviceStepRecord
from runner.utils.errors import ConfigError
from runner.utils.formatting import now_ms


class StepReader:
    """Reads loss, learning rate, gradient norms and loss scale of each step of a foreign loop.

    Args:
        scaler: that scales the loss; None, or one that is not enabled, for none.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._examples = 0
        self._loss: Tensor | None = None
        self._norms: Tensor | None = None
        self._scale: Tensor | None = None
        self._lr = 0.0

    @property
    def is_step_read(self) -> bool:
        """Return whether the gradients of a step were read that has not ended."""
        return self._norms is not None

    @property
    def has_loss(self) -> bool:
        """Return whether a loss was added since the last step."""
        return self._loss is not None

    def add_loss(self, loss: Tensor, weight: float = 1.0, is_scaled: bool = False) -> None:
        """Add the loss of a micro-batch to the step's.

        Args:
            loss: a scalar.
            weight: share of the step's loss that it is.
            is_scaled: the loss is multiplied by the loss scale.
        """
        value = loss.detach().reshape(())
        if value.itemsize < 4:
            value = value.float()
        value = value * weight
        if is_scaled and self.scaler is not None:
            value = value / scale_value(self.scaler)
        self._loss = value if self._loss is None else self._loss + value

    def add_examples(self, count: int) -> None:
        """Add the examples of a micro-batch to the step's."""
        self._examples += count

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
        finish_gradients(params)
        grads = gradients_of(params)
        with torch.no_grad():
            # A trainer may step without gradients, as after a batch that its module leaves out.
            norms = grad_norms(grads) if grads else torch.zeros(1)
        self._scale = None
        if self.scaler is not None:
            self._scale = scale_value(self.scaler)
            if not _is_unscaled(self.scaler, optimizer):
                norms = norms / self._scale
        if is_added and self._norms is not None:
            norms = torch.cat([self._norms, norms])
        self._norms = norms

    def end_step(self, step: int, epoch: int) -> DeviceStepRecord:
        """Return the values of the step that has ended, and begin the next one.

        Args:
            step: attempted steps so far, this one included.
            epoch: passes over the data begun.

        Raises:
            ConfigError: there was no loss, or no gradients were read.
        """
        if self._loss is None or self._norms is None:
            raise ConfigError(
                f"step {step} had no backward of a loss, so there is nothing to record."
            )
        found_inf = None
        if self.scaler is not None and self._scale is not None:
            # A GradScaler lowers its scale in the steps that it skips, and in no other.
            found_inf = (scale_value(self.scaler) < self._scale).float()
        record = DeviceStepRecord(
            step=step,
            time_ms=now_ms(),
            epoch=epoch,
            lr=self._lr,
            ended_at=perf_counter(),
            examples=self._examples,
            loss=self._loss,
            norms=self._norms,
            scale=self._scale,
            found_inf=found_inf,
        )
        self.discard_step()
        return record

    def discard_step(self) -> None:
        """Begin the next step without a record of this one."""
        self._loss = None
        self._norms = None
        self._examples = 0


def scale_value(scaler: torch.amp.GradScaler) -> Tensor:
    """Return a GradScaler's scale as it is now, a float32 scalar on the device."""
    # get_scale() would read it on the host, which waits for the device in every step.
    value = scaler._get_scale_async()
    if value is None:  # before the first loss
        return torch.tensor(scaler.get_scale())
    return value.detach().clone()


def _is_unscaled(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Return whether a scaler has divided an optimizer's gradients by the scale already."""
    # torch offers no public way to ask. Lightning unscales before its hook, and a fused optimizer
    # divides in its own step.
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return stage is not OptState.READY
