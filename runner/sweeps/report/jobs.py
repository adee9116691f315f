"""Hold a sweep's jobs with their curves: the data that every report is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runner.modes.result import RunResult
from runner.sweeps.verdict.ranking import Advice, rank_precisions
from runner.sweeps.verdict.settings import AdviseSettings
from runner.tracking.history import Curve


@dataclass(frozen=True)
class Job:
    """One job: its result, and its metrics over the steps exactly as they were recorded.

    Attributes:
        curves: by metric name (see METRICS); empty for a job that never trained.
    """

    result: RunResult
    curves: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepData:
    """A sweep, complete or in part.

    Attributes:
        jobs: in the order in which the command asked for them.
        commands: the commands typed, one per machine or process that took part.
        is_stopped: whether a signal ended it before its last job.
        job_count: how many jobs it has, those that never began included; 0 if unknown.
        advise_settings: of mode=advise; None for a sweep that the user laid out.
        fetch_failures: artifacts of the store that could not be fetched, and why.
        notes: sentences on the jobs of two sweeps, see join_sweeps.
    """

    jobs: Sequence[Job]
    commands: Sequence[str] = ()
    sweep_id: str = ""
    is_stopped: bool = False
    job_count: int = 0
    advise_settings: AdviseSettings | None = None
    fetch_failures: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def is_unfinished(self) -> bool:
        """Return whether resuming the sweep would run a job.

        That is one that did not begin, was stopped, or failed for another reason than its numbers.
        """
        # A trial of mode=advise that fails is an answer about its precision.
        if self.advise_settings:
            return self.is_stopped
        if self.is_stopped or self.missing_jobs_clause:
            return True
        # A job that diverged would diverge again.
        repeatable = [job.result for job in self.jobs if not job.result.diverged]
        return any(result.status in ("failed", "stopped") for result in repeatable)

    @property
    def advice(self) -> Advice | None:
        """Return the answer of mode=advise, None for any other sweep."""
        if self.advise_settings is None:
            return None
        return rank_precisions([job.result for job in self.jobs], self.advise_settings)

    @property
    def missing_jobs_clause(self) -> str:
        """Return a clause on the jobs that did not begin; empty if every job began."""
        if self.job_count > len(self.jobs):
            return f"only {len(self.jobs)} of the sweep's {self.job_count} jobs began"
        if self.is_stopped and not self.job_count:
            return "the sweep was stopped before its last job"
        return ""
