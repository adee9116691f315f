"""The report of a sweep as files: report.md, report.html and report.png."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from runner.modes.result import RunResult
from runner.modes.tables import result_columns
from runner.sweep.report import advice_page
from runner.sweep.report.charts import legend, overview, panels
from runner.sweep.report.compare import BASE, Comparison, Group, compare
from runner.sweep.report.conclusion import (
    NO_BASE,
    conclusion,
    conclusion_sentence,
    failure_sentence,
    format_mean_sd,
    format_range,
    format_ratio,
    join_names,
    quality_sentence,
    recommended_precision,
)
from runner.sweep.report.downsample import downsample
from runner.sweep.report.footnotes import footnotes
from runner.sweep.report.jobs import Job, SweepData
from runner.sweep.report.statistics import Spread
from runner.utils.formatting import format_number
from runner.utils.markup import (
    Block,
    Cell,
    Charts,
    Commands,
    Heading,
    Items,
    Table,
    Text,
    Tone,
    markdown,
    to_html,
    to_markdown,
)
from runner.utils.plots import svg_element

REASON = 80
KEYS = 4
WORDS = ("precision", "job", "device", "status", f"against {BASE}")
TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "same": "", "unjudged": "quiet"}


def write_report(data: SweepData, folder: Path) -> list[Path]:
    """Write the report into a folder that exists.

    Returns:
        The files written; no report.png where nothing was trained.

    Raises:
        OSError: the folder cannot be written to.
    """
    compared = compare([job.result for job in data.jobs])
    title = _title(data)
    top = advice_page.advice_blocks(data.advice) if data.advice else _top(data, compared)
    before, after = list(top), list(_rest(data, compared))
    pictures = [svg_element(figure) for figure in panels(data)]
    charts: list[Block] = []
    if pictures:
        lines = [(e.name, e.colour, e.dashes) for e in legend(data)]
        charts = [Heading("Curves"), Charts(pictures, lines)]
    paths = [folder / "report.md", folder / "report.html"]
    paths[0].write_text(to_markdown(title, [*before, *after]))
    paths[1].write_text(to_html(title, [*before, *charts, *after]))
    figure = overview(data)
    if figure is not None:
        paths.append(folder / "report.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def summary_markdown(data: SweepData, limit: int = 7000) -> str:
    """Conclusion, commands and table of groups for the note of the parent run.

    Args:
        data: the sweep.
        limit: characters; the table loses its last rows, whole lines, to stay within.
    """
    head, tail, table = _summary(data)
    rows = markdown(table).splitlines() if table else []
    hint = "More rows: see report.html among the artifacts."

    def whole(count: int) -> str:
        table = "\n".join(rows[:count] if count > 2 else [])
        cut = hint if count < len(rows) else ""
        return "\n\n".join(part for part in (head, table, cut, tail) if part) + "\n"

    for count in range(len(rows), 1, -1):
        if len(whole(count)) <= limit:
            return whole(count)
    if len(head) + len(hint) + 3 <= limit:
        return f"{head}\n\n{hint}\n"
    return head[:limit]


def _summary(data: SweepData) -> tuple[str, str, Table | None]:
    """What is said first and last, and the table between them."""
    tail = markdown(Commands(data.commands)) if data.commands else ""
    if data.advice:
        first, table = advice_page.advice_markdown(data.advice)
        return "\n\n".join(map(markdown, first)), tail, table
    compared = compare([job.result for job in data.jobs])
    head = markdown(Text(conclusion(compared, data.missing), "answer"))
    return head, tail, _groups_table(compared) if compared else None


def _title(data: SweepData) -> str:
    results = [job.result for job in data.jobs]
    swept = " × ".join(_swept(results)[:KEYS]) or "one job"
    models = ", ".join(dict.fromkeys(r.model for r in results if r.model))
    sets = ", ".join(dict.fromkeys(r.data for r in results if r.data))
    what = " on ".join(filter(None, [models, sets]))
    asked = f"Which precision for {what or 'this model'}?"
    return asked if data.question else f"Sweep over {swept}{': ' if what else ''}{what}"


def _swept(results: Sequence[RunResult]) -> list[str]:
    """The keys whose values differ between jobs, as they were typed."""
    every = [
        dict(
            text.lstrip("+~").split("=", 1)
            for text in r.overrides
            if "=" in text and not text.lstrip("+").startswith(("tracking.", "hydra."))
        )
        for r in results
    ]
    keys = dict.fromkeys(key for one in every for key in one)
    found = [key for key in keys if len({one.get(key) for one in every}) > 1]
    if not found:
        found = ["precision"] if len({r.precision for r in results}) > 1 else []
    return found


def _top(data: SweepData, compared: Sequence[Comparison]) -> Iterator[Block]:
    devices = ", ".join(dict.fromkeys(c.group.device for c in compared if c.group.device))
    done = sum(c.group.finished for c in compared)
    named = f"sweep {data.sweep_id}" if data.sweep_id else ""
    facts = [f"{done} of {max(data.asked, len(data.jobs))} jobs finished", devices, named]
    yield Text(" · ".join(filter(None, facts)), "small")
    yield Text(conclusion_sentence(compared), "answer")
    if bad := failure_sentence(compared, data.missing):
        yield Text(bad)
    if compared:
        yield _groups_table(compared)
    bare = [
        c.group.name
        for c in compared
        if c.base is None and c.group.finished and c.group.precision != BASE
    ]
    if bare and any(c.base for c in compared):
        yield Text(f"Not compared: {join_names(bare)}: {NO_BASE} beside it.", "small")


def _rest(data: SweepData, compared: Sequence[Comparison]) -> Iterator[Block]:
    every = [c.group for c in compared]
    lacking = [g for g in every if g.counts.get("unavailable")]
    if lacking:
        yield Heading("Unavailable here")
        yield Items([(g.name, " ".join(g.reasons)) for g in lacking])
    bad = [job for job in data.jobs if job.result.outcome in ("failed", "stopped", "diverged")]
    if bad:
        yield Heading("Failed")
        yield Items(list(_reasons(bad)))
    if data.jobs:
        yield Heading("Every job")
        yield _jobs_table([job.result for job in data.jobs])
    if data.commands:
        yield Heading("Typed")
        yield Commands(data.commands)
    if any(g.finished for g in every) and not data.question:
        yield Heading("How this was compared")
        yield Items(list(footnotes(compared)), small=True)


def _reasons(bad: Sequence[Job]) -> Iterator[tuple[str, str]]:
    """What ended the same way is told once."""
    told: dict[str, list[str]] = {}
    for job in bad:
        told.setdefault(_why(job), []).append(job.result.label)
    for reason, labels in told.items():
        yield join_names(labels, 6), reason


def _why(job: Job) -> str:
    """What ended a job, or where its loss stopped being finite."""
    r = job.result
    if r.outcome != "diverged":
        return f"{r.status}: {r.error}" if r.error else r.status
    if r.error:
        return f"diverged: {r.error}"
    told = ", ".join(f"{name} {format_number(value)}" for name, value in r.metrics.items())
    curve = job.curves.get("train/loss")
    if curve is not None and curve.shape[-1]:
        steps, values = downsample(curve)
        gone = [int(s) for s, v in zip(steps, values, strict=True) if not math.isfinite(v)]
        told += f"; training loss first not finite at step {gone[0]}" if gone else ""
    return f"diverged: {told}"


def _cell(spread: Spread | None) -> Cell:
    return Cell(format_number(spread.mean) if spread else "")


def _range(spread: Spread | None) -> Cell:
    if spread is None:
        return Cell("")
    low, high = format_number(spread.low), format_number(spread.high)
    return Cell(low if low == high else f"{low} to {high}")


def _groups_table(compared: Sequence[Comparison]) -> Table:
    """A row per group; the recommended one is marked."""
    every: list[tuple[str, Callable[[Comparison], Cell]]] = _columns(compared)
    shown = [(name, cell) for name, cell in every if any(cell(c).text for c in compared)]
    rows = [[cell(c) for _, cell in shown] for c in compared]
    words = frozenset(i for i, (name, _) in enumerate(shown) if name in WORDS)
    best = recommended_precision(compared)
    marked = next((i for i, c in enumerate(compared) if c is best), None)
    return Table([name for name, _ in shown], rows, words, marked, cards=True)


def _columns(compared: Sequence[Comparison]) -> list[tuple[str, Callable[[Comparison], Cell]]]:
    qualities = {j.quality for c in compared for j in c.group.jobs if j.quality}
    quality = qualities.pop() if len(qualities) == 1 else "quality"
    seeds = any(c.group.quality and c.group.quality.n > 1 for c in compared)
    several = len({c.group.device for c in compared}) > 1
    compared_all = all(c.speed for c in compared if c.group.finished)
    fastest = max((c.speed.value for c in compared if c.speed), default=1.0)
    largest = max((c.memory for c in compared if c.memory), default=1.0)
    return [
        (
            "job" if any(c.group.settings for c in compared) else "precision",
            lambda c: Cell(c.group.name),
        ),
        ("status", _status),
        ("device", lambda c: Cell(c.group.device if several else "")),
        (quality, lambda c: _quality(c.group, seeds)),
        ("best", lambda c: _cell(None if c.group.evaluated else c.group.best)),
        ("change", lambda c: Cell(f"{c.group.change.mean:+.4g}" if c.group.change else "")),
        (f"against {BASE}", _against),
        (
            f"speed × {BASE}",
            lambda c: Cell(
                format_ratio(c.speed),
                note=format_range(c.speed),
                bar=c.speed.value / fastest if c.speed else None,
            ),
        ),
        ("examples/s", lambda c: _cell(None if compared_all else c.group.speed)),
        (
            f"memory × {BASE}",
            lambda c: Cell(
                "" if c.memory is None else f"{c.memory:.2f}",
                note="" if c.memory is None else _mib(c.group),
                bar=c.memory and c.memory / largest,
            ),
        ),
        ("MiB", lambda c: Cell(_mib(c.group) if c.memory is None else "")),
        ("final scale", lambda c: _range(c.group.loss_scale)),
        ("skipped", lambda c: _range(c.group.skipped)),
        ("converted", lambda c: Cell(c.group.converted)),
    ]


def _mib(group: Group) -> str:
    """What the memory ratio is made of."""
    value = group.memory_mib
    return f"{format_number(value)} MiB" if value is not None else ""


def _quality(group: Group, seeds: bool) -> Cell:
    if group.quality is None:
        return Cell("diverged" if group.counts.get("diverged") else "", "bad")
    note = f"{group.quality.n} seeds" if group.quality.n > 1 else "one seed"
    return Cell(format_mean_sd(group.quality), note=note if seeds else "")


def _against(c: Comparison) -> Cell:
    if c.is_base and not c.group.evaluated:
        return Cell("baseline", "quiet")
    if c.quality is None:
        return Cell("")
    what, numbers = quality_sentence(c.quality)
    return Cell(what, TONES[c.quality.verdict], numbers)


def _status(c: Comparison) -> Cell:
    counts, jobs = c.group.counts, len(c.group.jobs)
    share = "" if jobs == 1 else f"/{jobs} "
    text = ", ".join(f"{count if share else ''}{share}{word}" for word, count in counts.items())
    reason = " ".join(" ".join(c.group.reasons).split())
    if len(reason) > REASON:
        reason = f"{reason[:REASON].rstrip()}…"
    return Cell(text, "quiet" if set(counts) == {"finished"} else "bad", reason)


def _jobs_table(results: Sequence[RunResult]) -> Table:
    shown = [
        *result_columns(results),
        ("best", lambda r: format_number(r.best)),
        ("step ms", lambda r: format_number(r.step_ms)),
    ]
    shown = [(name, cell) for name, cell in shown if any(map(cell, results))]
    rows = [[Cell(cell(r)) for _, cell in shown] for r in results]
    words = frozenset(i for i, (name, _) in enumerate(shown) if name in WORDS)
    return Table([name for name, _ in shown], rows, words)
