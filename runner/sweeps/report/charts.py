"""Draw a sweep's charts: differences to the baseline, loss and quality over the steps, loss scales.

A group of seeds is one line, the mean of its smoothed curves, in a band from the least to the
greatest of them.

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
from runner.output.plots import CHART_WIDTH_INCHES, INK, chart_style, plain_label
from runner.sweeps.report.sweep_data import Job, SweepData
from runner.sweeps.report.wording import format_interval, join_names
from runner.sweeps.verdict.compare import BASELINE, group_name
from runner.sweeps.verdict.ranking import jobs_of
from runner.tracking.history import Points, curve_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 200
"""Points of a smoothed curve."""
WINDOW_SHARE = 0.02
"""Share of a curve's steps over which each of its points is a mean."""
JobCurves = Sequence[tuple[Job, Points]]
Chart = tuple[float, Callable[["Axes"], str]]
"""Height in inches, and what draws the chart and returns in a sentence what it shows."""
Interval = tuple[str, str, float, float]
"""Name, colour, mean difference of the loss to the baseline's, and half-width of its interval,
which is infinite with one seed."""
Scale = Literal["linear", "log", "difference"]
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
LEGEND_CHARS = 52
MIN_LOG_RATIO = 3
"""Greatest value over the least below which an axis is linear: a logarithmic one has a tick at 1, 2
and 5 times each power of ten."""
MAX_LINEAR_RATIO = 20
"""Greatest difference to the baseline over the median one above which their axis is logarithmic."""
MAX_MARKED_POINTS = 40
"""Curves of no more points, such as evaluations, get a dot at each point."""


def mean_curves(curves: Sequence[Points]) -> Points:
    """Return the running means of several curves at the steps of any of them.

    Each is the mean over the finite values of WINDOW_SHARE of the steps; NaN without any.

    Returns:
        Steps, shape [at most MAX_POINTS], and means, shape [curves, steps].
    """
    steps = reduce(np.union1d, (own for own, _ in curves))
    values = np.full((len(curves), len(steps)), np.nan)
    for row, (own, recorded) in zip(values, curves, strict=True):
        row[np.searchsorted(steps, own)] = recorded
    half = _half_window(steps)
    padded = np.pad(values, ((0, 0), (half, half)), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1, axis=1)
    centres = np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).astype(int)
    means = np.ma.masked_invalid(windows[:, centres]).mean(-1)
    return steps[centres], np.ma.filled(means, np.nan)


def _half_window(steps: NDArray[np.float64]) -> int:
    """Return how many steps before and after a step its running mean takes."""
    return int(len(steps) * WINDOW_SHARE / 2)


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


def chart_figures(data: SweepData) -> "list[Figure]":
    """Return each chart as a figure, whose label says what it shows.

    Legend, difference to the baseline, training loss, its difference to the baseline's by step,
    quality, loss scale: those with something to draw, none if nothing was trained.
    """
    return [_figure([chart]) for chart in _Charts(data).drawable()]


def overview_figure(data: SweepData) -> "Figure | None":
    """Return all charts in one figure, None without any chart."""
    drawable = _Charts(data).drawable()
    return _figure(drawable) if drawable else None


def _figure(drawn: Sequence[Chart]) -> "Figure":
    from matplotlib.figure import Figure

    across = min(2, len(drawn))
    # The height of a row is that of its highest chart.
    heights = [max(inches for inches, _ in drawn[i : i + 2]) for i in range(0, len(drawn), 2)]
    with chart_style():
        size = (CHART_WIDTH_INCHES * across, sum(heights))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
        findings = [
            draw(figure.add_subplot(grid[divmod(i, across)])) for i, (_, draw) in enumerate(drawn)
        ]
    figure.set_label(" ".join(findings))
    return figure


def _curves(jobs: Sequence[Job], key: str) -> JobCurves:
    """Return the curve of each job that has points of a metric."""
    recorded = [(job, job.curves[key]) for job in jobs if key in job.curves]
    return [(job, curve_points(curve)) for job, curve in recorded if curve.size]


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
        order = [*self.style_of]
        # Without the search of mode=advise for remedies, and group by group: the narrow curves of
        # the last ones are above the wide ones.
        by_name = fmt.grouped((group_name(job.result), job) for job in data.jobs)
        # A recorded baseline has no job here.
        self.jobs = [job for name in order for job in by_name.get(name, ())]

    def drawable(self) -> list[Chart]:
        """Return the charts with something to draw."""
        losses = _curves(self.jobs, "train/loss")
        differences = self.paired_differences(losses)
        courses: list[tuple[str, JobCurves, Scale]] = [
            ("training loss", losses, "log"),
            (f"training loss minus that of {self.baseline}", differences, "difference"),
        ]
        # The quality that all jobs share, else the validation loss.
        names = {job.result.quality for job in self.jobs} - {""}
        keys = [*names, metric_names.VAL_LOSS] if len(names) == 1 else [metric_names.VAL_LOSS]
        for key in keys:
            qualities = _curves(self.jobs, key)
            if _has_line(qualities):
                is_loss = key.endswith(("loss", "perplexity"))
                courses.append((plain_label(key), qualities, "log" if is_loss else "linear"))
                break
        scales = _curves(self.jobs, "loss_scale/value")
        # The table of jobs has a scale that stays.
        if any(len(np.unique(values)) > 1 for _, (_, values) in scales):
            courses.append(("loss scale", scales, "log"))
        courses = [course for course in courses if _has_line(course[1])]
        shown = dict.fromkeys(group_name(job.result) for _, each, _ in courses for job, _ in each)
        charts: list[Chart] = []
        if shown:
            # A line and the space around it are as wide as ten characters.
            across = max(1, LEGEND_CHARS // (10 + max(map(len, shown))))
            height = 0.2 + ROW_HEIGHT_INCHES * math.ceil(len(shown) / across)
            charts.append((height, partial(self.legend, [*shown], across)))
        intervals = self.intervals()
        if intervals:
            height = 1.2 + ROW_HEIGHT_INCHES * len(intervals)
            charts.append((height, partial(self.difference, intervals)))
        charts += [(CHART_HEIGHT_INCHES, partial(self.course, *course)) for course in courses]
        return charts

    def legend(self, names: Sequence[str], across: int, axes: "Axes") -> str:
        """Draw the line of each group beside its name."""
        for name in names:
            colour, dash = self.style_of[name]
            axes.plot([], [], color=colour, ls=DASH_PATTERNS[dash], label=plain_label(name))
        axes.set_axis_off()
        box = axes.legend(loc="upper left", ncols=across, frameon=False, handlelength=3)
        # A dollar sign in a name would begin a formula.
        for text in box.get_texts():
            text.set_parse_math(False)
        return f"Lines: {', '.join(names)}."

    def paired_differences(self, curves: JobCurves) -> JobCurves:
        """Return each job's curve minus the one of its baseline on the same seed and device."""

        def key(name: str, job: Job) -> tuple[object, ...]:
            return name, job.result.seed, job.result.device

        compared = [c for c in self.judged if c.baseline and not c.is_baseline]
        baselines = {c.group.name: c.baseline.name for c in compared if c.baseline}
        points = {key(group_name(job.result), job): own for job, own in curves}
        pairs = []
        for job, (steps, values) in curves:
            base = points.get(key(baselines.get(group_name(job.result), ""), job))
            if base:
                shared, own, other = np.intersect1d(steps, base[0], True, True)
                with np.errstate(invalid="ignore"):
                    pairs.append((job, (shared, values[own] - base[1][other])))
        return pairs

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

    def difference(self, intervals: Sequence[Interval], axes: "Axes") -> str:
        """Draw each mean difference to the baseline with its interval, one below the other."""
        job = next(c for c in self.judged if c.difference).group.jobs[0]
        metric, direction, sign = job.quality, job.direction, 1
        notes = "bars: 95 % interval"
        tolerated = math.nan
        if self.advice:
            settings = self.advice.request
            metric, direction, sign = settings.metric, settings.direction, settings.sign
            notes = "bars: interval of the test"
            losses = self.advice.baseline_losses
            tolerated = settings.accepted.certain_gap(self.advice.baseline_spread, len(losses))
        axes.axvline(0, color=INK, lw=1)
        shown = []
        ends = []
        for row, (name, colour, value, half_width) in enumerate(intervals):
            error = half_width if math.isfinite(half_width) else None
            axes.errorbar(sign * value, row, xerr=error, color=colour, fmt="o", ms=5, capsize=3)
            shown.append(f"{name} {format_interval(sign * value, error or 0.0, '+')}")
            ends.append(abs(value) + (error or 0.0))
        names, _, _, half_widths = zip(*intervals, strict=True)
        known = [*map(math.isfinite, half_widths)]
        if not all(known):
            notes = f"{notes}; one seed has none" if any(known) else "one seed: no interval"
        notes += _scale_differences(axes, "x", ends)
        if math.isfinite(tolerated):
            axes.axvline(sign * tolerated, color=INK, lw=0.6)
            low, high = axes.get_xlim()
            # The test is one-sided: what is better by any amount is tolerated.
            axes.axvspan(low if sign > 0 else high, sign * tolerated, color=INK, alpha=0.12, lw=0)
            axes.set_xlim(low, high)
            notes += "; shaded: tolerated"
        axes.set_yticks(range(len(names)), [*map(plain_label, names)], parse_math=False)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel("lower is better" if direction == "min" else "higher is better")
        title = f"{metric} minus that of {self.baseline}"
        axes.set_title(f"{title}\n{notes}", loc="right", parse_math=False)
        return f"{title}: {join_names(shown)}."

    def course(self, title: str, curves: JobCurves, scale: Scale, axes: "Axes") -> str:
        """Draw the mean and the range over seeds of each group's curves."""
        by_group = fmt.grouped((group_name(job.result), points) for job, points in curves)
        shown = []
        sizes = []
        for name, of_group in by_group.items():
            colour, dash = self.style_of[name]
            steps, smoothed = mean_curves(of_group)
            every = np.ma.masked_invalid(smoothed)
            means = every.mean(0)
            marker = "." if len(steps) <= MAX_MARKED_POINTS else ""
            axes.plot(steps, means, color=colour, ls=DASH_PATTERNS[dash], lw=1.4, marker=marker)
            if len(of_group) > 1:
                axes.fill_between(steps, every.min(0), every.max(0), color=colour, alpha=0.15, lw=0)
            if means.count():
                known = means.compressed()
                sizes.append(float(abs(known).max()))
                shown.append(f"{name} {fmt.format_number(known[-1])}")
        values = np.concatenate([points[1] for _, points in curves])
        if scale == "difference":
            axes.axhline(0, color=INK, lw=1, zorder=1)
            _scale_differences(axes, "y", sizes)
        elif scale == "log":
            _scale_losses(axes, values[np.isfinite(values)])
        notes = []
        if len(by_group) < len(curves):
            notes.append("band: range of seeds")
        if any(_half_window(steps) for _, (steps, _) in curves):
            notes.append(f"smoothed over {WINDOW_SHARE:.0%} of steps".replace("%", " %"))
        whole = "\n".join(filter(None, [title, "; ".join(notes)]))
        axes.set_title(whole, loc="left", parse_math=False)
        axes.set_xlabel("optimizer step")
        return f"{title} by step, at the end: {join_names(shown)}."


def _scale_losses(axes: "Axes", values: NDArray[np.float64]) -> None:
    """Scale the axis of finite losses logarithmically, if they are positive and differ by more than
    MIN_LOG_RATIO."""
    least, greatest = values.min(initial=math.inf), values.max(initial=0.0)
    if least > 0 and greatest >= MIN_LOG_RATIO * least:
        axes.set_yscale("log")
        # Over many decades the numbers between the powers of ten would stand too close.
        multiples = (1, 2, 5) if greatest < 1000 * least else (1,)
        axes.locator_params(axis="y", subs=multiples)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()


def _scale_differences(axes: "Axes", which: Literal["x", "y"], sizes: Sequence[float]) -> str:
    """Scale an axis of differences, logarithmically where one would press the others together.

    Args:
        axes: that have the axis.
        which: of the two axes.
        sizes: the largest magnitude of each group, finite.

    Returns:
        A note for the title; empty for a linear axis.
    """
    # A group that differs by nothing says nothing of the scale.
    some = [size for size in sizes if size]
    typical = statistics.median(some) if some else math.inf
    if max(sizes, default=0.0) <= MAX_LINEAR_RATIO * typical:
        axes.locator_params(axis=which, nbins=5)
        return ""
    threshold = 10.0 ** math.ceil(math.log10(typical))
    set_scale = {"x": axes.set_xscale, "y": axes.set_yscale}[which]
    set_scale("symlog", linthresh=threshold)
    getattr(axes, f"{which}axis").set_major_formatter("{x:g}")
    return f"; logarithmic beyond ±{threshold:g}"


def _has_line(curves: JobCurves) -> bool:
    """Return whether any curve has more than one step: a lone dot shows no course."""
    return any(len(steps) > 1 for _, (steps, _) in curves)
