"""Measure what a trial of the baseline takes, before the length of trials is chosen."""

from dataclasses import dataclass
from typing import Literal

from runner.sweeps.advisor.request import AdviseRequest
from runner.sweeps.advisor.trials import Trials
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.console import plain_console
from runner.utils.errors import ConfigError

BASELINE_BUDGET_SHARE = 0.05
"""Share of the budget in which the baseline's step time is measured, for a second at least."""
JOB_OVERHEAD_SECONDS = 0.7
"""Time of a job before and after its run: process, imports, the end of its record."""
_UNREACHED_STEP = 10**9
"""Step of an evaluation that never comes."""


@dataclass(frozen=True)
class BaselineTiming:
    """Measured times of the baseline, of a step and of a job besides them, and what it records.

    Attributes:
        metric: that precisions are judged by.
        direction: whichever of it is better.
    """

    step_seconds: float
    overhead_seconds: float
    planned_steps: int
    metric: str = VAL_LOSS
    direction: Literal["max", "min"] = "min"


def measure_baseline(request: AdviseRequest, trials: Trials) -> BaselineTiming:
    """Measure the baseline's times in a short job that is then deleted.

    Args:
        request: the command.
        trials: runs the job.

    Raises:
        ConfigError: the baseline does not train, or measures no loss.
    """
    seconds = max(1.0, BASELINE_BUDGET_SHARE * trials.budget)
    words = [f"train.max_seconds={seconds:g}", f"train.eval_every={_UNREACHED_STEP}"]
    # No longer than a trial, or the whole run, takes.
    limits = [n for n in (request.spec.train.max_steps, request.spec.advise.steps) if n]
    if limits:
        words.append(f"train.max_steps={min(limits)}")
    plain_console().print(
        f"{request.baseline} for {seconds:.0f} s at most, to measure its step time"
    )
    # The job is deleted below, and a store would keep its run.
    trial = request.trial_overrides(request.baseline, request.seed, *words, is_tracked=False)
    trials.record_shared_overrides(trial)
    result = trials.launch(trial)
    trials.delete_jobs()
    if result is None or result.status != "finished" or not result.step_ms:
        error = result.error if result else ""
        raise ConfigError(error or f"{request.baseline} took no step: there is nothing to compare.")
    is_named = request.spec.task.get("quality") is not None
    metric = result.quality if is_named else VAL_LOSS
    if metric not in result.metrics:
        raise ConfigError(
            f"mode={request.spec.mode} judges by {metric}, which task= does not measure."
        )
    step_seconds = result.step_ms / 1e3
    # Besides its steps a run may compile, which the trials do as well.
    other_seconds = max(0.0, result.seconds - result.steps * step_seconds)
    overhead = other_seconds + JOB_OVERHEAD_SECONDS
    direction = result.direction if is_named else "min"
    return BaselineTiming(step_seconds, overhead, result.planned_steps, metric, direction)
