"""What a report is made of: the jobs of a sweep, from its folder or from MLflow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runner.result import RunResult
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
    """

    jobs: Sequence[Job]
    commands: Sequence[str] = ()
    sweep_id: str = ""
    stopped: bool = False
