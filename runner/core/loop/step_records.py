"""The records of a run: what the loop yields and callbacks read, at true optimizer-step numbers.

A step makes a DeviceStepRecord, whose tensors stay on the device. Reading a value as soon as its
step is launched would make the host wait for the device in every step. So the records of
`train.log_every` steps reach the host in one transfer, as StepRecords, which hold plain numbers,
and a block is read when the one after it has been sent.

How to add a metric: append a StepMetric to STEP_METRICS with its field, its name in the tracker and
a `measure` function, and list the name in runner/core/record/metric_names.py. For example, the
2-norm of the weights after each step:

    StepMetric(
        field="weight_norm",
        metric="<section>/weight_norm",
        measure=lambda state: torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(state.trainable_parameters))
        ),
    )

Nothing else changes: the value travels in the one transfer of its block, is logged by MetricLogger
at its own step, and is not written to checkpoints. `measure` must return a scalar tensor on the
device and must not read it (`item()`, `float()`, `if tensor:`): reading makes the host wait for the
device in every step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.core.base.errors import ConfigError
from runner.core.base.tensor_facts import widest_float
from runner.core.loop.strategy import Single, Strategy
from runner.core.loop.train_state import TrainState
from runner.core.record.metric_names import FORBIDDEN_CHARACTERS, legal_names


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
        measured: values of further metrics, by field; see STEP_METRICS.
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
        gauges: what the precision and others show after it; on the last step of a block only.
        measured: values of further metrics, by field; see STEP_METRICS.
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

    def tracker_values(self) -> dict[str, float]:
        """Return what the tracker logs of the step, by metric name."""
        measured = self.measured or {}
        values = {}
        for entry in STEP_METRICS:
            value = getattr(self, entry.field, measured.get(entry.field))
            if value is not None:
                values[entry.metric] = value
        values |= {name: value for name, value in measured.items() if name.startswith(TERM_PREFIX)}
        # Names of groups may hold patterns, and MLflow refuses their characters.
        rates = self.rates or {}
        for name, rate in zip(legal_names(rates), rates.values(), strict=True):
            values[f"lr/{name}"] = rate
        return values


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


class TrainingEnd(NamedTuple):
    """How a training ended.

    Attributes:
        step: attempted steps.
        planned_steps: steps that the config asks for.
        metrics: of the last evaluation, by their names in the tracker.
        best: best value of the metric that runs are compared by; None without an evaluation.
        reason: why it ended before the planned steps: the reason that a callback gave, or the key
            that ended it; empty where it did not.
    """

    step: int
    planned_steps: int
    metrics: Mapping[str, float]
    best: float | None
    reason: str


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
            `read` and `measure` it is a number that the host knows, filled in by RecordBuffer.
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


def name_problem(name: object) -> str:
    """Return which names a task's own value may have, where a name is none of them; else empty."""
    recorded = [entry.metric.removeprefix(TERM_PREFIX) for entry in STEP_METRICS]
    is_text = isinstance(name, str) and name and not FORBIDDEN_CHARACTERS.search(name)
    if is_text and name not in recorded:
        return ""
    return (
        "Allowed: text of letters, digits, spaces and _ - . : /, but not "
        f"{', '.join(recorded)}, which the runner records."
    )


def measure_step(state: TrainState) -> dict[str, Tensor]:
    """Return the measured values of the step that ends now, by field; scalars on the device."""
    measured: dict[str, Tensor] = {}
    for entry in STEP_METRICS:
        # Without such metrics, as by default, a step pays nothing for them.
        if entry.measure is not None:
            with torch.no_grad():
                measured[entry.field] = entry.measure(state)
    return measured


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


class RecordBuffer:
    """The steps that have not reached the host: those of the current block, and the blocks sent.

    Attributes:
        state: its count of skipped steps is updated as blocks arrive.
        gauges: returns what is shown at the end of each block beside the precision's gauges.
    """

    def __init__(
        self, state: TrainState, gauges: Callable[[], Mapping[str, Tensor]] = dict
    ) -> None:
        self.state = state
        self.gauges = gauges
        self._block_start = perf_counter()  # of the first step of the current block
        self._current: list[DeviceStepRecord] = []
        self._sent: deque[HostTransfer] = deque()
        self._measured: Iterable[str] | None = None

    def add(self, step: DeviceStepRecord) -> None:
        """Append a step to the current block.

        Raises:
            ConfigError: the task returned values of other names than in an earlier step.
        """
        # Else a value would be missing from the record, and processes would add different values.
        if step.measured.keys() != self._measured:
            self._note_names(step)
        self._current.append(step)

    def _note_names(self, step: DeviceStepRecord) -> None:
        """Note the names of the first step's values; raise ConfigError in a later step."""
        if self._measured is None:
            self._measured = dict.fromkeys(step.measured).keys()
            return

        def listed(names: Iterable[str]) -> str:
            return ", ".join(name.removeprefix(TERM_PREFIX) for name in names) or "none"

        raise ConfigError(
            f"task={type(self.state.task).__name__}: loss() returned the values "
            f"{listed(self._measured)} before, and in step {step.step} {listed(step.measured)}. "
            "Return the same names in every step; where there is nothing to measure, "
            "loss.new_zeros(())."
        )

    def restart_clock(self, at: float | None = None) -> None:
        """Let the next step begin now, after work that is no step's, such as an evaluation.

        Args:
            at: another time, of perf_counter().
        """
        self._block_start = perf_counter() if at is None else at

    def send(self) -> None:
        """End the current block and start its copy to the host."""
        shown = self.state.precision.gauges(self.state.plain_model)
        gauges = {**shown, **self.gauges()}
        transfer = HostTransfer(self._current, self._block_start, gauges, self.state.strategy)
        self._sent.append(transfer)
        # Without a gap between blocks, the steps' times add up to the time of the loop.
        self._block_start = self._current[-1].ended_at
        self._current = []

    def ready_records(self) -> Iterator[Sequence[StepRecord]]:
        """Yield the blocks that can be read without a long wait, in order.

        These are the blocks that have arrived, and all but the last one sent.
        """
        # A wait for all but the last one is short: the device has computed them, and works on the
        # block after them. The host is therefore two blocks ahead of the device at most.
        while len(self._sent) > 1 or (self._sent and self._sent[0].is_ready):
            yield self._next()

    def flush(self) -> Iterator[Sequence[StepRecord]]:
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

    def _next(self) -> Sequence[StepRecord]:
        block = self._sent.popleft().records(self.state.skipped)
        # None for a precision without a loss scale, which skips no step.
        self.state.skipped = block[-1].skipped_steps or 0
        return block


class HostTransfer:
    """A block of step records that is being copied to the host.

    Args:
        pending: steps in order, at least one.
        start_time: perf_counter() when the first of them began, in seconds.
        gauges: what the precision and others show at the last of them; scalars on the device.
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

    def records(self, skipped: int) -> Sequence[StepRecord]:
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
