"""Columns of every table of a sweep: the terminal's, report.md's, report.html's and MLflow's note.

To change a column, change its entry in `COLUMNS`; to change which columns a table has and in which
order, change the tuple of names of that table. There are three kinds of rows: a job, a group of
jobs with its comparison to 32-true, and a verdict of mode=advise. A column has one function per
kind of row that it can show.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.table import Table as TerminalTable

from runner.modes.result import RunResult
from runner.modes.tables import memory_saving
from runner.sweeps.report import cells
from runner.sweeps.report.cells import TableFacts
from runner.sweeps.report.compare import BASELINE, Comparison, sweep_letter, without_sweep
from runner.sweeps.report.ranking import Advice, PrecisionVerdict
from runner.sweeps.report.wording import health_words
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.formatting import format_number
from runner.utils.markup import Cell, Table

JobCell = Callable[[RunResult, TableFacts], str]
GroupCell = Callable[[Comparison, TableFacts], Cell]
VerdictCell = Callable[[PrecisionVerdict], Cell]


@dataclass(frozen=True)
class Column:
    """One column of a sweep's tables.

    A table leaves out a column whose cells are all empty.

    Attributes:
        name: the key by which the tables below select the column.
        job, group, verdict: make the cell from a row; None if no table shows such rows.
        title: the heading; None for the name.
        is_shown: whether a table has the column; None for always.
        is_text: whether cells are words, aligned left, instead of numbers.
    """

    name: str
    job: JobCell | None = None
    group: GroupCell | None = None
    verdict: VerdictCell | None = None
    title: Callable[[TableFacts], str] | None = None
    is_shown: Callable[[TableFacts], bool] | None = None
    is_text: bool = False


COLUMNS = (
    Column("job", job=lambda job, _: without_sweep(job.label), is_text=True),
    Column(
        "sweep",
        job=lambda job, _: sweep_letter(job.label),
        group=lambda c, _: Cell(sweep_letter(c.group.name)),
        is_text=True,
    ),
    Column(
        "precision",
        group=lambda c, _: Cell(without_sweep(c.group.name)),
        verdict=lambda verdict: Cell(verdict.name),
        title=cells.first_title,
        is_text=True,
    ),
    Column("status", job=cells.job_status, group=cells.group_status, is_text=True),
    Column("verdict", verdict=cells.verdict_rating, is_text=True),
    Column(
        "device",
        group=lambda c, _: Cell(c.group.device),
        is_shown=lambda facts: len({c.group.device for c in facts.groups}) > 1,
        is_text=True,
    ),
    Column(
        "quality",
        job=lambda job, _: format_number(job.metrics.get(job.quality)),
        group=cells.group_quality,
        title=lambda facts: facts.quality,
    ),
    Column("best", job=lambda job, _: format_number(job.best), group=cells.group_best),
    Column(
        "change",
        job=lambda job, facts: cells.job_change(job.quality, job, facts),
        group=cells.group_change,
    ),
    Column(
        "loss",
        job=lambda job, _: format_number(job.metrics.get(VAL_LOSS)),
        is_shown=lambda facts: facts.is_evaluation and facts.quality != VAL_LOSS,
    ),
    Column(
        "loss change",
        job=lambda job, facts: cells.job_change(VAL_LOSS, job, facts),
        is_shown=lambda facts: facts.quality != VAL_LOSS,
    ),
    Column(
        "difference",
        group=cells.group_difference,
        title=lambda facts: f"against {facts.baseline}",
        is_text=True,
    ),
    Column(
        "speed ratio",
        group=cells.group_speed_ratio,
        verdict=cells.verdict_speed_ratio,
        title=lambda facts: f"speed × {facts.baseline}",
    ),
    Column(
        "examples/s",
        job=lambda job, _: format_number(job.examples_per_second),
        group=lambda c, _: cells.mean_cell(c.group.speed),
        is_shown=lambda facts: not facts.has_speed_ratios,
    ),
    Column("step ms", job=lambda job, _: format_number(job.step_ms)),
    Column(
        "memory ratio",
        group=cells.group_memory_ratio,
        verdict=cells.verdict_memory_ratio,
        title=lambda facts: f"memory × {facts.baseline}",
    ),
    Column("MiB", group=cells.group_memory),
    Column("predicted peak", verdict=cells.verdict_forecast),
    Column("weights MiB", job=lambda job, _: format_number(job.weights_mib)),
    Column(
        "saved", job=lambda job, _: memory_saving(job), is_shown=lambda facts: facts.is_evaluation
    ),
    Column(
        "state MiB",
        job=lambda job, _: format_number(job.optimizer_mib),
        is_shown=lambda facts: len({job.optimizer_mib or None for job in facts.jobs} - {None}) > 1,
    ),
    Column("trains", job=cells.job_trains),
    Column("peak", job=lambda job, _: format_number(job.peak_memory_mib), title=cells.peak_title),
    Column(
        "converted", job=lambda job, _: job.converted, group=lambda c, _: Cell(c.group.converted)
    ),
    Column(
        "skipped",
        job=lambda job, _: format_number(job.skipped_steps),
        group=lambda c, _: cells.range_cell(c.group.skipped),
    ),
    Column(
        "final scale",
        job=lambda job, _: format_number(job.loss_scale),
        group=lambda c, _: cells.range_cell(c.group.loss_scale),
    ),
    Column("health", verdict=lambda verdict: Cell(health_words(verdict)), is_text=True),
)
_BY_NAME = {column.name: column for column in COLUMNS}

TERMINAL_JOB_COLUMNS = (
    "job",
    "sweep",
    "status",
    "quality",
    "change",
    "loss",
    "loss change",
    "examples/s",
    "weights MiB",
    "saved",
    "state MiB",
    "trains",
    "peak",
    "converted",
    "skipped",
    "final scale",
)
REPORT_JOB_COLUMNS = (*TERMINAL_JOB_COLUMNS, "best", "step ms")
GROUP_COLUMNS = (
    "precision",
    "sweep",
    "status",
    "device",
    "quality",
    "best",
    "change",
    "difference",
    "speed ratio",
    "examples/s",
    "memory ratio",
    "MiB",
    "final scale",
    "skipped",
    "converted",
)
ADVICE_COLUMNS = (
    "precision",
    "verdict",
    "speed ratio",
    "memory ratio",
    "predicted peak",
    "health",
)

Row = TypeVar("Row")


def jobs_table(results: Sequence[RunResult], names: Sequence[str] = REPORT_JOB_COLUMNS) -> Table:
    """Return the table with one row per job."""
    facts = TableFacts(results)

    def cell(column: Column, job: RunResult) -> Cell:
        assert column.job is not None
        return Cell(column.job(job, facts))

    return _table(names, results, cell, facts, is_cards=False)


def groups_table(compared: Sequence[Comparison], recommended: Comparison | None) -> Table:
    """Return the table with one row per group of seeds; the recommended group's row is marked."""
    jobs = [job for comparison in compared for job in comparison.group.jobs]
    is_of_two_sweeps = any(sweep_letter(job.label) for job in jobs)
    facts = TableFacts(jobs, compared, f"A's {BASELINE}" if is_of_two_sweeps else BASELINE)

    def cell(column: Column, c: Comparison) -> Cell:
        assert column.group is not None
        return column.group(c, facts)

    marked = None
    for index, comparison in enumerate(compared):
        if comparison is recommended:
            marked = index
    return _table(GROUP_COLUMNS, compared, cell, facts, marked)


def advice_table(advice: Advice) -> Table:
    """Return the table with one row per verdict of mode=advise, best first."""
    jobs = [job for verdict in advice.verdicts for job in verdict.group.jobs]
    facts = TableFacts(jobs, baseline=advice.settings.baseline)

    def cell(column: Column, verdict: PrecisionVerdict) -> Cell:
        assert column.verdict is not None
        return column.verdict(verdict)

    marked = 0 if advice.recommendation is not None else None
    return _table(ADVICE_COLUMNS, advice.verdicts, cell, facts, marked)


def _table(
    names: Sequence[str],
    rows: Sequence[Row],
    cell: Callable[[Column, Row], Cell],
    facts: TableFacts,
    marked: int | None = None,
    is_cards: bool = True,
) -> Table:
    """Return a table without the columns that are not shown or have no text.

    Args:
        cell: makes the cell of a column in a row.
        marked: index of the row that stands out.
        is_cards: whether rows turn into cards on a narrow screen; else the table scrolls.
    """
    titles: list[str] = []
    columns: list[list[Cell]] = []
    text_columns = set()
    for name in names:
        column = _BY_NAME[name]
        if column.is_shown is not None and not column.is_shown(facts):
            continue
        made = [cell(column, row) for row in rows]
        if not any(one.text for one in made):
            continue
        if column.is_text:
            text_columns.add(len(titles))
        titles.append(column.title(facts) if column.title else column.name)
        columns.append(made)
    by_row = [[made[i] for made in columns] for i in range(len(rows))]
    return Table(titles, by_row, frozenset(text_columns), marked, cards=is_cards)


def sweep_table(results: Sequence[RunResult]) -> TerminalTable:
    """Return the terminal's table of a sweep, one row per job."""
    precisions = sorted({result.trained_in for result in results if result.trained_in})
    title = "sweep"
    if precisions:
        title = f"sweep; change: from the checkpoint's own {', '.join(precisions)}"
    made = jobs_table(results, TERMINAL_JOB_COLUMNS)
    shown = TerminalTable(title=title, title_justify="left")
    for i, name in enumerate(made.head):
        is_text = i in made.words
        shown.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
    return _with_rows(shown, made)


def advice_terminal_table(advice: Advice) -> TerminalTable:
    """Return the terminal's table of mode=advise; its reasons are long and wrap."""
    made = advice_table(advice)
    shown = TerminalTable(title="which precision?", title_justify="left")
    for i, name in enumerate(made.head):
        shown.add_column(name, justify="left" if i in made.words else "right", overflow="fold")
    return _with_rows(shown, made)


def _with_rows(shown: TerminalTable, made: Table) -> TerminalTable:
    for row in made.rows:
        shown.add_row(*("\n".join(filter(None, (cell.text, cell.note))) for cell in row))
    return shown
