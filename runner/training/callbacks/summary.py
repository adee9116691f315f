"""Add up the records of a run for its result."""

import math
from collections.abc import Mapping
from typing import Any

from runner.training.callbacks.callback import RunCallback, RunHandle
from runner.training.records import EvalRecord, StepRecord, Steps

MIN_TIMED_MS = 250.0
"""Shortest time that gives a rate, in milliseconds; a shorter one varies with the system load."""

_STATE = {
    "metrics": "metrics",
    "evaluated": "last_evaluation_step",
    "best": "best",
    "stagnant": "stagnant_share",
    "scales": "scales",
    "overflows": "overflows",
    "examples": "_examples",
    "steps": "_steps",
    "blocks": "_blocks",
    "milliseconds": "_milliseconds",
}
"""By the key in a checkpoint, the attribute of a RunSummary that it restores."""


class RunSummary(RunCallback):
    """Totals over all records of a run, for its result and its final checkpoint.

    Args:
        quality: name of the metric whose best value is recorded.
        direction: "max" if more of it is better, otherwise "min".

    Attributes:
        last: the last step record that arrived.
        metrics: of the last evaluation, by name.
        last_evaluation_step: the step of the last evaluation; 0 before the first.
        best: best value of the quality so far; None before the first evaluation with a number.
        stagnant_share: of the last evaluation, see EvalRecord.
        scales: (step, loss scale) wherever the loss scale changed.
        overflows: the steps that were skipped.
    """

    key = "summary"
    is_in_every_run = True

    def __init__(self, quality: str, direction: str) -> None:
        self.quality = quality
        self.better = max if direction == "max" else min
        self.last: StepRecord | None = None
        self.metrics: dict[str, float] = {}
        self.last_evaluation_step = 0
        self.best: float | None = None
        self.stagnant_share: float | None = None
        self.scales: list[tuple[int, float]] = []
        self.overflows: list[int] = []
        # Steps, examples and milliseconds count towards the rate only; blocks count always.
        self._examples = 0
        self._steps = 0
        self._blocks = 0
        self._milliseconds = 0.0
        self._is_first_block_after_resume = False

    def on_steps(self, records: Steps, run: RunHandle) -> None:
        self.last = records[-1]
        self._blocks += 1
        if self._blocks == 2:
            # The first block counted only in case it stays the only one: kernels warm up in it.
            self._examples = 0
            self._steps = 0
            self._milliseconds = 0.0
        timed = records
        # A resumed process warms up again. Its first block counts only if nothing else was timed.
        if self._is_first_block_after_resume and self._steps:
            timed = ()
        # Within the first block of the run only the first step is omitted, the slowest of all.
        elif self._blocks == 1 and len(records) > 1:
            timed = records[1:]
        self._is_first_block_after_resume = False
        self._steps += len(timed)
        self._examples += sum(record.examples for record in timed)
        self._milliseconds += sum(record.step_ms for record in timed)
        for record in records:
            if record.overflow:
                self.overflows.append(record.step)
            scale = record.loss_scale
            if scale is not None and (not self.scales or self.scales[-1][1] != scale):
                self.scales.append((record.step, scale))

    def on_evaluation(self, record: EvalRecord, run: RunHandle) -> None:
        self.metrics = dict(record.metrics)
        self.last_evaluation_step = record.step
        self.stagnant_share = record.stagnant_share
        # One of several validation sets of another trainer may have none.
        value = record.metrics.get(self.quality, math.nan)
        # max() and min() would return NaN or not, depending on the order of their arguments.
        if not math.isnan(value):
            self.best = value if self.best is None else self.better(self.best, value)

    def state_dict(self) -> dict[str, Any]:
        state = {key: getattr(self, attribute) for key, attribute in _STATE.items()}
        return {"last": self.last and self.last.to_state(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._is_first_block_after_resume = True
        if not state:
            return
        self.last = None if state["last"] is None else StepRecord(**state["last"])
        for key, attribute in _STATE.items():
            setattr(self, attribute, state[key])

    def result_values(self) -> dict[str, Any]:
        """Return the numbers of the run's result.

        The rate leaves out the first block, where kernels warm up, and for a run of one block the
        first step; it is None if less than MIN_TIMED_MS was timed.
        """
        last = self.last
        milliseconds = self._milliseconds
        rate = None
        if milliseconds >= MIN_TIMED_MS:
            rate = self._examples / milliseconds * 1e3
        return {
            "metrics": self.metrics,
            "best": self.best,
            "steps": last.step if last else 0,
            "train_loss": last.loss if last else None,
            "examples_per_second": rate,
            "step_ms": milliseconds / self._steps if last else None,
            "skipped_steps": last.skipped_steps if last else None,
            "loss_scale": last.loss_scale if last else None,
            "stagnant_share": self.stagnant_share,
        }
