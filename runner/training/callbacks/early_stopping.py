"""Detect that the quality has stopped improving; the run's loop ends on it."""

import math
from collections.abc import Mapping
from typing import Any

from runner.training.callbacks.callback import Callback
from runner.training.records import EvalRecord


class EarlyStopping(Callback):
    """Sets should_stop after `patience` evaluations in a row that were no better than the best.

    Args:
        quality: name of the metric to watch.
        direction: "max" if more of it is better, otherwise "min".
        patience: evaluations.
    """

    key = "early_stopping"

    def __init__(self, quality: str, direction: str, patience: int) -> None:
        self.quality = quality
        self.sign = 1 if direction == "max" else -1
        self.patience = patience
        self._best = -math.inf
        self._worse = 0

    def evaluation(self, record: EvalRecord) -> None:
        value = self.sign * record.metrics[self.quality]
        # A NaN is never above the best, and as the second argument of max() it never becomes it.
        self._worse = 0 if value > self._best else self._worse + 1
        self._best = max(self._best, value)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "worse": self._worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._best = state["best"]
            self._worse = state["worse"]

    @property
    def should_stop(self) -> bool:
        """Return whether the patience is used up."""
        return self._worse >= self.patience
