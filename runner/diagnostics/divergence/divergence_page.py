"""Write where two executions part: diff.html, diff.json and the lines of the console."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.diagnostics.divergence.added_error import AddedError
from runner.diagnostics.divergence.compare import BatchComparison
from runner.diagnostics.divergence.divergence_text import (
    describe_cause,
    describe_divergence,
    format_relative,
    format_share,
)
from runner.diagnostics.divergence.findings import Divergence, ModuleErrors, first_divergence
from runner.diagnostics.divergence.log_probabilities import LogProbabilityError
from runner.utils.files import write_json
from runner.utils.formatting import format_number
from runner.utils.markup import Block, Cell, Charts, Heading, Items, Table, Text, to_html
from runner.utils.plots import chart_style, svg_element

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS = 40
"""Modules in the table: those that add the most."""
MAX_TICKS = 30
_LISTED = 4
"""Names that a sentence lists; the others are counted."""
FORMAT = 1
"""Version of diff.json."""


@dataclass(frozen=True)
class StepComparison:
    """Two executions in one step.

    Attributes:
        step: number of the optimizer step whose forward and backward were compared.
        batch: what was found.
        log_probabilities: None where the task predicts no class.
    """

    step: int
    batch: BatchComparison
    log_probabilities: LogProbabilityError | None


@dataclass(frozen=True)
class DivergenceReport:
    """What mode=diff found.

    Attributes:
        name: label of the execution.
        against: label of the reference.
        steps: in their order, at least one.
    """

    name: str
    against: str
    steps: Sequence[StepComparison]

    @property
    def chosen(self) -> StepComparison:
        """Return the first step in which the executions part, else the first step."""
        parted = (step for step in self.steps if first_divergence(step.batch.rows))
        return next(parted, self.steps[0])

    @property
    def divergence(self) -> Divergence | None:
        """Return where the executions part first; None where rounding explains everything."""
        return first_divergence(self.chosen.batch.rows)

    @property
    def sentence(self) -> str:
        """Return the sentence that says what was found."""
        batch = self.chosen.batch
        text = describe_divergence(
            batch.rows,
            self.name,
            self.against,
            batch.is_exact,
            batch.same_format,
            batch.uneven_calls,
        )
        text += _remarks(batch)
        if len(self.steps) == 1:
            return text
        if self.divergence is None:
            return f"In all {len(self.steps)} steps: {text}"
        return f"In step {self.chosen.step}: {text}"


def _remarks(batch: BatchComparison) -> str:
    """Return sentences on what a reader must know of a comparison beside its first divergence."""
    text = ""
    if batch.uneven_calls:
        counts = [
            f"`{name}` ({_times(found)} against {wanted})"
            for name, (found, wanted) in batch.uneven_calls.items()
        ]
        text += f" Not called equally often by both: {_listed(counts)}."
    if batch.other_weights:
        count = len(batch.other_weights)
        text += (
            f" Both have other weights in {count} {'module' if count == 1 else 'modules'}, so that "
            f"errors there are no bug of their code: {_names(batch.other_weights)}."
        )
    reshaped = [
        row.module
        for row in batch.rows
        if row.added and row.added.found.other_shape and not row.added.is_unexplained
    ]
    if reshaped:
        text += f" Not compared, for rounding gives them other shapes: {_names(reshaped)}."
    return text


def _names(modules: Sequence[str]) -> str:
    return _listed([f"`{name}`" for name in modules])


def _listed(words: Sequence[str]) -> str:
    """Return the first words of a list, and how many there are more."""
    listed = ", ".join(words[:_LISTED])
    more = len(words) - _LISTED
    return f"{listed} and {more} more" if more > 0 else listed


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def metrics(step: StepComparison) -> dict[str, float]:
    """Return the numbers of a step under the names that the store has."""
    batch = step.batch
    reference, loss = batch.losses
    found = {
        "diff/loss": loss,
        "diff/loss_reference": reference,
        "diff/output_error": batch.output_error,
        "diff/gradient_error": batch.gradient_error,
        "diff/unexplained_modules": float(len(unexplained(batch.rows))),
    }
    if step.log_probabilities is not None:
        found["diff/log_probability_rms"] = step.log_probabilities.rms
        found["diff/argmax_changed"] = step.log_probabilities.changed
    return found


def unexplained(rows: Sequence[ModuleErrors]) -> list[ModuleErrors]:
    """Return the modules that add more than rounding explains."""
    return [row for row in rows if any(added.is_unexplained for added in _errors(row))]


def _errors(row: ModuleErrors) -> list[AddedError]:
    return [added for added in (row.added, row.gradient_added) if added is not None]


def write_json_report(report: DivergenceReport, path: Path) -> None:
    """Write diff.json.

    Raises:
        OSError: the file cannot be written.
    """
    first = report.divergence
    content = {
        "format": FORMAT,
        "precision": report.name,
        "against": report.against,
        "sentence": report.sentence,
        "parts": first is not None,
        "step": report.chosen.step,
        "module": first.row.module if first else None,
        "backward": first.is_backward if first else None,
        "cause": describe_cause(first.added) if first else None,
        "steps": [
            {
                "step": step.step,
                "loss_scale": step.batch.scale,
                **_finite(metrics(step)),
                "modules": [_module_record(row) for row in step.batch.rows],
            }
            for step in report.steps
        ],
    }
    write_json(path, content)


def _module_record(row: ModuleErrors) -> dict[str, Any]:
    return {
        "module": row.module,
        "class": row.kind,
        "arrived": _number(row.arrived),
        "gradient_arrived": _number(row.gradient_arrived),
        "added": _error_record(row.added),
        "gradient_added": _error_record(row.gradient_added),
    }


def _error_record(added: AddedError | None) -> dict[str, Any] | None:
    if added is None:
        return None
    found = added.found
    return {
        "tensor": added.tensor,
        "dtype": added.dtype,
        "relative": _number(found.relative),
        "expected": _number(added.expected),
        "ratio": _number(added.ratio),
        "ulps": _number(added.ulps),
        "sqnr_db": _number(found.sqnr_db),
        "nonfinite": found.nonfinite,
        "flushed": found.flushed,
        "subnormal": found.subnormal,
        "different": found.different,
        "elements": found.elements,
        "unexplained": added.is_unexplained,
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


def _number(value: float) -> float | None:
    """Return a number as JSON has it: None in place of infinity and NaN."""
    return value if math.isfinite(value) else None


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
    found = []
    for row in rows:
        for added, arrived in (
            (row.added, row.arrived),
            (row.gradient_added, row.gradient_arrived),
        ):
            if added is not None:
                found.append((added, _cells(row, added, arrived)))
    found.sort(key=lambda pair: (-pair[0].is_unexplained, -pair[0].ratio))
    return Table(head, [cells for _, cells in found[:MAX_ROWS]], frozenset(range(4)))


def _cells(row: ModuleErrors, added: AddedError, arrived: float) -> list[Cell]:
    error = added.found
    return [
        Cell(row.module, "bad" if added.is_unexplained else ""),
        Cell(row.kind),
        Cell(added.tensor),
        Cell(added.dtype),
        Cell(format_relative(arrived)),
        Cell(format_relative(error.relative)),
        Cell(format_relative(added.expected)),
        Cell(format_number(added.ratio), "bad" if added.is_unexplained else ""),
        Cell(format_number(added.ulps)),
        Cell(f"{error.sqnr_db:.0f}" if math.isfinite(error.sqnr_db) else "exact"),
        Cell(format_share(error.share(error.different))),
    ]


def draw_network(rows: Sequence[ModuleErrors]) -> "Figure":
    """Draw the errors of each module in the order of the forward: came in, added, explained."""
    from matplotlib.figure import Figure

    with chart_style(font_size=8):
        figure = Figure(figsize=(9, 6), layout="constrained")
        panels = figure.subplots(2, 1, sharex=True)
        for axes, title, added_of, arrived_of in (
            (panels[0], "forward", lambda row: row.added, lambda row: row.arrived),
            (
                panels[1],
                "backward",
                lambda row: row.gradient_added,
                lambda row: row.gradient_arrived,
            ),
        ):
            _draw_pass(axes, rows, added_of, arrived_of)
            axes.set_ylabel(f"{title}: relative error")
        _label_modules(panels[1], rows)
    return figure


def _draw_pass(axes: Any, rows: Sequence[ModuleErrors], added_of: Any, arrived_of: Any) -> None:
    places = range(len(rows))
    added = [added_of(row) for row in rows]
    values = [one.found.relative if one else math.nan for one in added]
    explained = [one.expected * one.largest_ratio if one else math.nan for one in added]
    axes.set_yscale("log")
    axes.plot(places, _drawable([arrived_of(row) for row in rows]), ".", ms=3, color="#999999")
    axes.plot(places, _drawable(explained), "_", ms=7, color="#0072B2")
    is_bad = [one is not None and one.is_unexplained for one in added]
    colours = ["#D55E00" if bad else "#009E73" for bad in is_bad]
    axes.scatter(places, _drawable(values), s=14, c=colours, zorder=3)
    axes.grid(axis="y", color="#e4e4e4", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    labels = ("came in", "largest that rounding explains", "added", "added, unexplained")
    marks = [(".", "#999999"), ("_", "#0072B2"), ("o", "#009E73"), ("o", "#D55E00")]
    for label, (mark, colour) in zip(labels, marks, strict=True):
        axes.plot([], [], mark, color=colour, label=label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


def _drawable(values: Sequence[float]) -> list[float]:
    """Return values for a logarithmic axis: NaN in place of 0 and infinity."""
    return [value if 0 < value < math.inf else math.nan for value in values]


def _label_modules(axes: Any, rows: Sequence[ModuleErrors]) -> None:
    every = max(1, math.ceil(len(rows) / MAX_TICKS))
    places = range(0, len(rows), every)
    axes.set_xticks(places, [rows[place].module for place in places], rotation=60, ha="right")


def draw_steps(steps: Sequence[StepComparison]) -> "Figure":
    """Draw a heat map of the errors added: a row for each module that adds one, a column for each
    step."""
    import numpy as np
    from matplotlib.figure import Figure

    found = [
        {row.module: row.added.found.relative for row in step.batch.rows if row.added is not None}
        for step in steps
    ]
    # Modules that add no error at any step would fill half of the map with white.
    names = [name for name in found[0] if any(errors.get(name) for errors in found)]
    values = np.array(
        [_drawable([errors.get(name, 0.0) for errors in found]) for name in names]
    ).reshape(len(names), len(steps))
    values = np.log10(values)
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
