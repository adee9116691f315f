"""mode=advise and mode=gate, whose jobs are chosen as results come in, and the command report."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from runner.core import Command, ConfigError, Mode, Room, RunSpec, errors

if TYPE_CHECKING:
    from runner.core import Strategy, run_context

OBJECTIVES = ("time", "memory", "quality")
MIN_BUDGET_SECONDS = 10
"""Seconds; a shorter advise.budget is refused."""

ADVISE_USAGE_MESSAGE = (
    "mode=advise and mode=gate choose their own jobs. Type mode=advise or mode=gate on the command "
    "line, without sweep= and without another hydra/sweeper."
)


@dataclass(frozen=True)
class AdviseSpec:
    """Question and budget of mode=advise and mode=gate.

    Attributes:
        budget: time for the whole command, as 90s, 5m or 1h.
        objective: time, memory or quality: what the recommended precision is best in, among the
            precisions whose quality cannot be distinguished from float32's.
        baseline: what the precisions are compared with: a precision, or the folder or MLflow id of
            a run or a sweep, whose precision it is and whose seeds are not trained again.
        max_gap: accepted increase of the loss over the baseline's, in the unit of the loss, as in
            0.01; null accepts what advise.tolerance says.
        tolerance: accepted increase of the loss over the baseline's, in standard deviations of the
            baseline's loss between seeds; ignored if advise.max_gap is set.
        seeds: number of seeds that each precision is trained with, the same ones for all; 3 or
            more; mode=gate trains fewer where they decide.
        steps: optimizer steps of each trial; null takes a round number that the budget allows.
        update_rules: try the rules of precision.update if a precision with weights of 16 bits
            fails, the one of the fewest bytes first.
        islands: search for the modules to keep in float32 if a precision fails.
    """

    budget: str = "5m"
    objective: str = "time"
    baseline: str = "32-true"
    max_gap: float | None = None
    tolerance: float = 1.0
    seeds: int = 5
    steps: int | None = None
    update_rules: bool = True
    islands: bool = True

    @property
    def seconds(self) -> float | None:
        """Return the budget in seconds, or None if it is not understood."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", self.budget)
        if not match:
            return None
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "": 1}[match[2]]

    def problems(self, spec: "RunSpec") -> Iterator[str]:
        """Yield a message for each value that is not allowed."""
        yield from errors.count_problems("advise", self, ("steps",))
        if not self.seconds:
            yield f"advise.budget={self.budget} is no duration. Type for example 90s, 5m or 1h."
        elif self.seconds < MIN_BUDGET_SECONDS:
            yield (
                f"advise.budget={self.budget} is too short for a trial of each precision. Allowed: "
                f"{MIN_BUDGET_SECONDS}s and more; a verdict takes minutes."
            )
        if self.objective not in OBJECTIVES:
            allowed = ", ".join(OBJECTIVES)
            yield f"advise.objective={self.objective} is not known. Allowed: {allowed}."
        if self.max_gap is not None and not self.max_gap >= 0:
            yield f"advise.max_gap={self.max_gap} is negative. Allowed: 0 and up, or null."
        if not self.tolerance >= 0:
            yield f"advise.tolerance={self.tolerance} is negative. Allowed: 0 and up."
        # A t-interval over two seeds is too wide for any verdict.
        if self.seeds < 3:
            yield f"advise.seeds={self.seeds} is too few for a verdict. Allowed: 3 and up."


class Advise(Mode):
    """Find the best precision for a training, by trials."""

    name = "advise"
    chooses_jobs = True

    def plan(
        self, plan: "run_context.PlannedRun", say: Callable[[str], None], strategy: "Strategy"
    ) -> NoReturn:
        raise ConfigError(ADVISE_USAGE_MESSAGE)


class Gate(Advise):
    """Judge whether one precision trains as well as the baseline, seed by seed."""

    name = "gate"


def _report(words: Sequence[str], values: Mapping[str, str]) -> int:
    from runner.sweeps.report.load import rebuild_report

    return rebuild_report(words, values)


REPORT = Command(
    name="report",
    summary="rebuild a sweep's report, or make one of two sweeps",
    description="Rebuilds the report of a sweep from its folder, or from an id out of MLflow "
    "alone. With two\nsweeps, writes the report over the jobs of both, compared with 32-true of "
    "the first one.",
    run=_report,
    options={
        **Command.STORE_OPTIONS,
        "--out <folder>": "where the files are written; by default the sweep's folder, or "
        "outputs/reports/<sweep>",
    },
    words="<sweep> [<sweep>]",
    words_meaning="its folder, its id or the id of its parent run; by default the newest",
    words_allowed="one or two sweeps",
    max_words=2,
)
ROOM = Room(sections={"advise": AdviseSpec}, modes=(Advise(), Gate()), commands=(REPORT,))
