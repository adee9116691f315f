"""The part of the run spec that mode=advise reads."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

LONE_ADVICE = (
    "mode=advise chooses its own jobs. Type mode=advise on the command line, without sweep= and "
    "without another hydra/sweeper."
)
LEAST_BUDGET = 10
OBJECTIVES = ("time", "memory", "quality")


@dataclass(frozen=True)
class AdviseSpec:
    """What mode=advise looks for, and how long.

    Attributes:
        budget: time for all of it, as 90s, 5m or 1h.
        objective: what the recommended precision is best in, among those whose quality is not
            distinguishable from float32's: time, memory or quality.
        tolerance: loss above float32's that is accepted, in standard deviations between the seeds
            of float32.
        seeds: paired seeds of each precision, 3 and up.
        steps: optimizer steps of a trial; null: a round number that the budget allows.
        islands: look for the modules to keep in float32 where a precision fails.
    """

    budget: str = "5m"
    objective: str = "time"
    tolerance: float = 1.0
    seeds: int = 5
    steps: int | None = None
    islands: bool = True

    @property
    def seconds(self) -> float | None:
        """The budget; None where it is not understood."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", self.budget)
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "": 1}[found[2]] if found else None

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, one message each."""
        if not self.seconds:
            yield f"advise.budget={self.budget} is no time. Type for example 90s, 5m or 1h."
        elif self.seconds < LEAST_BUDGET:
            yield (
                f"advise.budget={self.budget} is too short for a trial of each precision. Allowed: "
                f"{LEAST_BUDGET}s and more; a verdict takes minutes."
            )
        if self.objective not in OBJECTIVES:
            allowed = ", ".join(OBJECTIVES)
            yield f"advise.objective={self.objective} is not known. Allowed: {allowed}."
        if not self.tolerance >= 0:
            yield f"advise.tolerance={self.tolerance} is negative. Allowed: 0 and up."
        if self.seeds < 3:
            yield f"advise.seeds={self.seeds} give no verdict. Allowed: 3 and up."
