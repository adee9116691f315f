"""Compute one table cell per column, for jobs, groups of seeds and verdicts of mode=advise.

A `job_*` function makes the cell of a job, a `group_*` function that of a group of seeds and a
`verdict_*` function that of a precision in mode=advise; columns.py says which column uses which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from runner.config.schema import MAX_FORECAST_BATCH_SIZE
from runner.modes.result import RunResult
from runner.modes.tables import change_since_training
from runner.sweeps.report.compare import BASELINE, Comparison
from runner.sweeps.report.number_text import format_mean_sd, format_range, format_ratio
from runner.sweeps.report.ranking import PrecisionVerdict
from runner.sweeps.report.statistics import Spread
from runner.sweeps.report.wording import (
    VERDICT_TONES,
    difference_words,
    rating_reason,
    rating_words,
)
from runner.utils.formatting import format_number, format_percent
from runner.utils.markup import Cell, Tone

MAX_REASON_CHARACTERS = 80
"""Characters of an error in the cell of a group's status."""


@dataclass(frozen=True)
class TableFacts:
    """What a column needs to know of the whole table.

    Attributes:
        jobs: every job of the table.
        groups: its rows in a table of groups, empty in the other tables.
        baseline: the precision that the rows are compared with.
    """

    jobs: Sequence[RunResult]
    groups: Sequence[Comparison] = ()
    baseline: str = BASELINE

    @cached_property
    def quality(self) -> str:
        """Return the name of the quality that all jobs share, else "quality"."""
        names = {job.quality for job in self.jobs if job.quality}
        return names.pop() if len(names) == 1 else "quality"

    @cached_property
    def is_evaluation(self) -> bool:
        """Return whether the jobs evaluated a checkpoint instead of training."""
        return any(job.trained_in for job in self.jobs)

    @cached_property
    def has_several_seeds(self) -> bool:
        """Return whether some group has a quality of several seeds."""
        qualities = [c.group.quality for c in self.groups if c.group.quality]
        return any(quality.n > 1 for quality in qualities)

    @cached_property
    def has_speed_ratios(self) -> bool:
        """Return whether every group that finished has a ratio, so that examples/s say no more."""
        if not self.groups:
            return False
        finished = [c for c in self.groups if c.group.finished_count]
        return all(c.speed_ratio for c in finished)

    @cached_property
    def greatest_speed_ratio(self) -> float:
        """Return the greatest speed ratio; the bars are drawn relative to it."""
        return max((c.speed_ratio.value for c in self.groups if c.speed_ratio), default=1.0)

    @cached_property
    def greatest_memory_ratio(self) -> float:
        """Return the greatest memory ratio; the bars are drawn relative to it."""
        return max((c.memory_ratio for c in self.groups if c.memory_ratio), default=1.0)


def first_title(facts: TableFacts) -> str:
    """Return the title of the names: precisions, or jobs if other settings were swept."""
    return "job" if any(c.group.settings for c in facts.groups) else "precision"


def job_status(job: RunResult, _: TableFacts) -> str:
    """Return how a job ended."""
    return job.outcome


def group_status(c: Comparison, _: TableFacts) -> Cell:
    """Return how many jobs ended how, with the reasons."""
    counts = c.group.counts
    jobs = len(c.group.jobs)
    if jobs == 1:
        text = ", ".join(counts)
    else:
        text = ", ".join(f"{count}/{jobs} {outcome}" for outcome, count in counts.items())
    reason = " ".join(" ".join(c.group.reasons).split())
    # The whole reason is in the list of failures below the table.
    if len(reason) > MAX_REASON_CHARACTERS:
        reason = f"{reason[:MAX_REASON_CHARACTERS].rstrip()}…"
    tone: Tone = "quiet" if set(counts) == {"finished"} else "bad"
    return Cell(text, tone, reason)


def verdict_rating(verdict: PrecisionVerdict) -> Cell:
    """Return the verdict on a precision, with its reason."""
    tone = VERDICT_TONES.get(verdict.rating, "")
    return Cell(rating_words(verdict), tone, rating_reason(verdict))


def group_quality(c: Comparison, facts: TableFacts) -> Cell:
    """Return mean ± standard deviation of the quality, with the number of seeds."""
    quality = c.group.quality
    if quality is None:
        return Cell("diverged" if c.group.counts.get("diverged") else "", "bad")
    # With one seed everywhere the number is in the footnotes only.
    note = ""
    if facts.has_several_seeds:
        note = f"{quality.n} seeds" if quality.n > 1 else "one seed"
    return Cell(format_mean_sd(quality), note=note)


def group_best(c: Comparison, _: TableFacts) -> Cell:
    """Return the mean of the best qualities; empty for evaluations."""
    return mean_cell(None if c.group.is_evaluation else c.group.best)


def job_change(metric: str, job: RunResult, facts: TableFacts) -> str:
    """Return how a metric changed from the checkpoint's own precision."""
    change = change_since_training(metric, job, facts.jobs)
    return "" if change is None else f"{change:+.4g}"


def group_change(c: Comparison, _: TableFacts) -> Cell:
    """Return how the quality changed from the checkpoint's own precision."""
    return Cell(f"{c.group.change.mean:+.4g}" if c.group.change else "")


def group_difference(c: Comparison, _: TableFacts) -> Cell:
    """Return the verdict on the difference to the baseline's quality."""
    if c.is_baseline and not c.group.is_evaluation:
        return Cell("baseline", "quiet")
    if c.difference is None:
        return Cell("")
    verdict, numbers = difference_words(c.difference)
    return Cell(verdict, VERDICT_TONES.get(c.difference.verdict, ""), numbers)


def group_speed_ratio(c: Comparison, facts: TableFacts) -> Cell:
    """Return the ratio of speeds with its range over seeds and a bar."""
    bar = c.speed_ratio.value / facts.greatest_speed_ratio if c.speed_ratio else None
    return Cell(format_ratio(c.speed_ratio), note=format_range(c.speed_ratio), bar=bar)


def verdict_speed_ratio(verdict: PrecisionVerdict) -> Cell:
    """Return the ratio of speeds with its range over seeds; unknown if emulated."""
    if verdict.is_emulated:
        return Cell("unknown", "quiet", "emulated")
    ratio = verdict.comparison.speed_ratio
    return Cell(format_ratio(ratio), note=format_range(ratio))


def group_memory_ratio(c: Comparison, facts: TableFacts) -> Cell:
    """Return the ratio of memory with the MiB and a bar."""
    if c.memory_ratio is None:
        return Cell("")
    bar = c.memory_ratio / facts.greatest_memory_ratio
    return Cell(f"{c.memory_ratio:.2f}", note=format_mib(c.group.memory_mib), bar=bar)


def group_memory(c: Comparison, _: TableFacts) -> Cell:
    """Return the MiB of a group without a ratio."""
    # The ratio's cell has the MiB beneath it.
    return Cell(format_mib(c.group.memory_mib) if c.memory_ratio is None else "")


def verdict_memory_ratio(verdict: PrecisionVerdict) -> Cell:
    """Return the ratio of memory with the MiB; empty if emulation distorts it."""
    # Weights take as much emulated; an accelerator's peak does not.
    if verdict.is_emulated and not verdict.group.is_on_cpu:
        return Cell("")
    ratio = verdict.comparison.memory_ratio
    return Cell("" if ratio is None else f"{ratio:.2f}", note=format_mib(verdict.group.memory_mib))


def verdict_forecast(verdict: PrecisionVerdict) -> Cell:
    """Return the predicted peak of memory with the largest batch that fits."""
    if verdict.forecast is None:
        return Cell("")
    peak = format_mib(verdict.forecast.get("peak_mib"))
    batch = verdict.forecast.get("largest_batch")
    if not batch:
        return Cell(peak)
    # The forecast tries no larger batch.
    more = " or more" if batch == MAX_FORECAST_BATCH_SIZE else ""
    return Cell(peak, note=f"largest batch {batch}{more}")


def job_trains(job: RunResult, _: TableFacts) -> str:
    """Return the share of the parameters' elements that train; empty for all."""
    return "" if job.trains in (None, 1.0) else format_percent(job.trains)


def peak_title(facts: TableFacts) -> str:
    """Return what the peak is measured on: the process or the device."""
    # A CPU has no allocator to ask: its peak is the resident set of the process.
    is_on_cpu = any("threads)" in job.device for job in facts.jobs)
    return "process MiB" if is_on_cpu else "peak MiB"


def mean_cell(spread: Spread | None) -> Cell:
    """Return the mean of a spread."""
    return Cell(format_number(spread.mean) if spread else "")


def range_cell(spread: Spread | None) -> Cell:
    """Return the range of a spread, one number if all values are equal."""
    if spread is None:
        return Cell("")
    low = format_number(spread.low)
    high = format_number(spread.high)
    return Cell(low if low == high else f"{low} to {high}")


def format_mib(value: float | None) -> str:
    """Return a size in MiB, empty for None."""
    return "" if value is None else f"{format_number(value)} MiB"
