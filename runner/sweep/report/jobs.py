"""What a report is made of: the jobs of a sweep, from its folder or from MLflow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runner.modes.result import RunResult
from runner.sweep.advisor.settings import AdviseSettings
from runner.sweep.report.ranking import Advice, rank_precisions
from runner.tracking.history import Curve


@dataclass(frozen=True)
class Job:
    """One job: what it came to, and its metrics over the steps, exactly as they were recorded.

    curves: by metric name (see METRICS); empty for a job that never trained.
    """

    result: RunResult
    curves: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepData:
    """A sweep, whole or in part.

    Attributes:
        jobs: in the order in which they were asked for.
        commands: what was typed, one per machine or process that took part.
        stopped: a signal ended it before its last job.
        asked: how many jobs it has, with those that never began; 0 where that is not known.
        question: what mode=advise asked; None of a sweep that the user laid out.
    """

    jobs: Sequence[Job]
    commands: Sequence[str] = ()
    sweep_id: str = ""
    stopped: bool = False
    asked: int = 0
    question: AdviseSettings | None = None

    @property
    def unfinished(self) -> bool:
        """Whether going on with it would run a job: one that did not begin, was stopped or failed
        for another reason than its numbers."""
        if self.question:
            return self.stopped
        redo = any(
            j.result.status in ("failed", "stopped") and not j.result.diverged for j in self.jobs
        )
        return self.stopped or bool(self.missing) or redo

    @property
    def advice(self) -> Advice | None:
        """What the jobs answer to the question."""
        return (
            rank_precisions([job.result for job in self.jobs], self.question)
            if self.question
            else None
        )

    @property
    def missing(self) -> str:
        """What it did not come to; empty where every job began."""
        if self.asked > len(self.jobs):
            return f"only {len(self.jobs)} of the sweep's {self.asked} jobs began"
        unknown = self.stopped and not self.asked
        return "the sweep was stopped before its last job" if unknown else ""
