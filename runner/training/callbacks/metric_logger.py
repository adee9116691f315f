"""Log the records to the tracker. Which values of a step are logged is said in step_metrics.py."""

from collections.abc import Iterator, Mapping
from typing import Any

from runner.tracking.tracker import MetricRecord, Tracker
from runner.training.callbacks.callback import RunCallback, RunHandle
from runner.training.records import EvalRecord, StepRecord, Steps
from runner.training.state import TrainState
from runner.training.step_metrics import legal_names, tracker_values
from runner.utils.accelerator import Accelerator
from runner.utils.tensors import MIB, tensor_bytes


class MetricLogger(RunCallback):
    """Logs every step's values at its own step number; rates and memory once per block.

    Args:
        tracker: stores the values.
        state: its optimizers' memory is logged.
        accelerator: gives the peak memory.
    """

    key = "metric_logger"
    is_in_every_run = True

    def __init__(self, tracker: Tracker, state: TrainState, accelerator: Accelerator) -> None:
        self.tracker = tracker
        self.state = state
        self.accelerator = accelerator
        self._last: StepRecord | None = None
        self._has_logged_optimizer_memory = False

    def on_steps(self, records: Steps, run: RunHandle) -> None:
        points: list[MetricRecord] = []
        for record in records:
            points += self._scale_changes(record)
            points.append((record.step, record.time_ms, tracker_values(record)))
            self._last = record
        points.append(self._block_values(records))
        self.tracker.log_metrics(points)
        self.tracker.check()

    def _scale_changes(self, record: StepRecord) -> Iterator[MetricRecord]:
        """Yield the loss scale where it changes, the value before and the value after."""
        # MLflow's charts draw a few hundred points per line: the scale of every step would hide a
        # short dip, and these few points show each one.
        last = self._last
        scale = record.loss_scale
        if scale is None:
            return
        if last is None:
            yield record.step, record.time_ms, {"loss_scale/changes": scale}
        elif last.loss_scale is not None and last.loss_scale != scale:
            yield last.step, last.time_ms, {"loss_scale/changes": last.loss_scale}
            yield record.step, record.time_ms, {"loss_scale/changes": scale}

    def _block_values(self, records: Steps) -> MetricRecord:
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
            size = tensor_bytes(*self.state.optimizer_tensors())
            values["memory/optimizer_mib"] = size / MIB
        last = records[-1]
        # Gauges are named after modules.
        gauges = last.gauges or {}
        values |= dict(zip(legal_names(gauges), gauges.values(), strict=True))
        return last.step, last.time_ms, values

    def on_evaluation(self, record: EvalRecord, run: RunHandle) -> None:
        values = dict(record.metrics)
        if record.stagnant_share is not None:
            values["guard/stagnant_share"] = record.stagnant_share
        self.tracker.log_metrics([(record.step, record.time_ms, values)])

    def state_dict(self) -> dict[str, Any]:
        last = self._last and self._last.to_state()
        return {"last": last, "sized": self._has_logged_optimizer_memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._last = None if state["last"] is None else StepRecord(**state["last"])
            self._has_logged_optimizer_memory = state["sized"]

    def close(self) -> None:
        """Log the last loss scale, which ends the line of its changes."""
        if self._last is not None and self._last.loss_scale is not None:
            values = {"loss_scale/changes": self._last.loss_scale}
            self.tracker.log_metrics([(self._last.step, self._last.time_ms, values)])
