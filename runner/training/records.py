"""The records of a run: what the loop yields and callbacks read, at true optimizer-step numbers.

A step makes a DeviceStepRecord, whose tensors stay on the device. A block of them reaches the host
in one transfer (record_buffer.py) as StepRecords, which hold plain numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class DeviceStepRecord(NamedTuple):
    """One attempted optimizer step, with its values still on the device.

    Attributes:
        step: attempted steps so far, this one included, from 1.
        time_ms: when the step ended, milliseconds since the epoch.
        epoch: passes over the data begun, from 1.
        lr: learning rate in force in this step, of the first optimizer.
        ended_at: perf_counter() when the host had launched the whole step, in seconds.
        examples: in this step, in all micro-batches and processes together.
        loss: mean over this process's labels of the step, unscaled; scalar.
        norms: 2-norm of each gradient, unscaled, before clipping; [gradients].
        scale: loss scale in force during the step; scalar, None for a precision without one.
        found_inf: 1 where a gradient was not finite; scalar, None for a precision without a scale.
        measured: values of further metrics, by field; see step_metrics.py.
        rates: learning rate in force of each named group of parameters.
    """

    step: int
    time_ms: int
    epoch: int
    lr: float
    ended_at: float
    examples: int
    loss: Tensor
    norms: Tensor
    scale: Tensor | None
    found_inf: Tensor | None
    measured: Mapping[str, Tensor] = {}
    rates: Mapping[str, float] = {}


class StepRecord(NamedTuple):
    """One attempted optimizer step.

    Attributes:
        step: attempted steps so far, this one included, from 1.
        time_ms: when it ended, milliseconds since the epoch.
        epoch: passes over the data begun, from 1.
        loss: mean over the step's examples, unscaled.
        lr: learning rate in force in this step, of the first optimizer.
        grad_norm: 2-norm of all gradients, unscaled, before clipping.
        step_ms: host time from the end of the step before to the end of this one.
        examples: in this step, all micro-batches together.
        loss_scale: scale in force during this step; None for a precision without one.
        overflow: 1.0 where this step's gradients were not finite and it was skipped.
        skipped_steps: skipped so far, this one included.
        gauges: what the precision and the experts show after it; on the last step of a block only.
        measured: values of further metrics, by field; see step_metrics.py.
        rates: learning rate in force of each named group of parameters; None without any.
    """

    step: int
    time_ms: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    step_ms: float
    examples: int
    loss_scale: float | None = None
    overflow: float | None = None
    skipped_steps: int | None = None
    gauges: Mapping[str, float] | None = None
    measured: Mapping[str, float] | None = None
    rates: Mapping[str, float] | None = None

    def to_state(self) -> dict[str, Any]:
        """Return the keywords of the record, as a checkpoint stores it.

        They leave out what nothing reads after a resume.
        """
        left_out = ("gauges", "measured", "rates")
        return {name: value for name, value in self._asdict().items() if name not in left_out}


class EvalRecord(NamedTuple):
    """One evaluation after a step.

    Attributes:
        step: attempted steps so far.
        time_ms: when the evaluation ended, milliseconds since the epoch.
        epoch: passes over the data begun, from 1.
        metrics: by their names in the tracker, `val/...`.
        stagnant_share: share of the parameter elements with a gradient that a step did not change,
            the last in which they were counted; None before that.
    """

    step: int
    time_ms: int
    epoch: int
    metrics: Mapping[str, float]
    stagnant_share: float | None = None


Steps = Sequence[StepRecord]
"""A block of step records that have reached the host, in order."""
Record = Steps | EvalRecord
