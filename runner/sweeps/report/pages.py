"""Write the report of a sweep: report.md, .html, .png, .csv, .json and the note for MLflow.

The parts of a page are blocks of runner.utils.markup; its tables come from columns.py, its
sentences from conclusion.py or, for mode=advise, from advice_page.py.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from runner.sweeps.report import advice_page
from runner.sweeps.report.charts import chart_figures, legend_entries, overview_figure
from runner.sweeps.report.columns import groups_table, jobs_table
from runner.sweeps.report.conclusion import (
    NO_BASELINE_REASON,
    conclusion_sentence,
    conclusion_text,
    failure_sentence,
    recommended_precision,
)
from runner.sweeps.report.downsample import curve_points
from runner.sweeps.report.export import job_rows, write_rows
from runner.sweeps.report.footnotes import report_footnotes
from runner.sweeps.report.jobs import Job, SweepData
from runner.sweeps.report.settings_summary import settings_blocks
from runner.sweeps.report.swept import swept_keys
from runner.sweeps.report.wording import join_names
from runner.sweeps.verdict.compare import BASELINE, Comparison, Group, compare_with_baselines
from runner.sweeps.verdict.gate import gate_verdict
from runner.utils.formatting import format_number
from runner.utils.markup import (
    Block,
    Charts,
    Commands,
    Heading,
    Items,
    Table,
    Text,
    markdown,
    to_html,
    to_markdown,
)
from runner.utils.plots import svg_element

MAX_TITLE_KEYS = 4
"""Swept keys in the title of the page."""
MAX_FAILED_JOB_NAMES = 6
"""Names of the jobs that failed for one reason."""
MAX_NOTE_CHARACTERS = 7000
"""Characters of the note; MLflow stores a tag's value up to 8000."""


def write_report(data: SweepData, folder: Path) -> list[Path]:
    """Write the report and its tables (CSV, JSON) into a folder that exists.

    Returns:
        The files written; no report.png if nothing was trained.

    Raises:
        OSError: the folder cannot be written to.
    """
    compared = compare_with_baselines([job.result for job in data.jobs])
    title = _page_title(data)
    if data.advice:
        answer = list(advice_page.advice_blocks(data.advice))
    else:
        answer = list(_answer_blocks(data, compared))
    answer += _fetch_failure_blocks(data)
    details = list(_detail_blocks(data, compared))

    # Markdown cannot hold the charts: they are in report.png.
    markdown_path = folder / "report.md"
    markdown_path.write_text(to_markdown(title, [*answer, *details]))
    html_path = folder / "report.html"
    html_path.write_text(to_html(title, [*answer, *_chart_blocks(data), *details]))
    paths = [markdown_path, html_path]
    figure = overview_figure(data)
    if figure is not None:
        picture_path = folder / "report.png"
        figure.savefig(picture_path, dpi=110)
        paths.append(picture_path)
    paths += write_rows(job_rows(data), folder)
    gate = gate_verdict(data.advice) if data.advice else None
    if gate is not None:
        paths.append(gate.write(folder))
    return paths


def _fetch_failure_blocks(data: SweepData) -> Iterator[Block]:
    """Yield the artifacts that could not be fetched: without them the report is weaker."""
    if data.fetch_failures:
        yield Heading("Not fetched from the store")
        yield Text(
            "Without these artifacts the report uses the tags, last metrics and points of the "
            "store. Make it again when they can be fetched."
        )
        for message in data.fetch_failures:
            yield Text(message)


def summary_markdown(data: SweepData, limit: int = MAX_NOTE_CHARACTERS) -> str:
    """Return conclusion, table of groups and commands for the note of the parent run.

    Args:
        data: the sweep.
        limit: characters; the table loses its last rows, whole lines, to stay within.
    """
    head, table, tail = _summary_parts(data)
    rows = markdown(table).splitlines() if table else []
    hint = "More rows: see report.html among the artifacts."

    def with_rows(count: int) -> str:
        # Two lines are the heading and its rule: a table of no rows is left out.
        shown = "\n".join(rows[:count]) if count > 2 else ""
        more = hint if count < len(rows) else ""
        return "\n\n".join(filter(None, (head, shown, more, tail))) + "\n"

    for count in range(len(rows), 1, -1):
        text = with_rows(count)
        if len(text) <= limit:
            return text
    # Even without rows the commands are too long: the conclusion is what a reader needs.
    short = f"{head}\n\n{hint}\n"
    return short if len(short) <= limit else head[:limit]


def _summary_parts(data: SweepData) -> tuple[str, Table | None, str]:
    """Return the Markdown before the table, the table, and the Markdown after it."""
    tail = markdown(Commands(data.commands)) if data.commands else ""
    if data.advice:
        blocks, table = advice_page.advice_markdown(data.advice)
        return "\n\n".join(map(markdown, blocks)), table, tail
    compared = compare_with_baselines([job.result for job in data.jobs])
    head = markdown(Text(conclusion_text(compared, data.missing_jobs_clause), "answer"))
    table = _groups_table(compared) if compared else None
    return head, table, tail


def _groups_table(compared: Sequence[Comparison]) -> Table:
    return groups_table(compared, recommended_precision(compared))


def _page_title(data: SweepData) -> str:
    """Return the question of mode=advise, or the keys that the sweep varies, and what it trains."""
    results = [job.result for job in data.jobs]
    models = _distinct(result.model for result in results)
    data_sets = _distinct(result.data for result in results)
    trained = " on ".join(filter(None, [models, data_sets]))
    if data.advise_settings and data.advise_settings.mode == "gate":
        return f"Does this precision train {trained or 'this model'}?"
    if data.advise_settings:
        return f"Which precision for {trained or 'this model'}?"
    keys = swept_keys(results)[:MAX_TITLE_KEYS]
    title = f"Sweep over {' × '.join(keys) or 'one job'}"
    return f"{title}: {trained}" if trained else title


def _distinct(names: Iterable[str]) -> str:
    """Return the names that are not empty, each once, in their order."""
    return ", ".join(dict.fromkeys(filter(None, names)))


def _answer_blocks(data: SweepData, compared: Sequence[Comparison]) -> Iterator[Block]:
    """Yield what a reader in a hurry reads: the conclusion, the failures, the table of groups."""
    groups = [comparison.group for comparison in compared]
    finished = sum(group.finished_count for group in groups)
    # The number of jobs is not known of every sweep; then those that began are counted.
    job_count = max(data.job_count, len(data.jobs))
    count = f"{finished} of {job_count} jobs finished"
    devices = _distinct(group.device for group in groups)
    sweep = f"sweep {data.sweep_id}" if data.sweep_id else ""
    yield Text(" · ".join(filter(None, [count, devices, sweep])), "small")
    for note in data.notes:
        yield Text(note)
    yield Text(conclusion_sentence(compared), "answer")
    failures = failure_sentence(compared, data.missing_jobs_clause)
    if failures:
        yield Text(failures)
    if not compared:
        return
    yield from settings_blocks(compared)
    yield _groups_table(compared)
    uncompared = _uncompared_names(compared)
    # Without any baseline the conclusion says so already.
    if uncompared and any(comparison.baseline for comparison in compared):
        names = join_names(uncompared)
        yield Text(f"Not compared: {names}: {NO_BASELINE_REASON} with the same settings.", "small")


def _uncompared_names(compared: Sequence[Comparison]) -> list[str]:
    """Return the names of the groups that ended and have no 32-true group to compare with."""
    groups = [comparison.group for comparison in compared if comparison.baseline is None]
    ended = [group for group in groups if group.finished_count]
    return [group.name for group in ended if group.precision != BASELINE]


def _chart_blocks(data: SweepData) -> list[Block]:
    """Return the charts with their legend; empty if nothing was trained."""
    pictures = [svg_element(figure) for figure in chart_figures(data)]
    if not pictures:
        return []
    return [Heading("Curves"), Charts(pictures, legend_entries(data))]


def _detail_blocks(data: SweepData, compared: Sequence[Comparison]) -> Iterator[Block]:
    """Yield what stands under the charts: failures, every job, the commands, the method."""
    groups = [comparison.group for comparison in compared]
    yield from _unavailable_blocks(groups)
    failed = [job for job in data.jobs if job.result.outcome in ("failed", "stopped", "diverged")]
    if failed:
        yield Heading("Failed")
        yield Items(_failure_items(failed))
    if data.jobs:
        yield Heading("Every job")
        yield jobs_table([job.result for job in data.jobs])
    if data.commands:
        yield Heading("Commands")
        yield Commands(data.commands)
    # mode=advise judges by a test of its own, which advice_page explains.
    if data.advise_settings:
        return
    if any(group.finished_count for group in groups):
        yield Heading("How this was compared")
        yield Items(list(report_footnotes(compared)), small=True)


def _unavailable_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """Yield the groups that this machine cannot run, with the reasons."""
    unavailable = [group for group in groups if group.counts.get("unavailable")]
    if unavailable:
        yield Heading("Unavailable here")
        yield Items([(group.name, " ".join(group.reasons)) for group in unavailable])


def _failure_items(failed: Sequence[Job]) -> list[tuple[str, str]]:
    """Return (jobs, reason), each reason once."""
    labels_by_reason: dict[str, list[str]] = {}
    for job in failed:
        labels_by_reason.setdefault(_failure_reason(job), []).append(job.result.label)
    return [
        (join_names(labels, MAX_FAILED_JOB_NAMES), reason)
        for reason, labels in labels_by_reason.items()
    ]


def _failure_reason(job: Job) -> str:
    """Return a job's error, or what of a diverged job's numbers is not finite."""
    result = job.result
    if result.outcome != "diverged":
        return f"{result.status}: {result.error}" if result.error else result.status
    if result.error:
        return f"diverged: {result.error}"
    metrics = ", ".join(f"{name} {format_number(value)}" for name, value in result.metrics.items())
    step = _first_nonfinite_step(job)
    if step is None:
        return f"diverged: {metrics}"
    return f"diverged: {metrics}; training loss first not finite at step {step}"


def _first_nonfinite_step(job: Job) -> int | None:
    """Return the first optimizer step whose training loss is NaN or infinite."""
    curve = job.curves.get("train/loss")
    if curve is None or not curve.shape[-1]:
        return None
    for step, loss in zip(*curve_points(curve), strict=True):
        if not math.isfinite(loss):
            return int(step)
    return None
