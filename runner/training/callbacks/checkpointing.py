"""Save the state at an interval, and the best one.

A block of records ends at each interval's end, so the state that is saved is the one after the
block's last step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runner.training.callbacks.callback import RunCallback, RunHandle
from runner.training.records import EvalRecord, Steps


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

    def on_steps(self, records: Steps, run: RunHandle) -> None:
        step = records[-1].step
        # At a step with an evaluation the checkpoint waits for it, to hold its metrics.
        if self._is_due(step) and not self.is_evaluation_step(step):
            self.save(False)

    def on_evaluation(self, record: EvalRecord, run: RunHandle) -> None:
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
