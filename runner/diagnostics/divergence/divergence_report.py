"""Say where two executions part: in words, as diff.json, and as diff.html, with pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.core import files, fmt
from runner.diagnostics.divergence.boundaries import LOSS
from runner.diagnostics.divergence.compare import BatchComparison
from runner.diagnostics.divergence.findings import (
    KNOWN_SUM,
    LARGEST_EXPLAINED,
    LARGEST_EXPLAINED_OF_CODE,
    LARGEST_EXPLAINED_OF_INTEGERS,
    PASSED,
    WRITTEN_INPUT,
    AddedError,
    Divergence,
    ModuleErrors,
    first_divergence,
)
from runner.diagnostics.numerics.numerics_page import ROW_HEIGHT_INCHES, draw_heat_map, folded_table
from runner.output.markup import Block, Cell, Charts, Heading, Items, Table, Text, Tone, to_html
from runner.output.plots import CHART_WIDTH_INCHES, chart_style, module_label, svg_element

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_SUBNORMAL_SHARE = 0.01
"""Share of a tensor's elements below the normal numbers of its dtype, from which on that is named
as the cause."""
FORMAT = 1
"""Version of diff.json."""
_COUNTS = ("nonfinite", "flushed", "subnormal", "different", "elements")
"""Of a TensorError, as diff.json has them."""
_LISTED = 4
"""Names that a sentence lists; the others are counted."""


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
    steps: Sequence[BatchComparison]

    @property
    def chosen(self) -> BatchComparison:
        """Return the first step in which the executions part; else the first that compares the most
        modules, of those in which they differ, if any."""

        def rank(step: BatchComparison) -> tuple[bool, int]:
            return step.is_exact, sum(bool(row.uncompared) for row in step.rows)

        parted = (step for step in self.steps if first_divergence(step.rows))
        return next(parted, min(self.steps, key=rank))

    @property
    def divergence(self) -> Divergence | None:
        """Return where the executions part first; None where rounding explains everything."""
        return first_divergence(self.chosen.rows)

    @property
    def sentence(self) -> str:
        """Return the sentence that says what was found."""
        batch = self.chosen
        missing = describe_uncompared(self.steps)
        text = describe_divergence(batch, self.name, self.against, missing) + _remarks(batch)
        if missing:
            text += f" Not compared: {missing}. A later step may show it: type diff.steps=[100]."
        if len(self.steps) == 1:
            return text
        if self.divergence is None:
            return f"In all {len(self.steps)} steps: {text}"
        return f"In step {self.chosen.step}: {text}"


def _remarks(batch: BatchComparison) -> str:
    """Return sentences on what a reader must know of a comparison beside its first divergence."""
    text = ""
    if any(batch.flips.values()):
        worst = max(batch.flips, key=batch.flips.__getitem__)
        text += (
            f" {fmt.format_share(batch.flips[worst])} of tokens go to other experts in `{worst}`"
            f"{', the most of all layers' if len(batch.flips) > 1 else ''}."
        )
    if batch.uneven_calls:
        counts = []
        for name, (count, expected) in batch.uneven_calls.items():
            times = "once" if count == 1 else f"{count} times"
            counts.append(f"`{name}` ({times} against {expected})")
        text += f" Not called equally often by both: {fmt.first_names(counts, _LISTED)}."
    if batch.other_weights:
        names = [f"`{name}`" for name in batch.other_weights]
        count = len(names)
        text += (
            f" Both have other weights in {count} {'module' if count == 1 else 'modules'}, so that "
            f"errors there are no bug of their code: {fmt.first_names(names, _LISTED)}."
        )
    return text


def metrics(step: BatchComparison) -> dict[str, float]:
    """Return the numbers of a step under the names that the store has."""
    reference, loss = step.losses
    values = {
        "diff/loss": loss,
        "diff/loss_reference": reference,
        "diff/output_error": step.output_error,
        "diff/gradient_error": step.gradient_error,
        "diff/unexplained_modules": float(len(unexplained(step.rows))),
    }
    if step.flips:
        values["diff/flips"] = max(step.flips.values())
    if step.log_probabilities is not None:
        values["diff/log_probability_rms"] = step.log_probabilities.rms
        values["diff/argmax_changed"] = step.log_probabilities.changed
    return {name: value for name, value in values.items() if not math.isnan(value)}


def unexplained(rows: Sequence[ModuleErrors]) -> list[ModuleErrors]:
    """Return the modules that add more than rounding explains."""
    return [
        row
        for row in rows
        if any(added and added.is_unexplained for added in (row.added, row.gradient_added))
    ]


def uncompared(steps: Sequence[BatchComparison]) -> dict[str, list[str]]:
    """Return the modules whose "output", and those whose "backward", no step compares."""
    left = {}
    for what in ("output", "backward"):
        by_step = [[row.module for row in s.rows if what in row.uncompared] for s in steps]
        # They are in the order of the forward.
        left[what] = [name for name in by_step[0] if all(name in names for names in by_step)]
    return left


def describe_uncompared(steps: Sequence[BatchComparison]) -> str:
    """Return what no step compares as a clause; empty where there is nothing."""
    rows = steps[0].rows
    parts = []
    for what, names in uncompared(steps).items():
        if names:
            listed = fmt.first_names([f"`{name}`" for name in names], _LISTED)
            parts.append(f"the {what} of {len(names)} of {len(rows)} modules ({listed})")
    reason = ", where all is 0 or not finite in the reference, or of another shape by rounding"
    return " and ".join(parts) + reason * bool(parts)


def write_json_report(report: DivergenceReport, path: Path) -> None:
    """Write diff.json.

    Raises:
        OSError: the file cannot be written.
    """
    first = report.divergence
    steps = []
    for step in report.steps:
        modules = []
        for row in step.rows:
            record = {
                "module": row.module,
                "class": row.kind,
                "experts": sorted(row.experts),
                "arrived": _number(row.arrived),
                "gradient_arrived": _number(row.gradient_arrived),
                "added": _error_record(row.added),
                "gradient_added": _error_record(row.gradient_added),
                "uncompared": sorted(row.uncompared),
            }
            modules.append(record)
        numbers = {name: _number(value) for name, value in metrics(step).items()}
        scale = {"step": step.step, "loss_scale": step.scale, "flips": step.flips}
        steps.append({**scale, **numbers, "modules": modules})
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
        "steps": steps,
    }
    files.write_json(path, content)


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
        **{name: getattr(found, name) for name in _COUNTS},
        "unexplained": added.is_unexplained,
    }


def _number(value: float) -> float | None:
    """Return a number as JSON has it: None in place of infinity and NaN."""
    return value if math.isfinite(value) else None


def describe_divergence(batch: BatchComparison, name: str, against: str, missing: str) -> str:
    """Return the sentence that a report begins with.

    Args:
        batch: two executions on one batch.
        name: label of the execution.
        against: label of the reference.
        missing: what was not compared, as a clause; empty for nothing.
    """
    first = first_divergence(batch.rows)
    extent = " in what was compared" if missing else ""
    if batch.is_exact:
        return f"{name} and {against} agree in every bit{extent}."
    if first is None:
        return _agreement(batch, name, against, extent)
    row = first.row
    # A fault in one expert is named by it; one in all of them is the layer's.
    expert = "".join(row.experts) if len(row.experts) == 1 else ""
    where = "the loss" if row.module == LOSS else f"`{row.module}{expert}`"
    what, arrived = "what comes in", row.arrived
    if first.is_backward:
        where = f"the backward of {where}"
        what, arrived = "the gradient that comes in", row.gradient_arrived
    context = f"{what} differs by {format_relative(arrived)}" if arrived else f"{what} is the same"
    calls = batch.uneven_calls.get(row.module, (1, 1))
    for label, count in zip((name, against), calls, strict=True):
        if count == 0:
            context = f"{label} never calls the module"
    text = f"{name} parts from {against} in {where}: {describe_cause(first.added)}; {context}."
    return f"{text} It is known: {KNOWN_SUM}." if first.added.is_known_sum else text


def describe_cause(added: AddedError) -> str:
    """Return in words what is wrong with a tensor."""
    error = added.found
    place = f", first in its {added.operation}()" if added.operation else ""
    tensor = f"its {added.tensor}"
    if added.tensor.startswith("gradient"):
        tensor = f"the {added.tensor}"
    if added.tensor == WRITTEN_INPUT:
        tensor = "what it writes into its input"
    if added.tensor.startswith(PASSED):
        tensor = f"what it passes to `{added.tensor.removeprefix(PASSED)}`"
    if error.other_shape:
        return f"{tensor} has another shape"
    if error.nonfinite:
        share = fmt.format_share(error.share(error.nonfinite))
        dtype = f" of {added.dtype}" if added.dtype else ""
        return f"{tensor} is not finite in {share} of the elements{dtype}{place}"
    text = f"{tensor} is off by {format_relative(error.relative)}"
    if error.is_discrete:
        text = f"{tensor} differs in {fmt.format_share(error.relative)} of the elements"
    if math.isfinite(added.ratio):
        text += f", {added.ratio:,.0f} times what rounding explains"
    else:
        text += ", which rounding does not explain"
    subnormal = error.share(error.subnormal)
    if subnormal >= MIN_SUBNORMAL_SHARE:
        text += (
            f" ({fmt.format_share(subnormal)} of the elements are below the normal "
            f"numbers of {added.dtype}, {fmt.format_share(error.share(error.flushed))} become zero)"
        )
    return text + place


def _agreement(batch: BatchComparison, name: str, against: str, extent: str) -> str:
    """Return the sentence of two executions that differ by no more than rounding."""
    rows = batch.rows
    forward = [
        (row.added, row.module) for row in rows if row.added and not row.added.found.other_shape
    ]
    if batch.same_format:
        # The first error that is not zero: in the forward, else in the backward.
        different = [pair for pair in forward if pair[0].found.error]
        if different:
            added, module = min(different, key=lambda pair: pair[0].position)
            where = f"`{module}`"
        else:
            backward = [(row.gradient_added, row.module) for row in rows if row.gradient_added]
            added, module = max(backward, key=lambda pair: pair[0].ratio)
            where = f"the backward of `{module}`"
        share = fmt.format_share(added.found.share(added.found.different))
        return (
            f"{name} and {against} compute in the same format and differ, first in {where}: "
            f"{format_relative(added.found.relative)} in norm, {share} of the elements, which "
            "rounding can explain."
        )
    text = (
        f"{name} and {against} differ by rounding alone{extent}: no module adds more than rounding "
        "explains"
    )
    # The share of changed choices would read like a large error.
    numbers = [pair for pair in forward if not pair[0].found.is_discrete]
    if numbers:
        largest, module = max(numbers, key=lambda pair: pair[0].found.relative)
        text += (
            f"; the most in the forward is {format_relative(largest.found.relative)}, in `{module}`"
        )
    return f"{text}."


def format_relative(value: float) -> str:
    """Return a relative error in percent, or as a power of ten below 0.01 %."""
    if math.isnan(value):
        return "nothing that could be compared: all is 0"
    if math.isinf(value):
        return "more than its size"
    if value == 0:
        return "0"
    return fmt.format_share(value) if value >= 1e-4 else f"{value:.1e}"


MAX_ROWS = 40
"""Modules in the table: those that add the most."""
MAX_NAMES = 60
"""Rows of a chart that are high enough for a name; of more modules every n-th has one."""


def write_page(report: DivergenceReport, head: Sequence[Block], path: Path) -> None:
    """Write diff.html, which holds no script.

    Raises:
        OSError: the file cannot be written.
    """
    batch = report.chosen
    answer = Text(report.sentence.replace("`", ""), "answer")
    blocks: list[Block] = [*head, answer, Items(_facts(report))]
    blocks.append(Heading("Error along the network"))
    forward = [(row.module, row.added, row.arrived) for row in batch.rows]
    backward = [(row.module, row.gradient_added, row.gradient_arrived) for row in batch.rows]
    passes = {"forward": forward, "backward": backward}
    blocks.append(Charts([svg_element(draw_pass(name, rows)) for name, rows in passes.items()]))
    if len(report.steps) > 1:
        chart = svg_element(draw_steps(report.steps))
        blocks += [Heading("Error over the steps"), Charts([chart])]
    if batch.flips:
        flips = sorted(batch.flips.items(), key=lambda one: -one[1])
        lines = [[Cell(name), Cell(fmt.format_share(share), bar=share)] for name, share in flips]
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
    reference, loss = step.losses
    facts = [
        ("step", str(step.step)),
        ("loss", f"{fmt.format_number(loss)}, in {report.against} {fmt.format_number(reference)}"),
        ("model's output", f"differs by {format_relative(step.output_error)}"),
        ("gradients together", f"differ by {format_relative(step.gradient_error)}"),
    ]
    if step.log_probabilities is not None:
        rms, changed = step.log_probabilities
        text = f"differ by {fmt.format_number(rms)} nats (rms); another class is first for "
        facts.append(("log-probabilities of the targets", text + fmt.format_share(changed)))
    if step.scale != 1.0:
        facts.append(("loss scale", fmt.format_number(step.scale)))
    return facts


def _table(rows: Sequence[ModuleErrors]) -> Table:
    head = [
        *("module", "tensor"),
        *("came in", "added", "explained", "times", "ulps", "SQNR dB", "differ"),
    ]
    errors = [(row, row.added, row.arrived) for row in rows]
    errors += [(row, row.gradient_added, row.gradient_arrived) for row in rows]
    lines = []
    for row, added, arrived in errors:
        if added is None or added.found.relative == 0.0:
            continue
        error = added.found
        is_known = added.is_unexplained and added.is_known_sum
        tone: Tone = "bad" if added.is_news else ""
        line = [
            Cell(row.module, tone, row.kind),
            Cell(added.tensor, note=f"{added.dtype}, {KNOWN_SUM}" if is_known else added.dtype),
            Cell(format_relative(arrived)),
            Cell(format_relative(error.relative)),
            Cell(format_relative(added.expected)),
            Cell(fmt.format_number(added.ratio), tone),
            Cell(f"{float(f'{added.ulps:.2g}'):,.10g}"),
            Cell(f"{error.sqnr_db:.0f}" if math.isfinite(error.sqnr_db) else "exact"),
            Cell(fmt.format_share(error.share(error.different))),
        ]
        lines.append((-added.is_unexplained, -added.ratio, line))
    lines.sort(key=lambda one: one[:2])
    return folded_table(head, [line for *_, line in lines[:MAX_ROWS]], frozenset(range(2)))


def draw_pass(name: str, errors: Sequence[tuple[str, AddedError | None, float]]) -> "Figure":
    """Draw a pass, one module below the other in the order of the forward.

    Args:
        name: of the pass, forward or backward.
        errors: module, the error that it adds, and the relative error of what comes in.
    """
    rows = range(len(errors))
    wrong: list[float] = []
    right: list[float] = []
    explained: list[float] = []
    for _, added, _ in errors:
        relative = added.found.relative if added else 0.0
        is_unexplained = added is not None and added.is_unexplained
        wrong.append(relative if is_unexplained else 0.0)
        right.append(0.0 if is_unexplained else relative)
        explained.append(added.expected * added.largest_ratio if added else 0.0)
    with chart_style():
        figure, axes = _figure(min(len(errors), MAX_NAMES))
        axes.set_xscale("log")
        axes.locator_params(axis="x", numticks=3)
        axes.xaxis.set_major_formatter("{x:g}")
        for label, values, mark, size, colour in (
            ("came in", [relative for *_, relative in errors], ".", 4, "#999999"),
            ("added", right, "o", 4, "#009E73"),
            ("most that rounding explains", explained, "|", 8, "#0072B2"),
            ("added, unexplained", wrong, "o", 4, "#D55E00"),
        ):
            axes.plot(_drawable(values), rows, mark, ms=size, mew=1.5, color=colour, label=label)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, handlelength=1)
        places = rows[:: math.ceil(len(errors) / MAX_NAMES) or 1]
        names = [module_label(errors[place][0]) for place in places]
        axes.set_yticks(places, names, parse_math=False)
        axes.set_ylim(len(errors) - 0.5, -0.5)
        axes.set_xlabel(f"relative error, {name}")
    return figure


def _figure(rows: int) -> tuple["Figure", "Axes"]:
    """Return a figure that is high enough for so many names of modules, and its axes."""
    from matplotlib.figure import Figure

    size = (CHART_WIDTH_INCHES, 1.3 + ROW_HEIGHT_INCHES * rows)
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def _drawable(values: Sequence[float]) -> list[float]:
    """Return values for a logarithmic axis: NaN in place of 0 and infinity."""
    return [value if 0 < value < math.inf else math.nan for value in values]


def draw_steps(steps: Sequence[BatchComparison]) -> "Figure":
    """Draw a heat map of the errors added: a row for each module that adds one, a column for each
    step."""
    from matplotlib.colors import LogNorm

    by_step = [{row.module: row.added for row in step.rows} for step in steps]
    cells = {name: [errors.get(name) for errors in by_step] for name in by_step[0]}
    # Modules that add no error at any step would fill half of the map with nothing.
    names = [name for name in cells if any(one and one.found.relative for one in cells[name])]
    errors = [[one.found.relative if one else 0.0 for one in cells[name]] for name in names]
    values = np.array([*map(_drawable, errors)]).reshape(len(names), len(steps))
    outlined = np.array([[bool(one and one.is_unexplained) for one in cells[n]] for n in names])
    with chart_style():
        figure, axes = _figure(len(names))
        title = "no error is added in the forward"
        if not np.isnan(values).all():
            low, high = np.nanmin(values), np.nanmax(values)
            title = f"relative error added in the forward:\nfaint {low:.1g}, strong {high:.1g}"
            if outlined.any():
                title += "\noutlined: not explained by rounding"
            numbers = [step.step for step in steps]
            draw_heat_map(axes, values, outlined, names, numbers, LogNorm(low, high))
        axes.set_xlabel("step")
        axes.set_title(title, loc="right")
    return figure
