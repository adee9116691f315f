"""End the training when the quality has stopped improving."""

import math
from collections.abc import Mapping
from typing import Any

from runner.training.callbacks.callback import RunCallback, RunHandle
from runner.training.records import EvalRecord


class EarlyStopping(RunCallback):
    """Ends the training after `patience` evaluations in a row that were no better than the best.

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

    def on_evaluation(self, record: EvalRecord, run: RunHandle) -> None:
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
    def stop_reason(self) -> str:  # type: ignore[override]
        """Return the setting that ends the training; empty while there is patience."""
        return f"train.early_stop={self.patience}" if self._worse >= self.patience else ""
