"""The values that are recorded in every step, one table entry each.

How to add a metric: append a StepMetric to STEP_METRICS with its field, its name in the tracker and
a `measure` function, and list the name in runner/tracking/metric_names.py. For example, the 2-norm
of the weights after each step:

    StepMetric(
        field="weight_norm",
        metric="<section>/weight_norm",
        measure=lambda state: torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(state.trainable_parameters))
        ),
    )

Nothing else changes: the value travels in the one transfer of its block (record_buffer.py), is
logged by MetricLogger at its own step, and is not written to checkpoints. `measure` must return a
scalar tensor on the device and must not read it (`item()`, `float()`, `if tensor:`): reading makes
the host wait for the device in every step.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.distributed.strategy import Strategy
from runner.tracking.metric_names import numbered
from runner.training.records import DeviceStepRecord, StepRecord
from runner.training.state import TrainState
from runner.utils.tensors import widest_float

FORBIDDEN_CHARACTERS = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in the name of a metric."""


def legal_names(names: Iterable[str]) -> list[str]:
    """Return names with an underscore for each forbidden character; names that become equal, as
    h.* and h.? do, get a number."""
    return numbered(FORBIDDEN_CHARACTERS.sub("_", name) for name in names)


def stack_values(values: Sequence[Tensor], strategy: Strategy) -> Tensor:
    """Return the scalars of a block's steps, which are equal in all processes: [steps]."""
    return torch.stack([*values])


def average_over_processes(values: Sequence[Tensor], strategy: Strategy) -> Tensor:
    """Return the scalars of a block's steps, each averaged over the processes: [steps]."""
    stacked = torch.stack([*values])
    processes = strategy.rank.world_size
    if processes == 1:
        return stacked
    # One reduction per block: the steps do not wait for the other processes' losses.
    return strategy.sum(stacked.to(widest_float(stacked.device))) / processes


def combine_gradient_norms(norms: Sequence[Tensor], strategy: Strategy) -> Tensor:
    """Return the 2-norm of all gradients of each step of a block: [steps].

    Args:
        norms: of each step, the 2-norm of each gradient, of what this process holds of it.
        strategy: adds what the other processes hold.
    """
    if len({step.shape for step in norms}) == 1:
        totals = torch.linalg.vector_norm(torch.stack([*norms]), dim=1)
    else:
        # Some parameters had no gradient in some of the steps.
        totals = torch.stack([torch.linalg.vector_norm(step) for step in norms])
    return strategy.reduce_norms(totals)


@dataclass(frozen=True)
class StepMetric:
    """A value that every step records.

    Attributes:
        field: the value's name in a StepRecord: an attribute of it, or else a key of `measured`.
        metric: the value's name in the tracker.
        read: returns the value from what the step itself computed, None where a run has none.
        measure: measures the value at the end of a step, while the gradients are there. Without
            `read` and `measure` it is a number that the host knows, filled in by record_buffer.
        combine: makes the column of a block from the values of its steps, [steps]. It runs on the
            device, in all processes in the same order.
    """

    field: str
    metric: str
    read: Callable[[DeviceStepRecord], Tensor | None] | None = None
    measure: Callable[[TrainState], Tensor] | None = None
    combine: Callable[[Sequence[Tensor], Strategy], Tensor] = stack_values


TERM_PREFIX = "train/"
"""Start of the fields in `measured` that are no entry of the table: a task's own values."""

STEP_METRICS: tuple[StepMetric, ...] = (
    StepMetric("loss", "train/loss", read=lambda step: step.loss, combine=average_over_processes),
    StepMetric("lr", "train/lr"),
    StepMetric(
        "grad_norm", "train/grad_norm", read=lambda step: step.norms, combine=combine_gradient_norms
    ),
    StepMetric("loss_scale", "loss_scale/value", read=lambda step: step.scale),
    StepMetric("overflow", "loss_scale/overflow", read=lambda step: step.found_inf),
    StepMetric("skipped_steps", "loss_scale/skipped_steps"),
)


def measure_step(state: TrainState) -> dict[str, Tensor]:
    """Return the measured values of the step that ends now, by field; scalars on the device."""
    measures = {entry.field: entry.measure for entry in STEP_METRICS if entry.measure is not None}
    # Without such metrics, as by default, a step pays nothing for them.
    if not measures:
        return {}
    with torch.no_grad():
        return {field: measure(state) for field, measure in measures.items()}


def device_columns(steps: Sequence[DeviceStepRecord], strategy: Strategy) -> dict[str, Tensor]:
    """Return the values of a block of steps on the device, by field: [steps] each.

    The dtype is the widest float of the device, so that no value is altered on its way. Fields
    that the steps have no value of (the loss scale of a precision without one) are omitted.
    """
    columns: dict[str, Tensor] = {}
    for entry in STEP_METRICS:
        values: list[Tensor] = []
        for step in steps:
            value = entry.read(step) if entry.read else step.measured.get(entry.field)
            if value is not None:
                values.append(value)
        if len(values) == len(steps):
            columns[entry.field] = entry.combine(values, strategy)
    for field in steps[0].measured:
        if field.startswith(TERM_PREFIX):
            terms = [step.measured[field] for step in steps]
            columns[field] = average_over_processes(terms, strategy)
    # Equal dtypes let all columns travel in one tensor.
    wide = widest_float(steps[0].loss.device)
    return {field: column.to(wide) for field, column in columns.items()}


def tracker_values(record: StepRecord) -> dict[str, float]:
    """Return what the tracker logs of a step, by metric name."""
    measured = record.measured or {}
    values = {}
    for entry in STEP_METRICS:
        value = getattr(record, entry.field, measured.get(entry.field))
        if value is not None:
            values[entry.metric] = value
    values |= {name: value for name, value in measured.items() if name.startswith(TERM_PREFIX)}
    # Names of groups may hold patterns, and MLflow refuses their characters.
    rates = record.rates or {}
    for name, rate in zip(legal_names(rates), rates.values(), strict=True):
        values[f"lr/{name}"] = rate
    return values
