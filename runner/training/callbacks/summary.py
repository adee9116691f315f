"""Adds up a run for its summary."""

import math
from collections.abc import Mapping
from typing import Any

from runner.training.callbacks.callback import Callback
from runner.training.records import (
    EvalRecord,
    StepRecord,
    Steps,
    record_from_state,
    record_to_state,
)

LEAST_MS = 250.0  # what is shorter measures the machine's moods


class RunSummary(Callback):
    """Totals over all records. The rate leaves the first block out, where kernels warm up, and of
    a run with one block the first step; None where less than LEAST_MS is left."""

    key = "summary"
    is_in_every_run = True

    def __init__(self, quality: str, direction: str) -> None:
        self.quality, self.better = quality, max if direction == "max" else min
        self.last: StepRecord | None = None
        self.metrics: dict[str, float] = {}
        self.last_evaluation_step = 0
        self.best: float | None = None
        self.stagnant_share: float | None = None
        self.scales: list[tuple[int, float]] = []
        self.overflows: list[int] = []
        self._examples = self._steps = self._blocks = 0
        self._milliseconds = 0.0
        self._cold = False  # the next block is the first after the run was cut

    def steps(self, block: Steps) -> None:
        self.last = block[-1]
        self._blocks += 1
        if self._blocks == 2:
            self._examples, self._steps, self._milliseconds = 0, 0, 0.0
        timed = block[1:] if self._blocks == 1 and len(block) > 1 else block
        if self._cold and self._steps:
            timed = ()
        self._cold = False
        self._steps += len(timed)
        self._examples += sum(record.examples for record in timed)
        self._milliseconds += sum(record.step_ms for record in timed)
        for record in block:
            if record.overflow:
                self.overflows.append(record.step)
            scale = record.loss_scale
            if scale is not None and (not self.scales or self.scales[-1][1] != scale):
                self.scales.append((record.step, scale))

    def evaluation(self, record: EvalRecord) -> None:
        self.metrics, self.last_evaluation_step = dict(record.metrics), record.step
        self.stagnant_share = record.stagnant_share
        value = record.metrics[self.quality]
        if not math.isnan(value):
            self.best = value if self.best is None else self.better(self.best, value)

    def state_dict(self) -> dict[str, Any]:
        return {
            "last": record_to_state(self.last),
            "metrics": self.metrics,
            "evaluated": self.last_evaluation_step,
            "best": self.best,
            "stagnant": self.stagnant_share,
            "scales": self.scales,
            "overflows": self.overflows,
            "examples": self._examples,
            "steps": self._steps,
            "blocks": self._blocks,
            "milliseconds": self._milliseconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cold = True
        if not state:
            return
        self.last = record_from_state(state["last"])
        self.metrics = state["metrics"]
        self.last_evaluation_step = state["evaluated"]
        self.best = state["best"]
        self.stagnant_share = state["stagnant"]
        self.scales = state["scales"]
        self.overflows = state["overflows"]
        self._examples = state["examples"]
        self._steps = state["steps"]
        self._blocks = state["blocks"]
        self._milliseconds = state["milliseconds"]

    def summary(self) -> dict[str, Any]:
        """Numbers of the run's result."""
        last, ms = self.last, self._milliseconds
        return {
            "metrics": self.metrics,
            "best": self.best,
            "steps": last.step if last else 0,
            "train_loss": last.loss if last else None,
            "examples_per_second": self._examples / ms * 1e3 if ms >= LEAST_MS else None,
            "step_ms": ms / self._steps if last else None,
            "skipped_steps": last.skipped_steps if last else None,
            "loss_scale": last.loss_scale if last else None,
            "stagnant_share": self.stagnant_share,
        }
