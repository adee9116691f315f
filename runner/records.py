"""What a run tells its observers: frozen plain numbers, at true optimizer-step numbers."""

from collections.abc import Mapping
from typing import NamedTuple


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
        gauges: what the precision shows after it; on the last step of a block only.
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


class EvalRecord(NamedTuple):
    """One evaluation after a step. metrics are named as in MLflow, `val/...`; stagnant is the
    share of parameter elements that had a gradient and did not move (None: not counted)."""

    step: int
    time_ms: int
    epoch: int
    metrics: Mapping[str, float]
    stagnant: float | None = None


Steps = tuple[StepRecord, ...]
Record = Steps | EvalRecord
