"""Say how far a sweep is: beside the bar of a job that runs, and in the line that a job leaves.

It is read from the sweep's folder, which the jobs of every launcher share.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from runner.core import ConfigError, RunResult, fmt, layout, run_result
from runner.output.console import plain_console, without_numbers
from runner.sweeps.manifest import Manifest
from runner.sweeps.verdict.advise_request import AdviseRequest
from runner.tracking.result_table import read_results, result_line

RECENT_JOBS = 8
"""Jobs whose mean time those that follow are expected to take."""


def job_label(sweep: Path, name: str) -> Callable[[], str]:
    """Return a function that names a job that begins now, and says how far its sweep is.

    Args:
        sweep: folder of the sweep.
        name: of the job: what differs from the others.
    """
    manifest = Manifest.read(sweep)
    ended = _ended_results(sweep)
    job_seconds = _mean_job_seconds(sweep, manifest.jobs_at_once, ended)
    # Short: a terminal of 80 columns has the bar, too.
    place = _place(manifest, len(ended) + 1, "/", "/")
    began_ms = fmt.now_ms()

    def label() -> str:
        elapsed = (fmt.now_ms() - began_ms) / 1e3
        left = _seconds_left(manifest, len(ended), job_seconds, elapsed)
        return f"{place}{f', {fmt.format_duration(left)} left' if left >= 1 else ''}  {name}"

    return label


def print_job_line(folder: Path, number: int = 0, is_elsewhere: bool = False) -> None:
    """Print the result of a job that has ended in one line; nothing for one that left none.

    Args:
        folder: of the job, in its sweep's.
        number: which one of the jobs it is, where more than those before it have ended.
        is_elsewhere: what the job itself has printed is not on this screen.
    """
    sweep = folder.parent
    with suppress(OSError, ValueError, ConfigError):
        result = RunResult.read(folder)
        manifest = Manifest.read(sweep)
        ended = _ended_results(sweep)
        request = AdviseRequest.read(sweep)
        if manifest.budget_end_ms and not request:
            return  # the trial that measures the step time: it is no trial of the verdict
        if request:
            result = replace(result, quality=request.metric)
        place = _place(manifest, number or len(ended) + (result.status == "stopped"))
        line = f"{place}  {result_line(result)}"
        is_untried = result.status in run_result.UNTRIED
        reason = result.error.partition("\n")[0].removesuffix(".")
        line += f", its log is in {folder}" if reason and is_elsewhere else ""
        known = alike_job(folder, result.precision, result.error)
        if known:
            line += f", as {known}"
        # Any other job has printed why it failed.
        elif reason and (is_untried or is_elsewhere or request):
            line += f", because {reason}" if is_untried else f": {reason}"
        # On a terminal the bar of the next job says it.
        if not sys.stdout.isatty():
            job_seconds = _mean_job_seconds(sweep, manifest.jobs_at_once, ended)
            left = _seconds_left(manifest, len(ended), job_seconds)
            of = "budget" if manifest.budget_end_ms else "sweep"
            line += f"; about {fmt.format_duration(left)} of the {of} left" if left >= 1 else ""
        plain_console().print(line, soft_wrap=True)


def alike_job(folder: Path, precision: str, error: str) -> str:
    """Return the label of another job of a sweep that ended before by the same error but for the
    precision's name, or in the same precision for its numbers; empty without any.

    Args:
        folder: of the job that ends now, in its sweep's.
        precision: of that job.
        error: of that job.
    """
    wanted = common_reason(precision, error)
    for other in _ended_results(folder.parent):
        found = common_reason(other.precision, other.error)
        is_alike = found == wanted
        if other.precision == precision:
            is_alike = without_numbers(found) == without_numbers(wanted)
        if is_alike and other.error and Path(other.folder).name != folder.name:
            return other.label
    return ""


def common_reason(precision: str, error: str) -> str:
    """Return an error as it reads for all precisions that lack the same."""
    # Later in an error, as in a command to type, the precision itself is meant.
    own = f"precision={precision} "
    return f"it {error.removeprefix(own)}" if error.startswith(own) else error


def _ended_results(sweep: Path) -> list[RunResult]:
    """Return the results of the jobs that have ended; one that a signal stopped runs again."""
    # The results of jobs that a resumed sweep runs again are older than its manifest. A job
    # without a result has no precision.
    begun = (sweep / layout.MANIFEST).stat().st_mtime
    # The manifest of mode=advise is written anew between trials, and a trial that fails is final.
    is_advice = (sweep / layout.ADVICE).is_file()
    ended = []
    for result in read_results(sweep):
        is_final = result.status == "finished" or result.diverged or is_advice
        if not result.precision or result.status == "stopped":
            continue
        if is_final or _file_time(result) >= begun:
            ended.append(result)
    return ended


def _file_time(result: RunResult, name: str = layout.RESULT) -> float:
    """Return when a file of a job's folder was written, Unix time in seconds."""
    return (Path(result.folder) / name).stat().st_mtime


def _mean_job_seconds(sweep: Path, places: int, ended: Sequence[RunResult]) -> float:
    """Return how long a job takes one of the sweep's places; 0 where that is not known.

    That is from the end of the job before it there, with what a process does before and after its
    run. Of the first job in a place it is the run alone: the start of the sweep does not count.

    Args:
        sweep: folder of the sweep.
        places: how many jobs run at once; 0 where that is not known.
        ended: results of the jobs that have ended.
    """
    begun = (sweep / layout.MANIFEST).stat().st_mtime
    ordered = sorted(ended, key=_file_time)
    seconds = []
    for number, result in enumerate(ordered):
        # A job that failed before it trained took no time.
        if not (result.seconds and places):
            continue
        before = _file_time(ordered[number - places]) if number >= places else 0.0
        since = before if before >= begun else _file_time(result, layout.CONFIG)
        seconds.append(_file_time(result) - since)
    return fmean(seconds[-RECENT_JOBS:]) if seconds else 0.0


def _place(
    manifest: Manifest, number: int, of: str = " of ", of_at_most: str = " of at most "
) -> str:
    """Return which one of the sweep's jobs or trials the next one to end is."""
    if manifest.budget_end_ms:
        bound = f"{of_at_most}{manifest.max_trials}" if manifest.max_trials else ""
        return f"trial {number}{bound}"
    jobs = str(manifest.jobs or "")
    return f"job {number:>{len(jobs)}}{of}{jobs}" if jobs else f"job {number}"


def _seconds_left(
    manifest: Manifest, ended: int, job_seconds: float, elapsed: float = 0.0
) -> float:
    """Return the time left of a sweep or of a budget; 0 where it is not known.

    Args:
        manifest: of the sweep.
        ended: number of the jobs that have ended.
        job_seconds: that a job takes.
        elapsed: seconds since the next job began.
    """
    if manifest.budget_end_ms:
        return (manifest.budget_end_ms - fmt.now_ms()) / 1e3
    rest = manifest.jobs - ended
    if not job_seconds or rest <= 0:
        return 0.0
    # A job that takes longer than others does not shorten what follows it.
    share = job_seconds / manifest.jobs_at_once
    return share * rest - min(elapsed, share)
