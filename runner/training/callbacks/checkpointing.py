"""Saves the state at an interval, and the best one. A block of records ends at each boundary, so
the state that is saved is the one after the block's last step."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from runner.training.callbacks.callback import Callback
from runner.training.records import EvalRecord, Steps


class Checkpointing(Callback):
    """Calls `save(best)` at each multiple of `every_steps`, after the evaluation where one is due
    at the same step, and after each evaluation that is the best so far.

    Args:
        save: told whether it is the best.
        every_steps: None saves the best only.
        evaluates: whether an evaluation is due after a step.
        quality: name of the metric that decides; None keeps no best.
        direction: whether more or less of it is better.
    """

    key = "checkpointing"

    def __init__(
        self,
        save: Callable[[bool], object],
        every_steps: int | None,
        evaluates: Callable[[int], bool],
        quality: str | None = None,
        direction: Literal["max", "min"] = "max",
    ) -> None:
        self.save, self.every_steps, self.evaluates = save, every_steps, evaluates
        self.quality, self.sign = quality, 1 if direction == "max" else -1
        self._best = -math.inf

    def steps(self, block: Steps) -> None:
        step = block[-1].step
        if self._due(step) and not self.evaluates(step):
            self.save(False)

    def evaluation(self, record: EvalRecord) -> None:
        value = -math.inf if self.quality is None else self.sign * record.metrics[self.quality]
        if best := value > self._best:
            self._best = value
        if best or self._due(record.step):
            self.save(best)

    def _due(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = state.get("best", -math.inf)
