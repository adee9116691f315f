"""Draw a sweep's charts: loss and quality over the steps, loss scales, speed against quality.

Curves of many steps are drawn with few points, without losing dips and peaks of a single step.

matplotlib is imported inside the functions, so that a report without charts does not need it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runner.sweeps.report.load import Job, SweepData
from runner.sweeps.verdict.compare import (
    BASELINE,
    Comparison,
    compare_with_baselines,
    group_name,
    pareto_front,
    sweep_letter,
    without_sweep,
)
from runner.tracking.history import Curve
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.markup import LegendEntry
from runner.utils.plots import chart_style, plain_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps and values, both of shape [points]."""
ENVELOPE_BUCKETS = 750
"""Each becomes two points, its least and its greatest value: a chart has fewer pixels."""
MEAN_BUCKETS = 200
"""Buckets of a smoothed curve."""
Style = tuple[str, Any]
"""Colour, and dash pattern as matplotlib's linestyle."""
JobCurves = Sequence[tuple[Job, Points]]
DrawChart = Callable[["Axes"], None]
GROUP_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette for every kind of colour vision, without its yellow, which is invisible
on white; black is for 32-true."""
DASH_PATTERNS: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
CHART_WIDTH_INCHES = 5.4
CHART_HEIGHT_INCHES = 3.3
LEGEND_WIDTH_INCHES = 1.8
MAX_WIDE_LINES = 8
"""More curves are drawn with narrow lines, and without the unsmoothed curve behind the means."""
MAX_MARKED_POINTS = 40
"""Curves of no more points, such as evaluations, get a dot at each point."""
LABEL_FONT_SIZE = 7.5
CHARACTER_WIDTH = 4.6
LINE_HEIGHT = 9
"""Points that a character and a line of LABEL_FONT_SIZE take, about."""
POINT_RADIUS = 6
LABEL_DISTANCE = 11
"""Points from the middle of a point to the near end of a label at its side."""
RIGHT_MARGIN = 6
"""Points by which a label may cross the right edge of the axes."""
LABEL_PLACES = ((1, 0), (-1, 0), (0, 13), (0, -13), (1, 12), (-1, 12), (1, -12), (-1, -12))
"""(side, rise) of a label from its point, in order of preference: side is 1 for right, -1 for left
and 0 for centred; rise is in points."""
ALIGNMENTS = {1: "left", 0: "center", -1: "right"}


def curve_points(curve: Curve) -> Points:
    """Return steps and values in order of steps.

    A step that was repeated after a resume has its last value.
    """
    # np.unique() returns the first index of each step: reversed, the last value recorded for it.
    steps, first = np.unique(curve[0][::-1], return_index=True)
    return steps, curve[2][::-1][first]


def envelope(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Points:
    """Return each bucket's least and greatest value, in their order.

    These are at most 2 * ENVELOPE_BUCKETS points. Values that are not finite are left out; a
    bucket without any other becomes a gap (NaN).
    """
    if len(steps) <= 2 * ENVELOPE_BUCKETS:
        return steps, np.where(np.isfinite(values), values, np.nan)
    selected: list[int] = []
    for bucket in np.array_split(np.arange(len(steps)), ENVELOPE_BUCKETS):
        finite = bucket[np.isfinite(values[bucket])]
        if len(finite) == 0:
            selected.append(int(bucket[0]))
        else:
            least = int(finite[values[finite].argmin()])
            greatest = int(finite[values[finite].argmax()])
            # A set: a bucket of one value is one point.
            selected += sorted({least, greatest})
    index = np.array(selected)
    return steps[index], np.where(np.isfinite(values[index]), values[index], np.nan)


def bucket_means(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Points:
    """Return the mean of each of MEAN_BUCKETS buckets over its finite values, NaN without any.

    Curves of at most 2 * MEAN_BUCKETS points are returned as they are, with NaN for infinite
    values.
    """
    if len(steps) <= 2 * MEAN_BUCKETS:
        return steps, np.where(np.isfinite(values), values, np.nan)
    buckets = np.array_split(np.arange(len(steps)), MEAN_BUCKETS)
    finite = [values[bucket][np.isfinite(values[bucket])] for bucket in buckets]
    mean_steps = np.array([steps[bucket].mean() for bucket in buckets])
    mean_values = np.array([part.mean() if len(part) else np.nan for part in finite])
    return mean_steps, mean_values


def group_styles(names: Sequence[str]) -> dict[str, Style]:
    """Return colour and dash of each group: 24 pairs before one repeats; 32-true solid black."""
    if any(sweep_letter(name) for name in names):
        plain = group_styles([without_sweep(name) for name in names])
        dashes = dict(zip("AB", DASH_PATTERNS, strict=False))
        # Of two sweeps a precision has one colour.
        return {name: (plain[without_sweep(name)][0], dashes[sweep_letter(name)]) for name in names}
    others = [name for name in dict.fromkeys(names) if name != BASELINE]
    styles: dict[str, Style] = {BASELINE: ("black", "solid")}
    for index, name in enumerate(others):
        # All colours with one dash before the next dash: colours differ more.
        round_of_colours = index // len(GROUP_COLOURS)
        colour = GROUP_COLOURS[index % len(GROUP_COLOURS)]
        styles[name] = (colour, DASH_PATTERNS[round_of_colours % len(DASH_PATTERNS)])
    return styles


def legend_entries(data: SweepData) -> list[LegendEntry]:
    """Return the legend of every group that the charts show, in order."""
    charts = _Charts(data)
    entries = {}
    for job in charts.jobs:
        is_timed = job.result.status == "finished" and job.result.examples_per_second
        # A job without curves is in the chart of speeds.
        if job.curves or is_timed:
            name = group_name(job.result)
            colour, dash = charts.style_of[name]
            # matplotlib's dash pattern is (offset, lengths).
            entries[name] = LegendEntry(name, colour, () if dash == "solid" else dash[1])
    return list(entries.values())


def chart_figures(data: SweepData) -> "list[Figure]":
    """Return each chart as a figure without a legend.

    Training loss, quality, loss scale, speed against quality: those with something to draw, none
    if nothing was trained.
    """
    return [_figure([chart]) for chart in _Charts(data).drawable()]


def overview_figure(data: SweepData) -> "Figure | None":
    """Return all charts in one figure with a legend at the right, None without any chart."""
    drawable = _Charts(data).drawable()
    return _figure(drawable, legend_entries(data)) if drawable else None


def _figure(drawn: Sequence[DrawChart], legend: Sequence[LegendEntry] = ()) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    across = min(2, len(drawn))
    down = (len(drawn) + 1) // 2
    width = CHART_WIDTH_INCHES * across
    if legend:
        width += LEGEND_WIDTH_INCHES
    with chart_style(font_size=9):
        figure = Figure(figsize=(width, CHART_HEIGHT_INCHES * down), layout="constrained")
        lines = []
        for entry in legend:
            dash = (0, entry.dashes) if entry.dashes else "solid"
            lines.append(Line2D([], [], color=entry.colour, ls=dash, lw=1.6))
        if legend:
            box = figure.legend(
                lines,
                [plain_label(entry.name) for entry in legend],
                loc="outside right upper",
                frameon=False,
                fontsize=8 if len(legend) <= 12 else 7,
                handlelength=3,
            )
            # A dollar sign in a name would begin a formula.
            for text in box.get_texts():
                text.set_parse_math(False)
        for i, draw in enumerate(drawn):
            axes = figure.add_subplot(down, across, i + 1)
            axes.grid(color="#e4e4e4", lw=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            draw(axes)
    return figure


def _curves(jobs: Sequence[Job], *keys: str) -> JobCurves:
    """Return each job's first curve among the keys that has points; jobs without any are left
    out."""
    curves = []
    for job in jobs:
        recorded = (job.curves[key] for key in keys if key in job.curves)
        curve = next((each for each in recorded if each.shape[-1]), None)
        if curve is not None:
            curves.append((job, curve_points(curve)))
    return curves


class _Charts:
    """The charts of the jobs of a sweep that trained, instead of evaluating a checkpoint."""

    def __init__(self, data: SweepData) -> None:
        self.jobs = [job for job in data.jobs if not job.result.trained_in]
        self.style_of = group_styles([group_name(job.result) for job in self.jobs])
        self.line_width = 1.3 if len(self.jobs) <= MAX_WIDE_LINES else 0.9

    def drawable(self) -> list[DrawChart]:
        """Return the charts with something to draw."""
        charts: list[DrawChart] = []
        losses = _curves(self.jobs, "train/loss")
        if losses:
            charts.append(partial(self.train_loss, losses))
        # The quality that all jobs share, else the validation loss.
        names = {job.result.quality for job in self.jobs} - {""}
        keys = [*names, VAL_LOSS] if len(names) == 1 else [VAL_LOSS]
        for key in keys:
            qualities = _curves(self.jobs, key)
            if qualities:
                charts.append(partial(self.quality, qualities, key))
                break
        scales = _curves(self.jobs, "loss_scale/value", "loss_scale/changes")
        if scales:
            charts.append(partial(self.loss_scale, scales))
        compared = compare_with_baselines([job.result for job in self.jobs])
        timed = [c for c in compared if c.group.speed and c.group.quality]
        # One point alone shows nothing: a quality and a speed are compared with others'.
        if len(timed) > 1:
            charts.append(partial(self.speed_and_quality, timed))
        return charts

    def train_loss(self, curves: JobCurves, axes: "Axes") -> None:
        """Draw the training loss, with means over buckets where there are many steps."""
        is_any_smoothed = False
        for job, (steps, values) in curves:
            colour, dash = self.style_of[group_name(job.result)]
            # bucket_means() returns shorter curves as they are.
            is_smoothed = len(steps) > 2 * MEAN_BUCKETS
            is_any_smoothed = is_any_smoothed or is_smoothed
            if is_smoothed and len(curves) <= MAX_WIDE_LINES:
                axes.plot(*envelope(steps, values), color=colour, lw=0.4, alpha=0.25)
            axes.plot(*bucket_means(steps, values), color=colour, ls=dash, lw=self.line_width)
        title = "training loss"
        if is_any_smoothed:
            title += f" (means over 1/{MEAN_BUCKETS} of the run)"
        self._finish(axes, title, curves, is_log=True)

    def quality(self, curves: JobCurves, key: str, axes: "Axes") -> None:
        """Draw a metric of evaluations."""
        is_marked = all(len(steps) <= MAX_MARKED_POINTS for _, (steps, _) in curves)
        marker = "." if is_marked else None
        for job, points in curves:
            colour, dash = self.style_of[group_name(job.result)]
            x, y = envelope(*points)
            axes.plot(x, y, color=colour, ls=dash, lw=self.line_width, marker=marker, ms=4)
        is_log = key.endswith(("loss", "perplexity"))
        self._finish(axes, plain_label(key), curves, is_log)

    def _finish(self, axes: "Axes", title: str, curves: JobCurves, is_log: bool) -> None:
        """Set scale, title and labels; mark with a cross where a curve stopped being finite.

        Args:
            axes: with the curves.
            title: of the chart.
            curves: each job with its points.
            is_log: whether to scale logarithmically, if all values are positive.
        """
        finite_values = np.concatenate([values[np.isfinite(values)] for _, (_, values) in curves])
        if is_log and len(finite_values) and finite_values.min() > 0:
            axes.set_yscale("log")
        # At the upper edge: a value that is not finite has no height of its own.
        cross: dict[str, Any] = {"mec": "white", "mew": 0.5, "ms": 8, "clip_on": False, "zorder": 5}
        has_gap = False
        for job, (steps, values) in curves:
            nonfinite = ~np.isfinite(values)
            if nonfinite.any():
                has_gap = True
                step = steps[nonfinite.argmax()]
                colour = self.style_of[group_name(job.result)][0]
                top = axes.get_xaxis_transform()
                axes.plot(step, 0.97, "X", color=colour, transform=top, **cross)
        if has_gap:
            title += " (✖: first NaN or inf)"
        _set_title(axes, title)
        axes.set_xlabel("optimizer step")

    def loss_scale(self, curves: JobCurves, axes: "Axes") -> None:
        """Draw the loss scale, with a cross at each skipped step."""
        has_positive = False
        for job, (steps, scales) in curves:
            colour, dash = self.style_of[group_name(job.result)]
            x, y = envelope(steps, scales)
            has_positive = has_positive or bool((y > 0).any())
            # A scale holds until the step that changes it.
            axes.plot(x, y, color=colour, ls=dash, lw=1.1, drawstyle="steps-post")
            for _, (flag_steps, flags) in _curves([job], "loss_scale/overflow"):
                overflows = flag_steps[flags > 0]
                # Every n-th: thousands of crosses would hide the curve and fill the page.
                stride = max(1, math.ceil(len(overflows) / ENVELOPE_BUCKETS))
                overflows = overflows[::stride]
                # The value of the curve at each overflow: the crosses are on the curve.
                heights = scales[np.searchsorted(steps[1:], overflows, "right")]
                axes.plot(overflows, heights, "x", color=colour, ms=4, mew=0.9)
        if has_positive:
            axes.set_yscale("log", base=2)
        _set_title(axes, "loss scale (×: overflow, step skipped)")
        axes.set_xlabel("optimizer step")

    def speed_and_quality(self, drawn: Sequence[Comparison], axes: "Axes") -> None:
        """Draw a disc for each group, its area in proportion to memory, with the quality's
        spread."""
        is_ratio = all(c.speed_ratio for c in drawn)
        points = [_speed_and_quality(c, is_ratio) for c in drawn]
        memories = [c.group.memory_mib or 0 for c in drawn]
        most = max(memories)
        for c, memory, (x, y) in zip(drawn, memories, points, strict=True):
            assert c.group.quality is not None
            colour = self.style_of[c.group.name][0]
            # The least area still shows its colour; without any known memory all discs are equal.
            size = max(15, 260 * memory / most) if most else 60
            axes.errorbar(x, y, yerr=c.group.quality.sd, color=colour, lw=1, capsize=3, fmt="none")
            axes.scatter([x], [y], s=size, color=colour, alpha=0.55, ec="white", zorder=3)
        front = sorted(_speed_and_quality(best, is_ratio) for best in pareto_front(drawn))
        # No line between speeds of several devices.
        if len(front) > 1 and len({c.group.device for c in drawn}) == 1:
            axes.plot(*zip(*front, strict=True), color="#888888", lw=0.8, ls="--", zorder=1)
        axes.margins(0.18)
        labels = [plain_label(c.group.name, 26) for c in drawn]
        label_points(axes, list(zip(labels, points, strict=True)))
        axes.set_xlabel(f"speed × {BASELINE}" if is_ratio else "examples/s")
        quality = plain_label(drawn[0].group.jobs[0].quality)
        _set_title(axes, f"{quality} against speed (area: memory; dashed: Pareto front)")


def _set_title(axes: "Axes", text: str) -> None:
    # Without a height matplotlib measures every tick label once more, to make room for a factor
    # above a linear axis.
    height = None if axes.get_yscale() == "linear" else 1.0
    axes.set_title(text, fontsize=9, loc="left", y=height, parse_math=False)


def _speed_and_quality(c: Comparison, is_ratio: bool) -> tuple[float, float]:
    """Return speed (over 32-true's if is_ratio, else in examples/s) and quality of a group."""
    assert c.group.speed is not None
    assert c.group.quality is not None
    speed = c.speed_ratio.value if is_ratio and c.speed_ratio else c.group.speed.mean
    return speed, c.group.quality.mean


def label_points(axes: "Axes", named: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Write each name next to its point, where it covers neither a point nor another name.

    Without such a place a name is left out: the legend has the colours.

    Args:
        axes: with everything else already drawn.
        named: (name, (x, y)) of each point, in data coordinates.
    """
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    assert figure is not None
    layout = figure.get_layout_engine()
    assert layout is not None
    # The layout decides where the points are.
    layout.execute(figure)
    pixels = figure.dpi / 72
    centres = [axes.transData.transform(point) for _, point in named]
    radius = POINT_RADIUS * pixels
    taken = [Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in centres]
    for (name, point), (x, y) in zip(named, centres, strict=True):
        width = CHARACTER_WIDTH * len(name) * pixels
        height = LINE_HEIGHT * pixels
        for side, rise in LABEL_PLACES:
            left_edge = x + LABEL_DISTANCE * side * pixels - width * (1 - side) / 2
            box = Bbox.from_bounds(left_edge, y + rise * pixels - height / 2, width, height)
            if box.x0 < axes.bbox.x0 or box.x1 > axes.bbox.x1 + RIGHT_MARGIN * pixels:
                continue
            if any(box.overlaps(other) for other in taken):
                continue
            taken.append(box)
            axes.annotate(
                name,
                point,
                (LABEL_DISTANCE * side, rise),
                textcoords="offset points",
                fontsize=LABEL_FONT_SIZE,
                ha=ALIGNMENTS[side],
                va="center",
                parse_math=False,
                bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.6},
            )
            break
