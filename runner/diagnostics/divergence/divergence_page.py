"""Write where two executions part as a page, diff.html, with pictures."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.diagnostics.divergence.divergence_report import (
    DivergenceReport,
    StepComparison,
    format_relative,
)
from runner.diagnostics.divergence.findings import (
    KNOWN_SUM,
    LARGEST_EXPLAINED,
    LARGEST_EXPLAINED_OF_CODE,
    LARGEST_EXPLAINED_OF_INTEGERS,
    AddedError,
    ModuleErrors,
)
from runner.utils.formatting import format_number, format_share
from runner.utils.markup import Block, Cell, Charts, Heading, Items, Table, Text, Tone, to_html
from runner.utils.plots import CHART_WIDTH_INCHES, chart_style, module_label, svg_element

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS = 40
"""Modules in the table: those that add the most."""
MAX_NAMES = 60
"""Rows of a chart that are high enough for a name; of more modules every n-th has one."""
ROW_HEIGHT_INCHES = 0.18


def write_page(report: DivergenceReport, path: Path) -> None:
    """Write diff.html, which holds no script.

    Raises:
        OSError: the file cannot be written.
    """
    batch = report.chosen.batch
    blocks: list[Block] = [Text(report.sentence.replace("`", ""), "answer"), Items(_facts(report))]
    blocks.append(Heading("Error along the network"))
    forward = [(row.module, row.added, row.arrived) for row in batch.rows]
    backward = [(row.module, row.gradient_added, row.gradient_arrived) for row in batch.rows]
    figures = [draw_pass("forward", forward), draw_pass("backward", backward)]
    blocks.append(Charts([svg_element(figure) for figure in figures]))
    if len(report.steps) > 1:
        chart = svg_element(draw_steps(report.steps))
        blocks += [Heading("Error over the steps"), Charts([chart])]
    if batch.flips:
        flips = sorted(batch.flips.items(), key=lambda one: -one[1])
        lines = [[Cell(name), Cell(format_share(share), bar=share)] for name, share in flips]
        names = f"{report.name} against {report.against}"
        by_layer = Table(["layer", names], lines[:MAX_ROWS], frozenset({0}))
        blocks += [Heading("Tokens that go to other experts"), by_layer]
    table = _table(batch.rows)
    none = Text("No module adds an error.", "small")
    blocks += [Heading("Modules by the error that they add"), table if table.rows else none]
    blocks.append(Items(_EXPLANATIONS, small=True))
    path.write_text(to_html(f"{report.name} against {report.against}", blocks))


_EXPLANATIONS = (
    (
        "came in",
        "relative error, in the 2-norm, of what reaches the module when both executions run freely",
    ),
    (
        "added",
        "relative error of what the module's own code computes from the reference's own tensors",
    ),
    (
        "explained",
        "error that the same code has when its operands are off by the unit roundoff of their "
        "format, and the result is rounded once",
    ),
    (
        "times",
        f"added divided by explained; a layer parts above {LARGEST_EXPLAINED:g}, other code, which "
        "may round several times, and gradients of parameters, which are sums over all rows, above "
        f"{LARGEST_EXPLAINED_OF_CODE:g}, choices and integers above "
        f"{LARGEST_EXPLAINED_OF_INTEGERS:g}; a tensor of few elements may be further off by chance",
    ),
)


def _facts(report: DivergenceReport) -> list[tuple[str, str]]:
    """Return the numbers of the step that the page shows."""
    step = report.chosen
    reference, loss = step.batch.losses
    facts = [
        ("step", str(step.step)),
        ("loss", f"{format_number(loss)}, in {report.against} {format_number(reference)}"),
        ("model's output", f"differs by {format_relative(step.batch.output_error)}"),
        ("gradients together", f"differ by {format_relative(step.batch.gradient_error)}"),
    ]
    if step.log_probabilities is not None:
        rms, changed = step.log_probabilities
        text = f"differ by {format_number(rms)} nats (rms); another class is first for "
        facts.append(("log-probabilities of the targets", text + format_share(changed)))
    if step.batch.scale != 1.0:
        facts.append(("loss scale", format_number(step.batch.scale)))
    return facts


def _table(rows: Sequence[ModuleErrors]) -> Table:
    head = [
        *("module", "tensor"),
        *("came in", "added", "explained", "times", "ulps", "SQNR dB", "differ"),
    ]
    errors = []
    for row in rows:
        for added, arrived in (
            (row.added, row.arrived),
            (row.gradient_added, row.gradient_arrived),
        ):
            if added is not None and added.found.relative != 0.0:
                errors.append((row, added, arrived))
    errors.sort(key=lambda one: (-one[1].is_unexplained, -one[1].ratio))
    lines = []
    for row, added, arrived in errors[:MAX_ROWS]:
        error = added.found
        is_known = added.is_unexplained and added.is_known_sum
        tone: Tone = "bad" if added.is_unexplained and not is_known else ""
        ulps = float(f"{added.ulps:.2g}")
        line = [
            Cell(row.module, tone, row.kind),
            Cell(added.tensor, note=f"{added.dtype}, {KNOWN_SUM}" if is_known else added.dtype),
            Cell(format_relative(arrived)),
            Cell(format_relative(error.relative)),
            Cell(format_relative(added.expected)),
            Cell(format_number(added.ratio), tone),
            Cell(f"{ulps:,.10g}"),
            Cell(f"{error.sqnr_db:.0f}" if math.isfinite(error.sqnr_db) else "exact"),
            Cell(format_share(error.share(error.different))),
        ]
        lines.append(line)
    return Table(head, lines, frozenset(range(2)))


def draw_pass(name: str, errors: Sequence[tuple[str, AddedError | None, float]]) -> "Figure":
    """Draw a pass, one module below the other in the order of the forward.

    Args:
        name: of the pass, forward or backward.
        errors: module, the error that it adds, and the relative error of what comes in.
    """
    from matplotlib.figure import Figure

    values, explained, colours = [], [], []
    for _, added, _ in errors:
        values.append(added.found.relative if added else math.nan)
        explained.append(added.expected * added.largest_ratio if added else math.nan)
        colours.append("#D55E00" if added and added.is_unexplained else "#009E73")
    rows = range(len(errors))
    with chart_style():
        height = 1.3 + ROW_HEIGHT_INCHES * min(len(errors), MAX_NAMES)
        figure = Figure(figsize=(CHART_WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.locator_params(axis="x", numticks=3)
        axes.xaxis.set_major_formatter("{x:g}")
        arrived = _drawable([relative for *_, relative in errors])
        axes.plot(arrived, rows, ".", ms=4, color="#999999")
        axes.plot(_drawable(explained), rows, "|", ms=8, mew=1.5, color="#0072B2")
        axes.scatter(_drawable(values), rows, s=16, c=colours, zorder=3)
        for label, mark, colour in (
            ("came in", ".", "#999999"),
            ("added", "o", "#009E73"),
            ("most that rounding explains", "|", "#0072B2"),
            ("added, unexplained", "o", "#D55E00"),
        ):
            axes.plot([], [], mark, color=colour, label=label)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, handlelength=1)
        places = rows[:: math.ceil(len(errors) / MAX_NAMES) or 1]
        names = [module_label(errors[place][0]) for place in places]
        axes.set_yticks(places, names, parse_math=False)
        axes.set_ylim(len(errors) - 0.5, -0.5)
        axes.set_xlabel(f"relative error, {name}")
    return figure


def _drawable(values: Sequence[float]) -> list[float]:
    """Return values for a logarithmic axis: NaN in place of 0 and infinity."""
    return [value if 0 < value < math.inf else math.nan for value in values]


def draw_steps(steps: Sequence[StepComparison]) -> "Figure":
    """Draw a heat map of the errors added: a row for each module that adds one, a column for each
    step."""
    import numpy as np
    from matplotlib.figure import Figure

    by_step = [
        {row.module: row.added.found.relative for row in step.batch.rows if row.added is not None}
        for step in steps
    ]
    # Modules that add no error at any step would fill half of the map with white.
    names = [name for name in by_step[0] if any(errors.get(name) for errors in by_step)]
    drawable = [_drawable([errors.get(name, 0.0) for errors in by_step]) for name in names]
    values = np.log10(np.array(drawable).reshape(len(names), len(steps)))
    with chart_style():
        height = 1.3 + ROW_HEIGHT_INCHES * len(names)
        figure = Figure(figsize=(CHART_WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots()
        axes.grid(visible=False)
        # Cells and not a picture, which a page without scripts and files does not show.
        mesh = axes.pcolormesh(values, cmap="viridis", edgecolors="none")
        axes.set_xticks([i + 0.5 for i in range(len(steps))], [str(step.step) for step in steps])
        labels = [module_label(name) for name in names]
        axes.set_yticks([i + 0.5 for i in range(len(names))], labels, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel("step")
        title = "no error is added in the forward"
        if not np.isnan(values).all():
            low, high = np.nanmin(values), np.nanmax(values)
            title = "relative error added in the forward:"
            title += f"\ndark {10**low:.1g}, bright {10**high:.1g}"
            mesh.set_clim(low, high)
        axes.set_title(title, loc="right")
    return figure
