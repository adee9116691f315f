"""The runner's own callbacks: log the records, add them up, save checkpoints, profile.

records.py says which values of a step are logged. A block of records ends at each interval's
end, so the state that is saved is the one after the block's last step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from torch.profiler import profile

from runner.core import (
    RunCallback,
    RunHandle,
    Tracker,
    TrainState,
    accelerators,
    journals,
    metric_names,
    step_records,
    tensor_facts,
)


@dataclass(eq=False)
class MetricLogger(RunCallback):
    """Logs every step's values at its own step number; rates and memory once per block.

    Args:
        tracker: stores the values.
        state: its optimizers' memory is logged.
        accelerator: gives the peak memory.
    """

    key = "metric_logger"
    is_in_every_run = True

    tracker: Tracker
    state: TrainState
    accelerator: accelerators.Accelerator

    def __post_init__(self) -> None:
        self._last = None
        self._has_logged_optimizer_memory = False

    def on_steps(self, records: Sequence[step_records.StepRecord], run: RunHandle) -> None:
        points = []
        for record in records:
            points += self._scale_changes(record)
            points.append((record.step, record.time_ms, record.tracker_values()))
            self._last = record
        points.append(self._block_values(records))
        self.tracker.log_metrics(points)
        self.tracker.check()

    def _scale_changes(self, record: step_records.StepRecord) -> Iterator[journals.MetricRecord]:
        """Yield the loss scale where it changes, the value before and the value after."""
        # MLflow's charts draw a few hundred points per line: the scale of every step would hide a
        # short dip, and these few points show each one.
        last = self._last
        scale = record.loss_scale
        if scale is None:
            return
        if last is None:
            yield _scale_point(record)
        elif last.loss_scale is not None and last.loss_scale != scale:
            yield _scale_point(last)
            yield _scale_point(record)

    def _block_values(self, records: Sequence[step_records.StepRecord]) -> journals.MetricRecord:
        # A single step's time says little: the host launches a step, it does not wait for it.
        milliseconds = sum(record.step_ms for record in records)
        examples = sum(record.examples for record in records)
        values = {
            "perf/step_ms": milliseconds / len(records),
            "perf/examples_per_second": examples / milliseconds * 1e3,
            "memory/peak_mib": self.accelerator.peak_memory_mib(),
        }
        # The loop of another trainer may not say how many examples a step has.
        if not examples:
            del values["perf/examples_per_second"]
        # The optimizer makes its state in its first applied step, and the size stays from then on.
        is_applied = any(not record.overflow for record in records)
        if is_applied and not self._has_logged_optimizer_memory:
            self._has_logged_optimizer_memory = True
            size = tensor_facts.tensor_bytes(*self.state.optimizer_tensors())
            values["memory/optimizer_mib"] = size / tensor_facts.MIB
        last = records[-1]
        # Gauges are named after modules.
        gauges = last.gauges or {}
        values |= dict(zip(metric_names.legal_names(gauges), gauges.values(), strict=True))
        return last.step, last.time_ms, values

    def on_evaluation(self, record: step_records.EvalRecord, run: RunHandle) -> None:
        values = dict(record.metrics)
        if record.stagnant_share is not None:
            values["guard/stagnant_share"] = record.stagnant_share
        self.tracker.log_metrics([(record.step, record.time_ms, values)])

    def state_dict(self) -> dict[str, Any]:
        last = self._last and self._last.to_state()
        return {"last": last, "sized": self._has_logged_optimizer_memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._last = None if state["last"] is None else step_records.StepRecord(**state["last"])
            self._has_logged_optimizer_memory = state["sized"]

    def close(self) -> None:
        """Log the last loss scale, which ends the line of its changes."""
        if self._last is not None and self._last.loss_scale is not None:
            self.tracker.log_metrics([_scale_point(self._last)])


def _scale_point(record: step_records.StepRecord) -> journals.MetricRecord:
    assert record.loss_scale is not None
    return record.step, record.time_ms, {"loss_scale/changes": record.loss_scale}


MIN_TIMED_MS = 250.0
"""Shortest time that gives a rate, in milliseconds; a shorter one varies with the system load."""


@dataclass(eq=False)
class RunSummary(RunCallback):
    """Totals over all records of a run, for its result and its final checkpoint.

    Args:
        quality: name of the metric whose best value is recorded.
        direction: "max" if more of it is better, otherwise "min".

    Attributes:
        last: the last step record that arrived.
        metrics: of the last evaluation, by name.
        evaluated: the step of the last evaluation; 0 before the first.
        best: best value of the quality so far; None before the first evaluation with a number.
        stagnant: share, of the last evaluation, see EvalRecord.
        scales: (step, loss scale) wherever the loss scale changed.
        overflows: the steps that were skipped.
        blocks: of records that arrived.
        steps: that count towards the rate.
        examples: of these steps.
        milliseconds: of these steps.
    """

    key = "summary"
    is_in_every_run = True

    quality: str
    direction: str
    last: step_records.StepRecord | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated: int = 0
    best: float | None = None
    stagnant: float | None = None
    scales: list[tuple[int, float]] = field(default_factory=list)
    overflows: list[int] = field(default_factory=list)
    examples: int = 0
    steps: int = 0
    blocks: int = 0
    milliseconds: float = 0.0

    def __post_init__(self) -> None:
        self._is_first_block_after_resume = False

    def on_steps(self, records: Sequence[step_records.StepRecord], run: RunHandle) -> None:
        self.last = records[-1]
        self.blocks += 1
        if self.blocks == 2:
            # The first block counted only in case it stays the only one: kernels warm up in it.
            self.examples = 0
            self.steps = 0
            self.milliseconds = 0.0
        timed = records
        # A resumed process warms up again. Its first block counts only if nothing else was timed.
        if self._is_first_block_after_resume and self.steps:
            timed = ()
        # Within the first block of the run only the first step is omitted, the slowest of all.
        elif self.blocks == 1 and len(records) > 1:
            timed = records[1:]
        self._is_first_block_after_resume = False
        self.steps += len(timed)
        self.examples += sum(record.examples for record in timed)
        self.milliseconds += sum(record.step_ms for record in timed)
        for record in records:
            if record.overflow:
                self.overflows.append(record.step)
            scale = record.loss_scale
            if scale is not None and (not self.scales or self.scales[-1][1] != scale):
                self.scales.append((record.step, scale))

    def on_evaluation(self, record: step_records.EvalRecord, run: RunHandle) -> None:
        self.metrics = dict(record.metrics)
        self.evaluated = record.step
        self.stagnant = record.stagnant_share
        # One of several validation sets of another trainer may have none.
        value = record.metrics.get(self.quality, math.nan)
        # max() and min() would return NaN or not, depending on the order of their arguments.
        if not math.isnan(value):
            better = max if self.direction == "max" else min
            self.best = value if self.best is None else better(self.best, value)

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in _TOTALS}
        return {"last": self.last and self.last.to_state(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._is_first_block_after_resume = True
        if not state:
            return
        self.last = None if state["last"] is None else step_records.StepRecord(**state["last"])
        for name in _TOTALS:
            setattr(self, name, state[name])

    def result_values(self) -> dict[str, Any]:
        """Return the numbers of the run's result.

        The rate leaves out the first block, where kernels warm up, and for a run of one block the
        first step; it is None if less than MIN_TIMED_MS was timed.
        """
        last = self.last
        milliseconds = self.milliseconds
        rate = None
        if milliseconds >= MIN_TIMED_MS:
            rate = self.examples / milliseconds * 1e3
        return {
            "metrics": self.metrics,
            "best": self.best,
            "steps": last.step if last else 0,
            "train_loss": last.loss if last else None,
            "examples_per_second": rate,
            "step_ms": milliseconds / self.steps if last else None,
            "skipped_steps": last.skipped_steps if last else None,
            "loss_scale": last.loss_scale if last else None,
            "stagnant_share": self.stagnant,
        }


# Without the settings, and the last record, which a checkpoint holds in another form.
_TOTALS = [part.name for part in fields(RunSummary)][3:]


@dataclass(eq=False)
class Checkpointing(RunCallback):
    """Calls `save` at each multiple of `every_steps` and after each evaluation that is the best.

    Args:
        save: saves the state; its argument says whether the state is the best so far.
        every_steps: None saves the best only.
        is_evaluation_step: returns whether an evaluation follows a step.
        quality: name of the metric that decides which state is the best; None saves none as such.
        direction: whether more or less of it is better.
    """

    key = "checkpointing"

    save: Callable[[bool], object]
    every_steps: int | None
    is_evaluation_step: Callable[[int], bool]
    quality: str | None = None
    direction: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        self._best = -math.inf

    def on_steps(self, records: Sequence[step_records.StepRecord], run: RunHandle) -> None:
        step = records[-1].step
        # At a step with an evaluation the checkpoint waits for it, to hold its metrics.
        if self._is_due(step) and not self.is_evaluation_step(step):
            self.save(False)

    def on_evaluation(self, record: step_records.EvalRecord, run: RunHandle) -> None:
        is_best = False
        if self.quality is not None:
            sign = 1 if self.direction == "max" else -1
            value = sign * record.metrics[self.quality]
            is_best = value > self._best
            if is_best:
                self._best = value
        if is_best or self._is_due(record.step):
            self.save(is_best)

    def _is_due(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = state.get("best", -math.inf)


@dataclass(eq=False)
class Profiler(RunCallback):
    """Profiles from its construction until a block passes `last_step`, or until the run ends.

    Files: `profile.txt` (operators by CPU time) and `profile.json` (chrome://tracing).

    Args:
        folder: where the files are written.
        last_step: the step whose block ends the profile.
        write_file: calls a function that writes a file, with the file's path.
    """

    key = "profiler"

    folder: Path
    last_step: int
    write_file: Callable[[Path, Callable[[Path], object]], object]

    def __post_init__(self) -> None:
        self._profile: profile | None = profile(acc_events=True)
        self._profile.start()

    def on_steps(self, records: Sequence[step_records.StepRecord], run: RunHandle) -> None:
        if records[-1].step >= self.last_step:
            self.close()

    def close(self) -> None:
        # The profile ends once: at its last step, or with the run if that is earlier.
        if self._profile is None:
            return
        finished = self._profile
        finished.stop()
        table = finished.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
        self._profile = None
        self.write_file(self.folder / "profile.txt", lambda path: path.write_text(table))
        trace = self.folder / "profile.json"
        self.write_file(trace, lambda path: finished.export_chrome_trace(str(path)))
