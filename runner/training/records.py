"""What a run tells its observers: frozen plain numbers, at true optimizer-step numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


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

_FIELDS_OF_0_1 = (
    "step",
    "time_ms",
    "epoch",
    "loss",
    "lr",
    "grad_norm",
    "step_ms",
    "examples",
    "loss_scale",
    "overflow",
    "skipped_steps",
    "gauges",
)
"""Order of the fields of a StepRecord in checkpoints of version 0.1, which hold no names."""


def record_to_state(record: StepRecord | None) -> dict[str, Any] | None:
    """Return a step record as a checkpoint stores it: by field name, without its gauges."""
    if record is None:
        return None
    return {name: value for name, value in record._asdict().items() if name != "gauges"}


def record_from_state(state: Mapping[str, Any] | Sequence[Any] | None) -> StepRecord | None:
    """Return the step record that a checkpoint stores.

    A field that this version does not know is dropped, and one that the checkpoint does not know
    takes its default, so that a new field of StepRecord changes no checkpoint.

    Args:
        state: what record_to_state returned, or the list of values that version 0.1 stored.

    Raises:
        TypeError: a field without a default is missing, or the state is neither of the two.
    """
    if state is None:
        return None
    if isinstance(state, list | tuple):
        state = dict(zip(_FIELDS_OF_0_1, state, strict=False))
    if not isinstance(state, Mapping):
        raise TypeError(f"a step record is stored as {type(state).__name__}")
    return StepRecord(**{name: state[name] for name in StepRecord._fields if name in state})
