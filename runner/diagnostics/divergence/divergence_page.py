"""Write where two executions part as a page, diff.html, with pictures."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.diagnostics.divergence.divergence_report import (
    DivergenceReport,
    StepComparison,
    format_relative,
)
from runner.diagnostics.divergence.findings import AddedError, ModuleErrors
from runner.utils.formatting import format_number, format_share
from runner.utils.markup import Block, Cell, Charts, Heading, Items, Table, Text, Tone, to_html
from runner.utils.plots import chart_style, svg_element

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS = 40
"""Modules in the table: those that add the most."""
MAX_TICKS = 30


def write_page(report: DivergenceReport, path: Path) -> None:
    """Write diff.html, which holds no script.

    Raises:
        OSError: the file cannot be written.
    """
    batch = report.chosen.batch
    blocks: list[Block] = [Text(report.sentence, "answer"), Items(_facts(report))]
    blocks.append(Heading("Error along the network"))
    blocks.append(Charts([svg_element(draw_network(batch.rows))]))
    if len(report.steps) > 1:
        blocks.append(Heading("Error over the steps"))
        blocks.append(Charts([svg_element(draw_steps(report.steps))]))
    blocks.append(Heading("Modules by the error that they add"))
    blocks.append(_table(batch.rows))
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
        "added divided by explained; a layer parts above 2, other code, which may round several "
        "times, above 5",
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
        *("module", "class", "tensor", "dtype"),
        *("came in", "added", "explained", "times", "ulps", "SQNR dB", "differ"),
    ]
    errors = []
    for row in rows:
        for added, arrived in (
            (row.added, row.arrived),
            (row.gradient_added, row.gradient_arrived),
        ):
            if added is not None:
                errors.append((row, added, arrived))
    errors.sort(key=lambda one: (-one[1].is_unexplained, -one[1].ratio))
    lines = []
    for row, added, arrived in errors[:MAX_ROWS]:
        error = added.found
        tone: Tone = "bad" if added.is_unexplained else ""
        line = [
            Cell(row.module, tone),
            Cell(row.kind),
            Cell(added.tensor),
            Cell(added.dtype),
            Cell(format_relative(arrived)),
            Cell(format_relative(error.relative)),
            Cell(format_relative(added.expected)),
            Cell(format_number(added.ratio), tone),
            Cell(format_number(added.ulps)),
            Cell(f"{error.sqnr_db:.0f}" if math.isfinite(error.sqnr_db) else "exact"),
            Cell(format_share(error.share(error.different))),
        ]
        lines.append(line)
    return Table(head, lines, frozenset(range(4)))


def draw_network(rows: Sequence[ModuleErrors]) -> "Figure":
    """Draw the errors of each module in the order of the forward: came in, added, explained."""
    from matplotlib.figure import Figure

    with chart_style(font_size=8):
        figure = Figure(figsize=(9, 6), layout="constrained")
        forward, backward = figure.subplots(2, 1, sharex=True)
        _draw_pass(forward, [(row.added, row.arrived) for row in rows])
        _draw_pass(backward, [(row.gradient_added, row.gradient_arrived) for row in rows])
        forward.set_ylabel("forward: relative error")
        backward.set_ylabel("backward: relative error")
        places = range(0, len(rows), max(1, math.ceil(len(rows) / MAX_TICKS)))
        names = [rows[place].module for place in places]
        backward.set_xticks(places, names, rotation=60, ha="right")
    return figure


def _draw_pass(axes: Any, errors: Sequence[tuple[AddedError | None, float]]) -> None:
    """Draw the error that each module adds in a pass, and the error of what comes in."""
    places = range(len(errors))
    values, explained, colours = [], [], []
    for added, _ in errors:
        values.append(added.found.relative if added else math.nan)
        explained.append(added.expected * added.largest_ratio if added else math.nan)
        colours.append("#D55E00" if added and added.is_unexplained else "#009E73")
    axes.set_yscale("log")
    arrived = _drawable([relative for _, relative in errors])
    axes.plot(places, arrived, ".", ms=3, color="#999999")
    axes.plot(places, _drawable(explained), "_", ms=7, color="#0072B2")
    axes.scatter(places, _drawable(values), s=14, c=colours, zorder=3)
    axes.grid(axis="y", color="#e4e4e4", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    for label, mark, colour in (
        ("came in", ".", "#999999"),
        ("largest that rounding explains", "_", "#0072B2"),
        ("added", "o", "#009E73"),
        ("added, unexplained", "o", "#D55E00"),
    ):
        axes.plot([], [], mark, color=colour, label=label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


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
    with chart_style(font_size=8):
        figure = Figure(figsize=(9, 1.2 + 0.14 * len(names)), layout="constrained")
        axes = figure.subplots()
        # Cells and not a picture, which a page without scripts and files does not show.
        mesh = axes.pcolormesh(values, cmap="viridis", edgecolors="white", linewidth=0.3)
        axes.set_xticks([i + 0.5 for i in range(len(steps))], [str(step.step) for step in steps])
        axes.set_yticks([i + 0.5 for i in range(len(names))], names)
        axes.invert_yaxis()
        axes.set_xlabel("step")
        title = "no error is added in the forward"
        if not np.isnan(values).all():
            low, high = np.nanmin(values), np.nanmax(values)
            title = f"relative error added in the forward: dark 10^{low:.1f}, bright 10^{high:.1f}"
            mesh.set_clim(low, high)
        axes.set_title(title, loc="left")
    return figure
