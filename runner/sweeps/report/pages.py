"""Write the report of a sweep: report.md, .html, .png, .csv, .json and the note for MLflow.

The parts of a page are blocks of runner.output.markup; its tables come from columns.py, its
sentences from conclusion.py or, for mode=advise, from advice_page.py.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runner.config.resolve import omitted_key_messages
from runner.core import Console, RunResult, files, fmt, layout, secrets
from runner.output.markup import (
    Block,
    Cell,
    Charts,
    Commands,
    Heading,
    Items,
    Origin,
    Table,
    Text,
    markdown,
    markdown_text,
    terminal_table,
    to_html,
    to_markdown,
)
from runner.output.plots import svg_element
from runner.sweeps.other_programs import BUSY_SHARE
from runner.sweeps.report.advice_page import EQUAL_LOSS_NOTE, advice_blocks, method_notes
from runner.sweeps.report.charts import chart_figures, overview_figure
from runner.sweeps.report.columns import advice_table, groups_table, jobs_table
from runner.sweeps.report.conclusion import NO_BASELINE_REASON, settings_blocks
from runner.sweeps.report.sweep_data import Job, JobSettings, SweepData
from runner.sweeps.report.wording import OUTCOME_WORDS, cast_note, common_verdict, join_names
from runner.sweeps.verdict.compare import (
    BASELINE,
    MIN_GAIN_ONE_SEED,
    MIN_GAIN_SEEDS,
    Comparison,
    job_name,
)
from runner.sweeps.verdict.statistics import ERROR_RATE
from runner.tracking.history import curve_points
from runner.tracking.result_table import setting_values, table_columns, table_rows

MAX_TITLE_KEYS = 4
"""Swept keys in the title of the page."""
MAX_FAILED_JOB_NAMES = 6
"""Names of the jobs that failed for one reason."""
SCHEMA_VERSION = 1
"""Version of report.json; a new column does not change it."""
QUALITY_NOTE = """the last evaluation's, mean ± sample standard deviation (number of seeds);
diverged jobs are not in the mean. Seeds: {seeds}."""
CHANGE_NOTE = "against what the checkpoint reached in the precision it was trained in."
VERDICT_NOTE = f"""difference of the means, judged as by mode=advise (docs/advise.md; {{test}}).
Within tolerance: at {ERROR_RATE:.0%}, a loss of more than {{accepted}} is excluded, for which the
lower bound of a deviation that few seeds measure counts. Worse or better: beyond the tolerance, and
by the same test at {ERROR_RATE:.0%} for all precisions together. Neither: not enough evidence.
What is tolerated you say: sweep.resume=<folder> advise.max_gap=0.01, in the unit of the quality,
judges the same jobs anew."""
SPEED_NOTE = f"""examples/s of training, without the first block of steps and without evaluations
(in mode=evaluate, of the evaluation); the median of the seeds' ratios where the seeds match, else
of the medians, with the 95 % interval over seeds (t test of the logarithms). Called faster or
slower where the interval excludes 1 and the median is more than {MIN_GAIN_SEEDS:.0%} from it
({MIN_GAIN_ONE_SEED:.0%} with one seed), and unclear where other programs kept more than
{BUSY_SHARE:.0%} of a CPU busy. Not timed where one of the jobs took less than a quarter of a second
for its steps."""
TWO_SWEEPS_NOTE = f"""the jobs of A and of B are compared with {BASELINE} of A. B's seeds are paired
with A's where both are the same. Whatever differs between A and B may be the cause of a verdict on
B."""
ROUNDING_NOTE = """Compiled code with train.compile_rounding=fused leaves out the roundings of half
precision between the operations that it fuses; eager rounds after each one, as uncompiled."""
ROUTERS_NOTE = f"""Share of the tokens that the router of a layer sends to other experts than in
{BASELINE}, in the first step: equal weights, equal batch; the mean over seeds."""
CPU_MEMORY_NOTE = """weights plus optimizer state, without activations. The process's resident set
is not compared: it includes the memory of earlier jobs."""
GPU_MEMORY_NOTE = "peak of allocated device memory."


def write_report(data: SweepData, folder: Path) -> list[Path]:
    """Write the report and its tables (CSV, JSON) into a folder, which is made if it is missing.

    Returns:
        The files written; no report.png if nothing was trained.

    Raises:
        OSError: the folder cannot be written to.
    """
    title = _page_title(data)
    answer = [*_origin(data).blocks(), *_first_blocks(data)]
    if data.fetch_failures:
        answer.append(Heading("Not fetched from the store: tags and last metrics stand for it"))
        answer += map(Text, data.fetch_failures)
    pictures = [svg_element(figure) for figure in chart_figures(data)]
    charts = [Heading("Curves"), Charts(pictures[:1]), Charts(pictures[1:])] if pictures else []
    details = [*_detail_blocks(data)]

    # Markdown cannot hold the charts: they are in report.png.
    paths = [
        files.write_text(folder / "report.md", to_markdown(title, [*answer, *details])),
        files.write_text(folder / "report.html", to_html(title, [*answer, *charts, *details])),
    ]
    figure = overview_figure(data)
    if figure:
        paths.append(files.prepare_output(folder / "report.png"))
        figure.savefig(paths[-1], dpi=110)
    record = data.answer.record
    paths += write_rows(data.results, folder, {**record.metrics, **record.tags})
    if data.gate:
        paths.append(files.write_json(folder / layout.VERDICT, data.gate.to_json()))
    return paths


def summary_markdown(data: SweepData, links: str = "") -> str:
    """Return the note of the parent run: the answer, and what did not end well.

    MLflow folds a note after about five lines, so a table has no place in it.

    Args:
        data: the sweep.
        links: Markdown of links to the sweep's pages.
    """
    answer = data.answer
    if data.advice:
        parts = [*map(markdown, _answer_blocks(data)), links]
    else:
        # The command is in the run's tag, other caveats are in the report.
        line = " · ".join(filter(None, [links, *map(markdown_text, answer.noted)]))
        parts = [markdown(Text(answer.sentence, "answer")), line]
    return "\n\n".join(filter(None, parts)) + "\n"


def print_answer(console: Console, data: SweepData) -> None:
    """Print a row per precision, the answer, the numbers behind it and what to type next."""
    if not data.jobs:
        return
    answer = data.answer
    # In a file or pipe a sentence stays on one line, for those who search it.
    is_whole = not console.is_terminal
    if data.is_stopped:
        console.print("Stopped. Results so far:")
    for note in data.notes:
        console.print(note, soft_wrap=is_whole)
    if not data.advice:
        table = answer.table or groups_table(data.compared, answer.pick)
        console.print(terminal_table(table, console.width))
    elif not data.gate:
        console.print(terminal_table(advice_table(data.advice), console.width))
    console.print(f"\n{answer.sentence}", style="bold", soft_wrap=is_whole)
    if answer.remarks:
        console.print(" ".join(answer.remarks), soft_wrap=is_whole)
    # How to resume an unfinished sweep is said below.
    if answer.command and not answer.is_unfinished:
        console.print(f"Next: {answer.command}", soft_wrap=True)


def _page_title(data: SweepData) -> str:
    """Return the question of mode=advise, or the keys that the sweep varies, and what it trains."""
    results = data.results
    models = _distinct(result.model for result in results)
    data_sets = _distinct(result.data for result in results)
    trained = " on ".join(filter(None, [models, data_sets]))
    if data.request:
        is_gate = data.request.mode == "gate"
        question = "Does this precision train" if is_gate else "Which precision for"
        return f"{question} {trained or 'this model'}?"
    keys = swept_keys(results)[:MAX_TITLE_KEYS]
    title = f"Sweep over {' × '.join(keys) or 'one job'}"
    return f"{title}: {trained}" if trained else title


def swept_keys(results: Sequence[RunResult]) -> list[str]:
    """Return the keys whose values differ between jobs, in the order of the command."""
    by_job = [(result, setting_values(result)) for result in results]
    keys = dict.fromkeys(key for _, values in by_job for key in values)
    swept = []
    for key in keys:
        # A precision that does not take a key of the command runs without it.
        taken = {values.get(key) for result, values in by_job if key not in result.left_out}
        if len(taken) > 1:
            swept.append(key)
    # A result made from the tags of a run has a precision and no overrides.
    if not swept and len({result.precision for result in results}) > 1:
        return ["precision"]
    return swept


def _origin(data: SweepData) -> Origin:
    """Return when and where the sweep ended, and from what.

    A report from a folder and one from the store say the same: the time is that of the newest
    recorded metric, for files have other times.
    """
    times = (curve[1].max() for job in data.jobs for curve in job.curves.values() if curve.size)
    settings = (job.read_settings() for job in data.jobs)
    known = next((each for each in settings if each.config), JobSettings())
    note = known.config.get("tracking.note", "")
    # Hydra needs -m behind the overrides; typed it stands before them.
    typed = re.compile(r"^(python -m runner) (.*) (-m|--multirun)$")
    commands = [typed.sub(r"\1 \3 \2", command) for command in data.commands if command]
    return Origin(
        max(times, default=0.0) / 1000 or None,
        _distinct(result.device for result in data.results),
        f"sweep {data.sweep_id}" if data.sweep_id else "",
        # As YAML writes None.
        "" if note == "null" else note,
        known.environment,
        commands,
    )


def _first_blocks(data: SweepData) -> Iterator[Block]:
    """Yield what a reader in a hurry reads: the answer and the table."""
    if not data.advice:
        yield from _compared_blocks(data)
        return
    yield from _answer_blocks(data)
    yield from advice_blocks(data.advice, data.gate)


def _distinct(names: Iterable[str]) -> str:
    """Return the names that are not empty, each once, in their order."""
    return ", ".join(dict.fromkeys(filter(None, names)))


def _answer_blocks(data: SweepData) -> Iterator[Block]:
    """Yield the answer, what it rests on, and the command to type next."""
    answer = data.answer
    yield Text(answer.sentence, "answer")
    if answer.remarks:
        yield Text(" ".join(answer.remarks))
    if answer.command:
        yield Text("Next:")
        yield Commands([str(answer.command)])


def _compared_blocks(data: SweepData) -> Iterator[Block]:
    """Yield the answer and the table of groups of a sweep that the user laid out."""
    compared = data.compared
    finished = sum(comparison.group.counts["finished"] for comparison in compared)
    # The number of jobs is not known of every sweep; then those that began are counted.
    job_count = max(data.job_count, len(data.jobs))
    if finished < job_count:
        yield Text(f"{finished} of {job_count} jobs finished", "small")
    yield from map(Text, data.notes)
    yield from _answer_blocks(data)
    if not compared:
        return
    if data.answer.table:
        yield data.answer.table
        return
    yield from settings_blocks(compared)
    yield groups_table(compared, data.answer.pick)
    verdict = common_verdict(compared)
    if verdict:
        yield Text(f"Against the baseline, each one with a result: {verdict}.", "small")
    alone = [c.group for c in compared if not c.baseline and c.group.finished_count]
    names = join_names(group.name for group in alone if group.precision != BASELINE)
    # Without any baseline the conclusion says so already.
    if names and any(comparison.baseline for comparison in compared):
        yield Text(f"Not compared: {names}: {NO_BASELINE_REASON} with the same settings.", "small")


def _detail_blocks(data: SweepData) -> Iterator[Block]:
    """Yield what stands under the charts: failures, every job, the method."""
    failed = [job for job in data.jobs if job.result.outcome != "finished"]
    failures = fmt.grouped((_failure_reason(job), job_name(job.result)) for job in failed).items()
    if failures:
        yield Heading("Without a result")
        yield Items([(join_names(jobs, MAX_FAILED_JOB_NAMES), why) for why, jobs in failures])
    if data.router_flips:
        yield Heading("Tokens whose experts are others")
        layers = dict.fromkeys(layer for row in data.router_flips.values() for layer in row)
        rows = []
        for name, row in data.router_flips.items():
            shares = {layer: fmt.format_percent(share) for layer, share in row.items()}
            rows.append([Cell(name), *(Cell(shares.get(layer, "")) for layer in layers)])
        yield Table(["precision", *layers], rows)
        yield Text(ROUTERS_NOTE, "small")
    if data.jobs:
        yield Heading("Every job")
        yield jobs_table(data.results)
    yield from _method_blocks(data)


def _method_blocks(data: SweepData) -> Iterator[Block]:
    """Yield how the numbers of the page were measured and judged."""
    if data.advice:
        yield Heading("How this was judged")
        yield Items([*method_notes(data.advice, data.gate)], small=True)
    elif any(c.group.finished_count for c in data.compared):
        yield Heading("How this was compared")
        notes = []
        for footnote in FOOTNOTES:
            # A report gets the note of a number only if it shows such a number.
            if any(map(footnote.is_shown_by, data.compared)):
                text = footnote.text
                whole = text if isinstance(text, str) else text(data)
                notes.append((footnote.term, " ".join(whole.split())))
        yield Items(notes, small=True)


def _failure_reason(job: Job) -> str:
    """Return a job's error, or what of a diverged job's numbers is not finite."""
    result = job.result
    words = OUTCOME_WORDS.get(result.outcome, result.outcome)
    if result.error:
        # Jobs of several precisions that lack the same thing have one entry.
        return f"{words}: {result.error.removeprefix(f'precision={result.precision} ')}"
    if result.outcome != "diverged":
        return words
    pairs = (f"{name} {fmt.format_number(value)}" for name, value in result.metrics.items())
    reason = f"diverged: {', '.join(pairs)}"
    curve = job.curves.get("train/loss")
    if curve is not None and curve.shape[-1]:
        steps, losses = curve_points(curve)
        nonfinite = steps[~np.isfinite(losses)]
        if len(nonfinite):
            reason += f"; training loss first not finite at step {int(nonfinite[0])}"
    return reason


def _quality_note(data: SweepData) -> str:
    groups = [comparison.group for comparison in data.compared if comparison.group.finished_count]
    seeds = {job.seed for group in groups for job in group.jobs if job.seed is not None}
    return QUALITY_NOTE.format(seeds=", ".join(map(str, sorted(seeds))) or "unknown")


def _verdict_note(data: SweepData) -> str:
    tests = {comparison.difference.test for comparison in data.compared if comparison.difference}
    source = "paired t, Student 1908, over equal seeds"
    if "Welch" in tests:
        # This names the paired test, too: groups of one report can need either.
        source = "Welch 1947; paired t over the seeds that both have"
    accepted = data.tolerance
    unit = f"{accepted.deviations:g} × the deviation of {BASELINE}'s seeds (advise.tolerance)"
    if accepted.max_gap is not None:
        unit = f"{accepted.max_gap:g} (advise.max_gap)"
    return VERDICT_NOTE.format(test=source, accepted=unit)


def _rounding_note(data: SweepData) -> str:
    roundings = []
    for group in (comparison.group for comparison in data.compared):
        if group.finished_count:
            own = sorted({job.fused_rounding or "uncompiled" for job in group.jobs})
            roundings += [(rounding, group.name) for rounding in own]
    names_by_rounding = fmt.grouped(roundings).items()
    groups = [f"{rounding}: {', '.join(names)}" for rounding, names in names_by_rounding]
    return f"{'; '.join(groups)}. {ROUNDING_NOTE}"


def _left_out_note(data: SweepData) -> str:
    pairs = (f"{result.precision} {key}" for result in data.results for key in result.left_out)
    return " ".join(omitted_key_messages([*dict.fromkeys(pairs)]))


class Footnote(NamedTuple):
    """An explanation under a report of the numbers of one kind.

    Attributes:
        is_shown_by: whether the report shows such a number of a comparison.
    """

    term: str
    is_shown_by: Callable[[Comparison], object]
    text: str | Callable[[SweepData], str]


FOOTNOTES = (
    Footnote("Quality", lambda c: c.group.quality, _quality_note),
    Footnote("Change", lambda c: c.group.change, CHANGE_NOTE),
    Footnote("Verdict", lambda c: c.difference and c.difference.test, _verdict_note),
    Footnote("Speed", lambda c: c.speed_ratio and not c.is_baseline, SPEED_NOTE),
    Footnote("Speed to equal loss", lambda c: c.equal_loss, EQUAL_LOSS_NOTE),
    Footnote("Two sweeps", lambda c: c.group.sweep, TWO_SWEEPS_NOTE),
    Footnote(
        "Rounding between fused operations",
        lambda c: any(job.fused_rounding for job in c.group.jobs),
        _rounding_note,
    ),
    Footnote("Keys", lambda c: any(job.left_out for job in c.group.jobs), _left_out_note),
    Footnote(
        "Autocast",
        lambda c: any(job.cast_note for job in c.group.jobs),
        lambda data: cast_note(data.results),
    ),
    Footnote(
        "Memory on a CPU", lambda c: c.group.is_on_cpu and c.group.finished_count, CPU_MEMORY_NOTE
    ),
    Footnote(
        "Memory on a GPU", lambda c: c.group.memory_mib and not c.group.is_on_cpu, GPU_MEMORY_NOTE
    ),
)


def write_rows(
    results: Sequence[RunResult], folder: Path, answer: Mapping[str, object] | None = None
) -> list[Path]:
    """Write table_rows() as report.csv and report.json into a folder; return the paths.

    In CSV None is an empty field. In JSON, which has the meaning of each column and the metrics
    and tags of the answer, too, a number that is not finite is its name.

    Raises:
        OSError: the folder cannot be written to.
    """
    columns = table_columns(results)
    rows = secrets.redact_values(table_rows(results))
    text = io.StringIO()
    # "\n": csv's own "\r\n" would become "\r\r\n" where the platform writes line ends of two.
    writer = csv.DictWriter(text, [*columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[name] = str(value)
    content = {"version": SCHEMA_VERSION, "columns": columns, "rows": rows, "answer": answer}
    json_text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    return [
        files.write_text(folder / "report.csv", text.getvalue()),
        files.write_text(folder / "report.json", json_text),
    ]
