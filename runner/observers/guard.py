"""Says, once each, what a precision does to a run that its user would want to know."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from runner.observers.base import Observer
from runner.records import EvalRecord, Steps

STAGNANT = 0.5
TINY_SCALE = 1.0


class Guard(Observer):
    """Warns of a loss that is not finite, a collapsed loss scale and updates rounded away."""

    def __init__(self, say: Callable[[str], None], precision: str) -> None:
        self.say, self.precision = say, precision
        self._said: set[str] = set()

    def steps(self, block: Steps) -> None:
        for record in block:
            if not math.isfinite(record.loss) and not record.overflow:
                hint = " Type precision=bf16-mixed." if self.precision.startswith("16") else ""
                self._once("loss", f"the loss is {record.loss} at step {record.step}.{hint}")
            if record.loss_scale is not None and record.loss_scale < TINY_SCALE:
                self._once(
                    "scale",
                    f"the loss scale fell to {record.loss_scale:g} at step {record.step}: "
                    "gradients overflow at every scale. Look for a module that leaves float16's "
                    "range and type precision.keep_fp32=[<module>], or precision=bf16-mixed.",
                )

    def evaluation(self, record: EvalRecord) -> None:
        if record.stagnant is not None and record.stagnant > STAGNANT:
            self._once(
                "stagnant",
                f"{record.stagnant:.0%} of the parameter elements with a gradient did not move at "
                f"step {record.step}: the update is under half a unit in the last place of "
                f"precision={self.precision}. Type a larger optimizer.lr, or a -mixed precision.",
            )

    def state_dict(self) -> dict[str, Any]:
        return {"said": sorted(self._said)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._said.update(state.get("said", ()))

    def _once(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.say(f"warning: {message}")
