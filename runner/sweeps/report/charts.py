"""Draw a sweep's charts: differences to the baseline, loss and quality over the steps, loss scales.

matplotlib itself draws curves of many steps with few points, without losing the dips and peaks of a
single step (path.simplify).

matplotlib is imported inside the functions, so that a report without charts does not need it.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from runner.core import RunResult, fmt, metric_names
from runner.output.markup import LegendEntry
from runner.output.plots import CHART_WIDTH_INCHES, INK, chart_style, plain_label
from runner.sweeps.report.sweep_data import Job, SweepData
from runner.sweeps.verdict.compare import BASELINE, group_name
from runner.sweeps.verdict.ranking import jobs_of
from runner.tracking.history import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps and values, both of shape [points]."""
MAX_CROSSES = 750
"""Crosses of a curve's overflows: thousands would hide the curve and fill the page."""
MEAN_BUCKETS = 200
"""Buckets of a smoothed curve."""
JobCurves = Sequence[tuple[Job, Points]]
Chart = tuple[float, Callable[["Axes"], None]]
"""Height in inches, and what draws the chart."""
Interval = tuple[str, str, float, float]
"""Name, colour, mean difference of the loss to the baseline's, and half-width of its interval,
which is infinite with one seed."""
Style = tuple[str, int]
"""Colour, and index of DASH_PATTERNS."""
GROUP_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9467BD", "#8C564B"),
    *("#D62728", "#BCBD22", "#17BECF", "#E377C2", "#6A5ACD", "#A0522D", "#6B8E23", "#C71585"),
    *("#20B2AA", "#B8860B", "#CD5C5C", "#4682B4", "#DA70D6", "#708090", "#2E8B57", "#FF7F50"),
    *("#7B68EE", "#9ACD32", "#BC8F8F", "#7F7F7F"),
)
"""First Okabe and Ito's palette for every kind of colour vision, without its yellow, which is
invisible on white; 32-true has the colour of text."""
DASH_PATTERNS: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
CHART_HEIGHT_INCHES = 3.1
ROW_HEIGHT_INCHES = 0.22
LEGEND_WIDTH_INCHES = 1.8
LINE_WIDTHS = (2.8, 0.8)
"""Of the first and the last group: where curves meet, the wider ones show at the sides."""
MIN_LOG_RATIO = 3
"""Greatest value over the least below which an axis is linear: a logarithmic one has a tick at 1, 2
and 5 times each power of ten."""
MAX_LINEAR_RATIO = 20
"""Greatest difference to the baseline over the median one above which their axis is logarithmic."""
MAX_MARKED_POINTS = 40
"""Curves of no more points, such as evaluations, get a dot at each point."""


def curve_points(curve: Curve) -> Points:
    """Return steps and values in order of steps.

    A step that was repeated after a resume has its last value.
    """
    # np.unique() returns the first index of each step: reversed, the last value recorded for it.
    steps, first = np.unique(curve[0][::-1], return_index=True)
    return steps, curve[2][::-1][first]


def bucket_means(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Points:
    """Return the mean of each of MEAN_BUCKETS buckets over its finite values, NaN without any.

    Curves of at most 2 * MEAN_BUCKETS points are returned as they are.
    """
    if len(steps) <= 2 * MEAN_BUCKETS:
        return steps, values
    finite = (part[np.isfinite(part)] for part in np.array_split(values, MEAN_BUCKETS))
    means = [part.mean() if len(part) else np.nan for part in finite]
    centres = [part.mean() for part in np.array_split(steps, MEAN_BUCKETS)]
    return np.array(centres), np.array(means)


def group_styles(results: Sequence[RunResult]) -> dict[str, Style]:
    """Return the style of each group, by name: a colour for each precision, and a dash pattern for
    each of the other settings. Groups of more settings than patterns differ in colour alone."""
    # In a report on two sweeps the sweep is a setting, too.
    own = [(result.sweep, *result.settings) for result in results]
    settings = [*dict.fromkeys(own)]
    is_dashed = len(settings) <= len(DASH_PATTERNS)
    colours = {BASELINE: INK}
    styles = {}
    for result, words in zip(results, own, strict=True):
        name = group_name(result)
        free = GROUP_COLOURS[(len(colours) - 1) % len(GROUP_COLOURS)]
        colour = colours.setdefault(result.precision if is_dashed else name, free)
        styles[name] = (colour, settings.index(words) if is_dashed else 0)
    return styles


def legend_entries(data: SweepData) -> list[LegendEntry]:
    """Return the legend: every group that the charts show, in order, and the seeds' dashes."""
    charts = _Charts(data)
    styles = {}
    seeds = []
    for job in charts.jobs:
        if _curves([job], "train/loss", job.result.quality, metric_names.VAL_LOSS):
            name = group_name(job.result)
            styles[name] = charts.style_of[name]
            seeds.append((charts.dash(job), str(job.result.seed)))
    by_dash = sorted(fmt.grouped(dict.fromkeys(seeds)).items())
    if len(by_dash) > 1 and not charts.has_settings:
        styles |= {f"seed {', '.join(of_dash)}": (INK, dash) for dash, of_dash in by_dash}
    # matplotlib's dash pattern is (offset, lengths).
    return [
        LegendEntry(name, colour, DASH_PATTERNS[dash][1] if dash else ())
        for name, (colour, dash) in styles.items()
    ]


def chart_figures(data: SweepData) -> "list[Figure]":
    """Return each chart as a figure without a legend.

    Difference to the baseline, training loss, quality, loss scale: those with something to draw,
    none if nothing was trained.
    """
    return [_figure([chart]) for chart in _Charts(data).drawable()]


def overview_figure(data: SweepData) -> "Figure | None":
    """Return all charts in one figure with a legend at the right, None without any chart."""
    drawable = _Charts(data).drawable()
    return _figure(drawable, legend_entries(data)) if drawable else None


def _figure(drawn: Sequence[Chart], legend: Sequence[LegendEntry] = ()) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    across = min(2, len(drawn))
    # The height of a row is that of its highest chart.
    heights = [max(inches for inches, _ in drawn[i : i + 2]) for i in range(0, len(drawn), 2)]
    width = CHART_WIDTH_INCHES * across + (LEGEND_WIDTH_INCHES if legend else 0.0)
    with chart_style():
        figure = Figure(figsize=(width, sum(heights)), layout="constrained")
        grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
        lines = []
        for entry in legend:
            dash = (0, entry.dashes) if entry.dashes else "solid"
            label = plain_label(entry.name)
            lines.append(Line2D([], [], color=entry.colour, ls=dash, lw=1.6, label=label))
        if legend:
            box = figure.legend(
                handles=lines, loc="outside right upper", frameon=False, handlelength=3
            )
            # A dollar sign in a name would begin a formula.
            for text in box.get_texts():
                text.set_parse_math(False)
        for i, (_, draw) in enumerate(drawn):
            axes = figure.add_subplot(grid[divmod(i, across)])
            draw(axes)
    return figure


def _curves(jobs: Sequence[Job], *keys: str) -> JobCurves:
    """Return each job's first curve among the keys that has points; jobs without any are left
    out."""
    curves = []
    for job in jobs:
        recorded = [job.curves[key] for key in keys if key in job.curves and job.curves[key].size]
        if recorded:
            curves.append((job, curve_points(recorded[0])))
    return curves


class _Charts:
    """The charts of the jobs of a sweep that trained, instead of evaluating a checkpoint."""

    def __init__(self, data: SweepData) -> None:
        self.advice = data.advice
        self.gate = data.gate
        self.baseline = BASELINE
        self.judged = [each for each in data.compared if not each.group.is_evaluation]
        if self.advice:
            self.baseline = self.advice.request.baseline
            self.judged = [verdict.comparison for verdict in self.advice.verdicts]
        self.style_of = group_styles(jobs_of(self.judged))
        self.has_settings = any(dash for _, dash in self.style_of.values())
        order = [*self.style_of]
        # Without the search of mode=advise for remedies, and group by group: the narrow curves of
        # the last ones are above the wide ones.
        by_name = fmt.grouped((group_name(job.result), job) for job in data.jobs)
        # A recorded baseline has no job here.
        self.jobs = [job for name in order for job in by_name.get(name, ())]
        self.line_widths = dict(zip(order, np.linspace(*LINE_WIDTHS, len(order)), strict=True))
        self.seeds = sorted({job.result.seed or 0 for job in self.jobs})
        self.joins_seeds = len(self.seeds) > len(DASH_PATTERNS)

    def dash(self, job: Job) -> int:
        """Return the index of a job's dash pattern: of its settings, if they differ between the
        jobs, or if seeds are drawn together, else of its seed."""
        if self.has_settings or self.joins_seeds:
            return self.style_of[group_name(job.result)][1]
        return self.seeds.index(job.result.seed or 0) % len(DASH_PATTERNS)

    def line(self, job: Job) -> dict[str, Any]:
        """Return how matplotlib draws a job's curve."""
        name = group_name(job.result)
        dash = DASH_PATTERNS[self.dash(job)]
        return {"color": self.style_of[name][0], "ls": dash, "lw": self.line_widths[name]}

    def drawable(self) -> list[Chart]:
        """Return the charts with something to draw."""
        charts: list[Chart] = []
        intervals = self.intervals()
        if intervals:
            height = 1.2 + ROW_HEIGHT_INCHES * len(intervals)
            charts.append((height, partial(self.difference, intervals)))
        losses = _curves(self.jobs, "train/loss")
        if _has_line(losses):
            charts.append((CHART_HEIGHT_INCHES, partial(self.train_loss, losses)))
        # The quality that all jobs share, else the validation loss.
        names = {job.result.quality for job in self.jobs} - {""}
        keys = [*names, metric_names.VAL_LOSS] if len(names) == 1 else [metric_names.VAL_LOSS]
        for key in keys:
            qualities = _curves(self.jobs, key)
            if _has_line(qualities):
                charts.append((CHART_HEIGHT_INCHES, partial(self.quality, qualities, key)))
                break
        scales = _curves(self.jobs, "loss_scale/value", "loss_scale/changes")
        if scales:
            charts.append((CHART_HEIGHT_INCHES, partial(self.loss_scale, scales)))
        return charts

    def intervals(self) -> list[Interval]:
        """Return the differences to the baseline that the verdicts rest on."""
        if self.gate:
            colour = self.style_of[self.gate.precision.name][0]
            return [(f"{o.seeds} seeds", colour, o.gap, o.half_width) for o in self.gate.looks]
        tested = [(c.group, c.difference) for c in self.judged if c.difference]
        # Differences of several metrics are in no common unit.
        if len({group.metric for group, _ in tested}) > 1:
            return []
        return [
            (group.name, self.style_of[group.name][0], one.value, one.ci_half_width)
            for group, one in tested
        ]

    def difference(self, intervals: Sequence[Interval], axes: "Axes") -> None:
        """Draw each mean difference to the baseline with its interval, one below the other."""
        job = next(c for c in self.judged if c.difference).group.jobs[0]
        metric, direction, sign = job.quality, job.direction, 1
        notes = "bars: 95 % interval"
        if self.advice:
            settings = self.advice.request
            metric, direction, sign = settings.metric, settings.direction, settings.sign
            notes = "bars: interval of the test"
            losses = self.advice.baseline_losses
            tolerated = settings.accepted.certain_gap(self.advice.baseline_spread, len(losses))
            if math.isfinite(tolerated):
                axes.axvspan(-tolerated, tolerated, color=INK, alpha=0.12, lw=0)
                notes += "; shaded: tolerated"
        axes.axvline(0, color=INK, lw=1)
        for row, (_, colour, value, half_width) in enumerate(intervals):
            error = half_width if math.isfinite(half_width) else None
            axes.errorbar(sign * value, row, xerr=error, color=colour, fmt="o", ms=5, capsize=3)
        names, _, values, half_widths = zip(*intervals, strict=True)
        known = [*map(math.isfinite, half_widths)]
        if not all(known):
            notes = f"{notes}; one seed has none" if any(known) else "one seed: no interval"
        sizes = [*map(abs, values)]
        typical = statistics.median(sizes)
        if max(sizes) > MAX_LINEAR_RATIO * typical > 0:
            # One bad precision would press all others together.
            threshold = 10.0 ** math.ceil(math.log10(typical))
            axes.set_xscale("symlog", linthresh=threshold)
            axes.xaxis.set_major_formatter("{x:g}")
            notes += f"; logarithmic beyond ±{threshold:g}"
        else:
            axes.locator_params(axis="x", nbins=5)
        axes.set_yticks(range(len(names)), [*map(plain_label, names)], parse_math=False)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel("lower is better" if direction == "min" else "higher is better")
        title = f"{metric} minus that of {self.baseline}\n{notes}"
        _set_title(axes, title, "right")

    def train_loss(self, curves: JobCurves, axes: "Axes") -> None:
        """Draw the training loss, with means over buckets where there are many steps."""
        # Curves of few steps are drawn as they are.
        self._plot([(job, bucket_means(*points)) for job, points in curves], axes)
        title = "training loss"
        if any(len(steps) > 2 * MEAN_BUCKETS for _, (steps, _) in curves):
            title += f" (means over 1/{MEAN_BUCKETS} of the run)"
        self._finish(axes, title, curves, is_log=True)

    def quality(self, curves: JobCurves, key: str, axes: "Axes") -> None:
        """Draw a metric of evaluations."""
        is_marked = all(len(steps) <= MAX_MARKED_POINTS for _, (steps, _) in curves)
        marker = "." if is_marked else None
        drawn = [(job, bucket_means(*points)) for job, points in curves]
        self._plot(drawn if self.joins_seeds else curves, axes, marker=marker, ms=4)
        is_log = key.endswith(("loss", "perplexity"))
        self._finish(axes, plain_label(key), curves, is_log)

    def _plot(self, curves: JobCurves, axes: "Axes", **marker: Any) -> None:
        """Draw each job's curve; with more seeds than dash patterns the mean of each group's, with
        its range."""
        if not self.joins_seeds:
            for job, points in curves:
                axes.plot(*points, **self.line(job), **marker)
            return
        by_group = fmt.grouped((group_name(job.result), (job, points)) for job, points in curves)
        for of_group in by_group.values():
            line = self.line(of_group[0][0])
            steps = reduce(np.intersect1d, (own for _, (own, _) in of_group))
            at_steps = [values[np.searchsorted(own, steps)] for _, (own, values) in of_group]
            every = np.ma.masked_invalid(np.stack(at_steps))
            axes.plot(steps, every.mean(0), **line, **marker)
            low, high = every.min(0), every.max(0)
            axes.fill_between(steps, low, high, color=line["color"], alpha=0.15, lw=0)

    def _finish(self, axes: "Axes", title: str, curves: JobCurves, is_log: bool) -> None:
        """Set scale, title and labels; mark with a cross where a curve stopped being finite.

        Args:
            axes: with the curves.
            title: of the chart.
            curves: each job with its points.
            is_log: whether to scale logarithmically, if the values are positive and differ by
                more than MIN_LOG_RATIO.
        """
        finite_values = np.concatenate([values[np.isfinite(values)] for _, (_, values) in curves])
        if is_log and len(finite_values):
            least, greatest = finite_values.min(), finite_values.max()
            if least > 0 and greatest >= MIN_LOG_RATIO * least:
                axes.set_yscale("log")
                # Over many decades the numbers between the powers of ten would stand too close.
                multiples = (1, 2, 5) if greatest < 1000 * least else (1,)
                axes.locator_params(axis="y", subs=multiples)
                axes.yaxis.set_major_formatter("{x:g}")
                axes.minorticks_off()
        # At the upper edge: a value that is not finite has no height of its own.
        cross: dict[str, Any] = {"ms": 8, "clip_on": False, "zorder": 5}
        has_gap = False
        for job, (steps, values) in curves:
            for step in steps[~np.isfinite(values)][:1]:
                has_gap = True
                colour = self.line(job)["color"]
                top = axes.get_xaxis_transform()
                axes.plot(step, 0.97, "X", color=colour, transform=top, **cross)
        if has_gap:
            title += " (✖: first NaN or inf)"
        if self.joins_seeds:
            title += "\nmean and range over seeds"
        _set_title(axes, title)
        axes.set_xlabel("optimizer step")

    def loss_scale(self, curves: JobCurves, axes: "Axes") -> None:
        """Draw the loss scale, with a cross at each skipped step."""
        has_positive = False
        for job, (steps, scales) in curves:
            line = self.line(job)
            has_positive |= bool((scales > 0).any())
            # A scale holds until the step that changes it.
            axes.plot(steps, scales, **line, drawstyle="steps-post")
            for _, (flag_steps, flags) in _curves([job], "loss_scale/overflow"):
                overflows = flag_steps[flags > 0]
                overflows = overflows[:: math.ceil(len(overflows) / MAX_CROSSES) or 1]
                # The value of the curve at each overflow: the crosses are on the curve.
                heights = scales[np.searchsorted(steps[1:], overflows, "right")]
                axes.plot(overflows, heights, "x", color=line["color"], ms=4, mew=0.9)
        if has_positive:
            axes.set_yscale("log", base=2)
        _set_title(axes, "loss scale (×: overflow, step skipped)")
        axes.set_xlabel("optimizer step")


def _has_line(curves: JobCurves) -> bool:
    """Return whether any curve has more than one step: a lone dot shows no course."""
    return any(len(steps) > 1 for _, (steps, _) in curves)


def _set_title(axes: "Axes", text: str, side: Literal["left", "right"] = "left") -> None:
    # Without a height matplotlib measures every tick label once more, to make room for a factor
    # above a linear axis.
    height = None if axes.get_yscale() == "linear" else 1.0
    axes.set_title(text, loc=side, y=height, parse_math=False)
