"""Notices that the quality has stopped improving; the run's loop breaks on it."""

import math
from collections.abc import Mapping
from typing import Any

from runner.training.callbacks.callback import Callback
from runner.training.records import EvalRecord


class EarlyStopping(Callback):
    """reached is True after `patience` evaluations in a row that were no better than the best."""

    key = "early_stopping"

    def __init__(self, quality: str, direction: str, patience: int) -> None:
        self.quality, self.sign, self.patience = quality, 1 if direction == "max" else -1, patience
        self._best, self._worse = -math.inf, 0

    def evaluation(self, record: EvalRecord) -> None:
        value = self.sign * record.metrics[self.quality]
        self._worse = 0 if value > self._best else self._worse + 1
        self._best = max(self._best, value)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "worse": self._worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._best, self._worse = state["best"], state["worse"]

    @property
    def reached(self) -> bool:
        return self._worse >= self.patience
