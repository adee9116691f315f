"""Columns of every table of a sweep: the terminal's, report.md's, report.html's and MLflow's note.

To change a column, change its entry in `COLUMNS`, whose order is that of every table. There are
three kinds of rows: a job, a group of jobs with its comparison to 32-true, and a verdict of
mode=advise. A column has one function per kind of row that it shows. Where the tables of two kinds
want a column in different places, it has an entry for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.core import RunResult, fmt, metric_names
from runner.diagnostics.memory.forecast import MAX_FORECAST_BATCH_SIZE
from runner.output.markup import Cell, Table
from runner.sweeps.report.wording import (
    MAX_LISTED_NAMES,
    OUTCOME_WORDS,
    VERDICT_LOOKS,
    common_verdict,
    difference_words,
    format_mean_sd,
    format_range,
    format_ratio,
    health_words,
    outcome_words,
    rating_reason,
    rating_words,
)
from runner.sweeps.verdict.compare import BASELINE, Comparison, Group
from runner.sweeps.verdict.ranking import Advice, PrecisionVerdict, jobs_of
from runner.sweeps.verdict.statistics import Spread, Verdict
from runner.tracking.result_table import change_since_training, memory_saving, shared_settings

MAX_OPEN_JOBS = 4
"""A page folds a longer table of jobs."""


@dataclass(frozen=True)
class TableFacts:
    """What a column needs to know of the whole table.

    Attributes:
        jobs: every job of the table.
        groups: its rows in a table of groups, empty in the other tables.
        baseline: the precision that the rows are compared with.
        recommended: one of the groups.
    """

    jobs: Sequence[RunResult]
    groups: Sequence[Comparison] = ()
    baseline: str = BASELINE
    recommended: Comparison | None = None

    @property
    def quality(self) -> str:
        """Return the name of the quality that all jobs share, else "quality"."""
        names = {job.quality for job in self.jobs} - {""}
        return names.pop() if len(names) == 1 else "quality"

    @property
    def is_evaluation(self) -> bool:
        """Return whether the jobs evaluated a checkpoint instead of training."""
        return any(job.trained_in for job in self.jobs)


def _group_name(c: Comparison, facts: TableFacts) -> Cell:
    """Return the name of a group, without the sweep, which has a column."""
    job = c.group.jobs[0]
    return Cell(job.group or job.label, note="recommended" if c is facts.recommended else "")


def _group_status(c: Comparison, _: TableFacts) -> Cell:
    """Return how many jobs ended how; the reasons are in the list of failures below the table."""
    counts = c.group.counts
    jobs = len(c.group.jobs)
    text = outcome_words(c.group)
    if jobs > 1:
        text = ", ".join(f"{n}/{jobs} {OUTCOME_WORDS.get(one, one)}" for one, n in counts.items())
    return Cell(text, "quiet" if set(counts) == {"finished"} else "bad")


def _verdict_rating(verdict: PrecisionVerdict, _: TableFacts) -> Cell:
    """Return the verdict on a precision, with its reason."""
    tone = VERDICT_LOOKS[verdict.rating].tone
    return Cell(rating_words(verdict), tone, rating_reason(verdict))


def _group_quality(c: Comparison, facts: TableFacts) -> Cell:
    """Return mean ± standard deviation of the quality, with the number of seeds."""
    quality = c.group.quality
    if not quality:
        return Cell("diverged" if c.group.counts["diverged"] else "", "bad")
    qualities = [other.group.quality for other in facts.groups if other.group.quality]
    note = f"{quality.n} seeds" if quality.n > 1 else "one seed"
    # With one seed everywhere the number is in the footnotes only.
    if all(other.n == 1 for other in qualities):
        note = ""
    return Cell(format_mean_sd(quality), note=note)


def _job_change(metric: str, job: RunResult, facts: TableFacts) -> str:
    """Return how a metric changed from the checkpoint's own precision."""
    change = change_since_training(metric, job, facts.jobs)
    return "" if change is None else f"{change:+.4g}"


def _group_difference(c: Comparison, facts: TableFacts) -> Cell:
    """Return the verdict on the difference to the baseline's quality."""
    if c.is_baseline and not c.group.is_evaluation:
        return Cell("baseline", "quiet")
    if c.trains_less:
        return Cell(f"trains {fmt.format_percent(c.group.trained_share)}", "quiet", "not compared")
    if not c.difference:
        return Cell("")
    verdict, numbers = difference_words(c.difference)
    tone = VERDICT_LOOKS[c.difference.verdict].tone
    # A sentence under the table says what all rows have in common.
    return Cell(numbers, tone) if common_verdict(facts.groups) else Cell(verdict, tone, numbers)


def _group_speed_ratio(c: Comparison, facts: TableFacts) -> Cell:
    """Return the ratio of speeds with its range over seeds and a bar."""
    is_real = any(job.kernels != "emulated" for job in c.group.jobs)
    if not c.speed_ratio and c.difference and is_real:
        return Cell("not timed", "quiet")
    ratios = [other.speed_ratio.value for other in facts.groups if other.speed_ratio]
    bar = c.speed_ratio.value / max(ratios) if c.speed_ratio and ratios else None
    return Cell(format_ratio(c.speed_ratio), note=format_range(c.speed_ratio), bar=bar)


def _verdict_speed_ratio(verdict: PrecisionVerdict, facts: TableFacts) -> Cell:
    """Return the ratio of speeds with its range over seeds; unknown if emulated."""
    if verdict.is_emulated:
        return Cell("unknown", "quiet", "emulated")
    return _group_speed_ratio(verdict.comparison, facts)


def _group_equal_loss(c: Comparison, _: TableFacts) -> Cell:
    """Return the ratio of the times to an equal loss with its range over seeds."""
    if c.equal_loss and not c.equal_loss.value:
        return Cell("not reached", "bad")
    return Cell(format_ratio(c.equal_loss), note=format_range(c.equal_loss))


def _group_memory_ratio(c: Comparison, facts: TableFacts) -> Cell:
    """Return the ratio of memory with the MiB and a bar."""
    if c.memory_ratio is None:
        return Cell("")
    ratios = [other.memory_ratio for other in facts.groups if other.memory_ratio]
    bar = c.memory_ratio / max(ratios) if ratios else None
    return Cell(f"{c.memory_ratio:.2f}", note=_mib(c.group.memory_mib), bar=bar)


def _verdict_forecast(verdict: PrecisionVerdict, _: TableFacts) -> Cell:
    """Return the predicted peak of memory with the largest batch that fits."""
    forecast = verdict.forecast or {}
    batch = forecast.get("largest_batch")
    # The forecast tries no larger batch.
    more = " or more" if batch == MAX_FORECAST_BATCH_SIZE else ""
    note = f"largest batch {batch}{more}" if batch else ""
    return Cell(_mib(forecast.get("peak_mib")), note=note)


def _matrix_work(group: Group) -> str:
    """Return the shares of formats in the matrix work, which are those of every seed."""
    return "; ".join(dict.fromkeys(job.matrix_work for job in group.jobs if job.matrix_work))


def _mib(value: float | None) -> str:
    return "" if value is None else f"{fmt.format_number(value)} MiB"


Value = Cell | Spread | str | float | None
"""Of a cell: a number is written as in every table, a spread as its range."""


@dataclass(frozen=True)
class Column:
    """One column of a sweep's tables.

    A table leaves out a column whose cells are all empty.

    Attributes:
        name: the heading, unless `title` makes another one.
        job, group, verdict: make the cell from a row; None if the table of such rows lacks it.
        title: the heading.
        is_shown: whether a table has the column.
        is_text: whether cells are words, aligned left, instead of numbers.
        is_quiet: whether a table of several rows leaves it out where all cells are the same.
    """

    name: str
    job: Callable[[RunResult, TableFacts], Value] | None = None
    group: Callable[[Comparison, TableFacts], Value] | None = None
    verdict: Callable[[PrecisionVerdict, TableFacts], Value] | None = None
    title: Callable[[TableFacts], str] | None = None
    is_shown: Callable[[TableFacts], bool] = lambda _: True
    is_text: bool = False
    is_quiet: bool = False


COLUMNS = (
    Column("job", job=lambda job, _: job.label, is_text=True),
    Column(
        "precision",
        group=_group_name,
        verdict=lambda verdict, _: verdict.name,
        # Where other settings are swept, the names are those of jobs.
        title=lambda facts: "job" if any(c.group.settings for c in facts.groups) else "precision",
        is_text=True,
    ),
    Column("sweep", job=lambda job, _: job.sweep, group=lambda c, _: c.group.sweep, is_text=True),
    Column("status", job=lambda job, _: OUTCOME_WORDS.get(job.outcome, job.outcome), is_text=True),
    Column("status", group=_group_status, is_text=True, is_quiet=True),
    Column("verdict", verdict=_verdict_rating, is_text=True),
    Column("device", group=lambda c, _: c.group.device, is_text=True, is_quiet=True),
    Column(
        "quality",
        job=lambda job, _: job.quality_value,
        group=_group_quality,
        title=lambda facts: facts.quality,
    ),
    Column(
        "change",
        job=lambda job, facts: _job_change(job.quality, job, facts),
        group=lambda c, _: f"{c.group.change.mean:+.4g}" if c.group.change else "",
    ),
    Column(
        "loss",
        job=lambda job, _: job.metrics.get(metric_names.VAL_LOSS),
        is_shown=lambda facts: facts.is_evaluation and facts.quality != metric_names.VAL_LOSS,
    ),
    Column(
        "loss change",
        job=lambda job, facts: _job_change(metric_names.VAL_LOSS, job, facts),
        is_shown=lambda facts: facts.quality != metric_names.VAL_LOSS,
    ),
    Column(
        "difference",
        group=_group_difference,
        title=lambda facts: f"against {facts.baseline}",
        is_text=True,
    ),
    Column(
        "speed ratio",
        group=_group_speed_ratio,
        verdict=_verdict_speed_ratio,
        title=lambda facts: f"speed × {facts.baseline}",
    ),
    Column(
        "speed to equal loss",
        group=_group_equal_loss,
        verdict=lambda verdict, facts: _group_equal_loss(verdict.comparison, facts),
    ),
    Column(
        "examples/s",
        job=lambda job, _: job.examples_per_second,
        group=lambda c, _: c.group.speed.mean if c.group.speed else "",
        # Where every group that finished has a ratio, it says as much.
        is_shown=lambda facts: (
            not facts.groups
            or any(c.group.finished_count and not c.speed_ratio for c in facts.groups)
        ),
    ),
    Column(
        "memory ratio",
        group=_group_memory_ratio,
        verdict=lambda verdict, facts: _group_memory_ratio(verdict.comparison, facts),
        title=lambda facts: f"memory × {facts.baseline}",
    ),
    # The ratio's cell has the MiB beneath it.
    Column("memory, MiB", group=lambda c, _: c.group.memory_mib if c.memory_ratio is None else ""),
    Column("predicted peak", verdict=_verdict_forecast),
    Column("weights MiB", job=lambda job, _: job.weights_mib),
    Column(
        "saved", job=lambda job, _: memory_saving(job), is_shown=lambda facts: facts.is_evaluation
    ),
    Column(
        "state MiB",
        job=lambda job, _: job.optimizer_mib,
        is_shown=lambda facts: len({job.optimizer_mib or None for job in facts.jobs} - {None}) > 1,
    ),
    Column(
        "trains",
        job=lambda job, _: "" if job.trains in (None, 1.0) else fmt.format_percent(job.trains),
    ),
    Column(
        "peak",
        job=lambda job, _: job.peak_memory_mib,
        # A CPU has no allocator to ask: its peak is the resident set of the process.
        title=lambda facts: f"{'process' if any(j.is_on_cpu for j in facts.jobs) else 'peak'} MiB",
    ),
    Column("converted", job=lambda job, _: job.converted_share),
    Column(
        "matrix work",
        job=lambda job, _: job.matrix_work,
        group=lambda c, _: _matrix_work(c.group),
        verdict=lambda verdict, _: _matrix_work(verdict.group),
        # Where no precision mixes formats, its name says the same.
        is_shown=lambda facts: any(len(job.matrix_formats) > 1 for job in facts.jobs),
        is_text=True,
    ),
    Column(
        "skipped",
        job=lambda job, _: job.skipped_steps,
        group=lambda c, _: c.group.skipped,
        is_shown=lambda facts: not facts.groups or any(job.skipped_steps for job in facts.jobs),
    ),
    Column("final scale", job=lambda job, _: job.loss_scale),
    Column("converted", group=lambda c, _: c.group.converted, is_quiet=True),
    Column("best", job=lambda job, _: job.best),
    Column("step ms", job=lambda job, _: job.timed_step_ms),
    Column("health", verdict=lambda verdict, _: health_words(verdict), is_text=True),
)


def jobs_table(results: Sequence[RunResult]) -> Table:
    """Return the table with one row per job."""
    table = _table("job", results, TableFacts(results))
    folded = len(results) if len(results) > MAX_OPEN_JOBS else 0
    return replace(table, folded=folded, fold_title=f"{len(results)} jobs")


def groups_table(compared: Sequence[Comparison], recommended: Comparison | None) -> Table:
    """Return the table with one row per group of seeds; the recommended group's row is marked.

    Setting by setting the baseline stands first; groups without any result are last, and a page
    folds many of these.
    """
    settings = [*dict.fromkeys(shared_settings(c.group.settings) for c in compared)]

    def rank(c: Comparison) -> tuple[float, ...]:
        has_result = bool(c.group.counts["finished"])
        setting = settings.index(shared_settings(c.group.settings))
        return (not has_result, setting if has_result else 0, *_row_rank(c))

    compared = sorted(compared, key=rank)
    jobs = jobs_of(compared)
    is_of_two_sweeps = any(job.sweep for job in jobs)
    baseline = f"A's {BASELINE}" if is_of_two_sweeps else BASELINE
    facts = TableFacts(jobs, compared, baseline, recommended)
    marked = next((i for i, c in enumerate(compared) if c is recommended), None)
    table = replace(_table("group", compared, facts), marked=marked)
    count = sum(not comparison.group.counts["finished"] for comparison in compared)
    if MAX_LISTED_NAMES < count < len(compared):
        return replace(table, folded=count, fold_title=f"{count} without a result")
    return table


def _row_rank(c: Comparison) -> tuple[int, float, float]:
    """Return by what the groups of a setting are sorted: the verdict, the speed, the quality."""
    speed = c.speed_ratio.value if c.speed_ratio else 0.0
    if c.is_baseline:
        return -1, -speed, 0.0
    return (c.verdict or Verdict.UNJUDGED).rank, -speed, c.loss_gap


def advice_table(advice: Advice) -> Table:
    """Return the table with one row per verdict of mode=advise, best first."""
    facts = TableFacts(jobs_of(advice.verdicts), baseline=advice.request.baseline)
    marked = 0 if advice.recommendation else None
    return replace(_table("verdict", advice.verdicts, facts), marked=marked)


def _table(kind: str, rows: Sequence[Any], facts: TableFacts) -> Table:
    """Return a table without the columns that are not shown, have no text, or are quiet and say
    the same in each row.

    Args:
        kind: job, group or verdict, which the rows are.
        rows: one RunResult, Comparison or PrecisionVerdict for each row.
        facts: of the whole table.
    """
    titles: list[str] = []
    cells_by_column: list[list[Cell]] = []
    text_columns = set()
    for column in COLUMNS:
        make = getattr(column, kind)
        if not make or not column.is_shown(facts):
            continue
        cells = [_cell(make(row, facts)) for row in rows]
        is_constant = len(cells) > 1 and all(cell == cells[0] for cell in cells)
        if any(cell.text for cell in cells) and not (column.is_quiet and is_constant):
            if column.is_text:
                text_columns.add(len(titles))
            titles.append(column.title(facts) if column.title else column.name)
            cells_by_column.append(cells)
    return Table(titles, [*zip(*cells_by_column, strict=True)], frozenset(text_columns))


def _cell(value: Value) -> Cell:
    if isinstance(value, Cell):
        return value
    if isinstance(value, Spread):
        low, high = map(fmt.format_number, (value.low, value.high))
        return Cell(low if low == high else f"{low} to {high}")
    return Cell(value if isinstance(value, str) else fmt.format_number(value))
