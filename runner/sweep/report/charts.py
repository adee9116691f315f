"""Draw a sweep's charts: loss and quality over the steps, loss scales, speed against quality.

matplotlib is imported inside the functions, so that a report without charts does not need it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.sweep.report.compare import (
    BASELINE,
    Comparison,
    compare_with_baselines,
    group_name,
    pareto_front,
)
from runner.sweep.report.downsample import (
    ENVELOPE_BUCKETS,
    MEAN_BUCKETS,
    Points,
    bucket_means,
    curve_points,
    envelope,
)
from runner.sweep.report.jobs import Job, SweepData
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.plots import FONT, plain_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = tuple[str, Any]
DrawPanel = Callable[["Axes | None", Sequence[Job], Mapping[str, Style]], bool]
"""Draw into the axes and return whether there was something to draw; with None only the latter."""
GROUP_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette for every kind of colour vision, without its yellow, which is invisible
on white; black is for 32-true."""
DASH_PATTERNS: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
CHART_WIDTH_INCHES, CHART_HEIGHT_INCHES = 5.4, 3.3
"""Inches of one chart."""
MAX_WIDE_LINES = 8
MAX_MARKED_POINTS = 40
LEGEND_WIDTH_INCHES = 1.8


def group_styles(names: Sequence[str]) -> dict[str, Style]:
    """Return colour and dash of each group: 24 pairs before one repeats; 32-true solid black."""
    found: dict[str, Style] = {}
    for name in dict.fromkeys(names):
        used = sum(colour != "black" for colour, _ in found.values())
        if name == BASELINE:
            found[name] = ("black", "solid")
        else:
            dash = DASH_PATTERNS[used // len(GROUP_COLOURS) % len(DASH_PATTERNS)]
            found[name] = (GROUP_COLOURS[used % len(GROUP_COLOURS)], dash)
    return found


@dataclass(frozen=True)
class LegendEntry:
    """A line of the legend: name, colour, and lengths of dashes and gaps in line widths."""

    name: str
    colour: str
    dashes: tuple[float, ...]


def legend_entries(data: SweepData) -> list[LegendEntry]:
    """Return the legend of every group that the charts show, in order."""
    jobs = _trained_jobs(data)
    style_of = group_styles([_job_group_name(job) for job in jobs])
    shown = dict.fromkeys(_job_group_name(job) for job in jobs if job.curves or _is_timed(job))
    entries = []
    for name in shown:
        colour, dash = style_of[name]
        entries.append(LegendEntry(name, colour, () if dash == "solid" else dash[1]))
    return entries


def chart_figures(data: SweepData) -> "list[Figure]":
    """Return each chart as a figure without a legend.

    Training loss, quality, loss scale, speed against quality: those with something to draw, none
    if nothing was trained.
    """
    return [_figure(data, [panel], has_legend=False) for panel in _drawable_panels(data)]


def overview_figure(data: SweepData) -> "Figure | None":
    """Return all charts in one figure with a legend at the right, None without any chart."""
    drawable = _drawable_panels(data)
    return _figure(data, drawable, has_legend=True) if drawable else None


def _trained_jobs(data: SweepData) -> list[Job]:
    return [job for job in data.jobs if not job.result.trained_in]


def _drawable_panels(data: SweepData) -> "list[DrawPanel]":
    every: list[DrawPanel] = [
        _draw_train_loss,
        _draw_quality,
        _draw_loss_scale,
        _draw_speed_and_quality,
    ]
    return [panel for panel in every if panel(None, _trained_jobs(data), {})]


def _figure(data: SweepData, drawn: "Sequence[DrawPanel]", has_legend: bool) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    jobs = _trained_jobs(data)
    style_of = group_styles([_job_group_name(job) for job in jobs])
    across = min(2, len(drawn))
    down = (len(drawn) + 1) // 2
    size = (
        CHART_WIDTH_INCHES * across + (LEGEND_WIDTH_INCHES if has_legend else 0),
        CHART_HEIGHT_INCHES * down,
    )
    with rc_context({"font.size": 9, "font.family": FONT, "text.usetex": False}):
        figure = Figure(figsize=size, layout="constrained")
        if has_legend:
            _draw_legend(figure, legend_entries(data))
        for i, panel in enumerate(drawn):
            axes = figure.add_subplot(down, across, i + 1)
            axes.grid(color="#e4e4e4", lw=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            panel(axes, jobs, style_of)
    return figure


def _draw_legend(figure: "Figure", entries: Sequence[LegendEntry]) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=e.colour, ls=(0, e.dashes) if e.dashes else "solid", lw=1.6)
        for e in entries
    ]
    drawn = figure.legend(
        lines,
        [plain_label(e.name) for e in entries],
        loc="outside right upper",
        frameon=False,
        fontsize=8 if len(entries) <= 12 else 7,
        handlelength=3,
    )
    for text in drawn.get_texts():
        text.set_parse_math(False)


def _job_group_name(job: Job) -> str:
    return group_name(job.result)


def _is_timed(job: Job) -> bool:
    return job.result.status == "finished" and bool(job.result.examples_per_second)


def _curves_with_points(jobs: Sequence[Job], *keys: str) -> Iterator[tuple[Job, Points]]:
    """Yield each job's first curve among the keys that has points; jobs without any are skipped."""
    for job in jobs:
        recorded = [job.curves[key] for key in keys if key in job.curves]
        curve = next((one for one in recorded if one.shape[-1]), None)
        if curve is not None:
            yield job, curve_points(curve)


def _line_width(jobs: Sequence[Job]) -> float:
    return 1.3 if len(jobs) <= MAX_WIDE_LINES else 0.9


def _draw_train_loss(
    axes: "Axes | None", jobs: Sequence[Job], style_of: Mapping[str, Style]
) -> bool:
    found = list(_curves_with_points(jobs, "train/loss"))
    if axes is None or not found:
        return bool(found)
    for job, (steps, values) in found:
        colour, dash = style_of[_job_group_name(job)]
        if len(steps) > 2 * MEAN_BUCKETS and len(found) <= MAX_WIDE_LINES:
            axes.plot(*envelope(steps, values), color=colour, lw=0.4, alpha=0.25)
        axes.plot(*bucket_means(steps, values), color=colour, ls=dash, lw=_line_width(jobs))
    title = "training loss"
    if any(len(steps) > 2 * MEAN_BUCKETS for _, (steps, _) in found):
        title += f" (means over 1/{MEAN_BUCKETS} of the run)"
    _finish_curve_axes(
        axes, title, [(style_of[_job_group_name(job)][0], p) for job, p in found], log=True
    )
    return True


def _draw_quality(axes: "Axes | None", jobs: Sequence[Job], style_of: Mapping[str, Style]) -> bool:
    names = {job.result.quality for job in jobs} - {""}
    key = names.pop() if len(names) == 1 else VAL_LOSS
    found = list(_curves_with_points(jobs, key)) or list(_curves_with_points(jobs, key := VAL_LOSS))
    if axes is None or not found:
        return bool(found)
    few = all(len(steps) <= MAX_MARKED_POINTS for _, (steps, _) in found)
    for job, (steps, values) in found:
        colour, dash = style_of[_job_group_name(job)]
        drawn = envelope(steps, values)
        axes.plot(
            *drawn, color=colour, ls=dash, lw=_line_width(jobs), marker="." if few else None, ms=4
        )
    log = key.endswith(("loss", "perplexity"))
    _finish_curve_axes(
        axes, plain_label(key), [(style_of[_job_group_name(job)][0], p) for job, p in found], log
    )
    return True


def _set_title(axes: "Axes", text: str) -> None:
    axes.set_title(text, fontsize=9, loc="left", parse_math=False)


def _finish_curve_axes(
    axes: "Axes", title: str, lines: Sequence[tuple[str, Points]], log: bool
) -> None:
    """Set scale, title and labels; mark with a cross where a curve stopped being finite."""
    values = np.concatenate([v[np.isfinite(v)] for _, (_, v) in lines])
    if log and len(values) and values.min() > 0:
        axes.set_yscale("log")
    # At the upper edge: a value that is not finite has no height of its own.
    top = axes.get_xaxis_transform()
    has_gap = False
    for colour, (steps, v) in lines:
        nonfinite = ~np.isfinite(v)
        if nonfinite.any():
            has_gap = True
            axes.plot(
                steps[nonfinite.argmax()],
                0.97,
                "X",
                color=colour,
                mec="white",
                mew=0.5,
                ms=8,
                transform=top,
                clip_on=False,
                zorder=5,
            )
    _set_title(axes, title + (" (✖: first NaN or inf)" if has_gap else ""))
    axes.set_xlabel("optimizer step")


def _draw_loss_scale(
    axes: "Axes | None", jobs: Sequence[Job], style_of: Mapping[str, Style]
) -> bool:
    found = list(_curves_with_points(jobs, "loss_scale/value", "loss_scale/changes"))
    if axes is None or not found:
        return bool(found)
    has_positive = False
    for job, (steps, values) in found:
        colour, dash = style_of[_job_group_name(job)]
        x, y = envelope(steps, values)
        has_positive = has_positive or bool((y > 0).any())
        axes.plot(x, y, color=colour, ls=dash, lw=1.1, drawstyle="steps-post")
        for _, (flag_steps, flags) in _curves_with_points([job], "loss_scale/overflow"):
            overflows = flag_steps[flags > 0]
            overflows = overflows[:: max(1, math.ceil(len(overflows) / ENVELOPE_BUCKETS))]
            height = values[np.searchsorted(steps[1:], overflows, "right")]
            axes.plot(overflows, height, "x", color=colour, ms=4, mew=0.9)
    if has_positive:
        axes.set_yscale("log", base=2)
    _set_title(axes, "loss scale (×: overflow, step skipped)")
    axes.set_xlabel("optimizer step")
    return True


def _draw_speed_and_quality(
    axes: "Axes | None", jobs: Sequence[Job], style_of: Mapping[str, Style]
) -> bool:
    compared = compare_with_baselines([job.result for job in jobs])
    found = [c for c in compared if c.group.speed and c.group.quality]
    if axes is None or len(found) < 2:
        return len(found) >= 2
    is_ratio = all(c.speed_ratio for c in found)
    most = max(c.group.memory_mib or 0 for c in found)
    spots = [_speed_and_quality(c, is_ratio) for c in found]
    for c, (x, y) in zip(found, spots, strict=True):
        colour = style_of[c.group.name][0]
        assert c.group.quality is not None
        size = max(15, 260 * (c.group.memory_mib or 0) / most) if most else 60
        axes.errorbar(x, y, yerr=c.group.quality.sd, color=colour, lw=1, capsize=3, fmt="none")
        axes.scatter([x], [y], s=size, color=colour, alpha=0.55, ec="white", zorder=3)
    front = sorted(_speed_and_quality(c, is_ratio) for c in pareto_front(found))
    if len({c.group.device for c in found}) == 1 and len(front) > 1:
        axes.plot(*zip(*front, strict=True), color="#888888", lw=0.8, ls="--", zorder=1)
    axes.margins(0.18)
    labels = [plain_label(c.group.name, 26) for c in found]
    _label_points(axes, list(zip(labels, spots, strict=True)))
    axes.set_xlabel(f"speed × {BASELINE}" if is_ratio else "examples/s")
    quality = plain_label(found[0].group.jobs[0].quality)
    _set_title(axes, f"{quality} against speed (area: memory; dashed: Pareto front)")
    return True


def _speed_and_quality(c: Comparison, is_ratio: bool) -> tuple[float, float]:
    """Return speed (over 32-true's if is_ratio, else in examples/s) and quality of a group."""
    assert c.group.speed is not None
    assert c.group.quality is not None
    speed = c.speed_ratio.value if is_ratio and c.speed_ratio else c.group.speed.mean
    return speed, c.group.quality.mean


def _label_points(axes: "Axes", named: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Write each name where it covers neither a point nor another name.

    Without such a place a name is left out: the legend has the colours.
    """
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    assert figure is not None
    # The layout decides where the points are.
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    centres = [axes.transData.transform(spot) for _, spot in named]
    taken = [
        Bbox.from_bounds(x - 6 * scale, y - 6 * scale, 12 * scale, 12 * scale) for x, y in centres
    ]
    # Sides (right, left) and rises in points, in order of preference.
    places = [(1, 0), (-1, 0), (0, 13), (0, -13), (1, 12), (-1, 12), (1, -12), (-1, -12)]
    for (text, spot), (x, y) in zip(named, centres, strict=True):
        width, height = 4.6 * len(text) * scale, 9 * scale
        for side, rise in places:
            left = x + 11 * side * scale - width * (1 - side) / 2
            box = Bbox.from_bounds(left, y + rise * scale - height / 2, width, height)
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 + 6 * scale
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                axes.annotate(
                    text,
                    spot,
                    (11 * side, rise),
                    textcoords="offset points",
                    fontsize=7.5,
                    ha=("right", "center", "left")[side + 1],
                    va="center",
                    parse_math=False,
                    bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.6},
                )
                break
