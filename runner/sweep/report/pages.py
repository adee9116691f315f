"""Write the report of a sweep: report.md, report.html, report.png and the note for MLflow.

The parts of a page are blocks of runner.utils.markup; its tables come from columns.py, its
sentences from conclusion.py or, for mode=advise, from advice_page.py.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.modes.result import RunResult
from runner.sweep.report import advice_page
from runner.sweep.report.charts import chart_figures, legend_entries, overview_figure
from runner.sweep.report.columns import groups_table, jobs_table
from runner.sweep.report.compare import BASELINE, Comparison, compare_with_baselines
from runner.sweep.report.conclusion import (
    NO_BASELINE_REASON,
    conclusion_sentence,
    conclusion_text,
    failure_sentence,
    recommended_precision,
)
from runner.sweep.report.downsample import curve_points
from runner.sweep.report.footnotes import report_footnotes
from runner.sweep.report.jobs import Job, SweepData
from runner.sweep.report.number_text import join_names
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
MAX_FAILED_JOB_NAMES = 6
MAX_NOTE_CHARACTERS = 7000
"""Characters of the note; MLflow stores a tag's value up to 8000."""


def write_report(data: SweepData, folder: Path) -> list[Path]:
    """Write the report into a folder that exists.

    Returns:
        The files written; no report.png if nothing was trained.

    Raises:
        OSError: the folder cannot be written to.
    """
    compared = compare_with_baselines([job.result for job in data.jobs])
    title = _page_title(data)
    top = advice_page.advice_blocks(data.advice) if data.advice else _top_blocks(data, compared)
    before = [*top, *_fetch_failure_blocks(data)]
    after = list(_detail_blocks(data, compared))
    paths = [folder / "report.md", folder / "report.html"]
    paths[0].write_text(to_markdown(title, [*before, *after]))
    paths[1].write_text(to_html(title, [*before, *_chart_blocks(data), *after]))
    figure = overview_figure(data)
    if figure is not None:
        paths.append(folder / "report.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def _fetch_failure_blocks(data: SweepData) -> Iterator[Block]:
    """Name the artifacts that could not be fetched: without them the report is weaker."""
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
    return head, _groups_table(compared) if compared else None, tail


def _groups_table(compared: Sequence[Comparison]) -> Table:
    return groups_table(compared, recommended_precision(compared))


def _page_title(data: SweepData) -> str:
    results = [job.result for job in data.jobs]
    models = ", ".join(dict.fromkeys(result.model for result in results if result.model))
    data_sets = ", ".join(dict.fromkeys(result.data for result in results if result.data))
    trained = " on ".join(filter(None, [models, data_sets]))
    if data.advise_settings:
        return f"Which precision for {trained or 'this model'}?"
    keys = " × ".join(_swept_keys(results)[:MAX_TITLE_KEYS]) or "one job"
    return f"Sweep over {keys}: {trained}" if trained else f"Sweep over {keys}"


def _swept_keys(results: Sequence[RunResult]) -> list[str]:
    """Return the keys whose values differ between jobs, in the order of the command."""
    values_by_job = [_override_values(result) for result in results]
    keys = dict.fromkeys(key for values in values_by_job for key in values)
    swept = [key for key in keys if len({values.get(key) for values in values_by_job}) > 1]
    if swept:
        return swept
    return ["precision"] if len({result.precision for result in results}) > 1 else []


def _override_values(result: RunResult) -> dict[str, str]:
    values = {}
    for override in result.overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        # Where a job is recorded and how it is launched is not what the sweep varies.
        is_setting = not override.lstrip("+").startswith(("tracking.", "hydra."))
        if equals and is_setting:
            values[key] = value
    return values


def _top_blocks(data: SweepData, compared: Sequence[Comparison]) -> Iterator[Block]:
    """Yield what a reader in a hurry reads: the conclusion, the failures, the table of groups."""
    devices = ", ".join(dict.fromkeys(c.group.device for c in compared if c.group.device))
    finished = sum(c.group.finished_count for c in compared)
    sweep = f"sweep {data.sweep_id}" if data.sweep_id else ""
    count = f"{finished} of {max(data.job_count, len(data.jobs))} jobs finished"
    yield Text(" · ".join(filter(None, [count, devices, sweep])), "small")
    yield Text(conclusion_sentence(compared), "answer")
    if failures := failure_sentence(compared, data.missing_jobs_clause):
        yield Text(failures)
    if compared:
        yield _groups_table(compared)
    uncompared = [
        c.group.name
        for c in compared
        if c.baseline is None and c.group.finished_count and c.group.precision != BASELINE
    ]
    if uncompared and any(c.baseline for c in compared):
        names = join_names(uncompared)
        yield Text(f"Not compared: {names}: {NO_BASELINE_REASON} with the same settings.", "small")


def _chart_blocks(data: SweepData) -> list[Block]:
    pictures = [svg_element(figure) for figure in chart_figures(data)]
    if not pictures:
        return []
    lines = [(entry.name, entry.colour, entry.dashes) for entry in legend_entries(data)]
    return [Heading("Curves"), Charts(pictures, lines)]


def _detail_blocks(data: SweepData, compared: Sequence[Comparison]) -> Iterator[Block]:
    """Yield what stands under the charts: failures, every job, the commands, the method."""
    groups = [c.group for c in compared]
    unavailable = [group for group in groups if group.counts.get("unavailable")]
    if unavailable:
        yield Heading("Unavailable here")
        yield Items([(group.name, " ".join(group.reasons)) for group in unavailable])
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
    if any(group.finished_count for group in groups) and not data.advise_settings:
        yield Heading("How this was compared")
        yield Items(list(report_footnotes(compared)), small=True)


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
    since = "" if step is None else f"; training loss first not finite at step {step}"
    return f"diverged: {metrics}{since}"


def _first_nonfinite_step(job: Job) -> int | None:
    """Return the first optimizer step whose training loss is NaN or infinite."""
    curve = job.curves.get("train/loss")
    if curve is None or not curve.shape[-1]:
        return None
    for step, loss in zip(*curve_points(curve), strict=True):
        if not math.isfinite(loss):
            return int(step)
    return None
