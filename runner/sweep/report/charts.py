"""Charts of a sweep: loss and quality over the steps, loss scales, speed against quality."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.sweep.report.compare import BASE, Comparison, compare, pareto_front
from runner.sweep.report.downsample import BUCKETS, MEANS, Points, downsample, envelope, means
from runner.sweep.report.jobs import Job, SweepData
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.plots import FONT, plain_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = tuple[str, Any]
Panel = Callable[["Axes | None", Sequence[Job], Mapping[str, Style]], bool]
"""Draws into the axes; without any it says whether it has something to draw."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette for every kind of colour vision, without its yellow, which white
swallows; black is for 32-true."""
DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
WIDTH, HEIGHT = 5.4, 3.3


def styles(names: Sequence[str]) -> dict[str, Style]:
    """Colour and dash of each group: 24 pairs before one repeats; 32-true in solid black."""
    found: dict[str, Style] = {}
    for name in dict.fromkeys(names):
        i = sum(colour != "black" for colour, _ in found.values())
        mine = ("black", "solid")
        if name != BASE:
            mine = (COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)])
        found[name] = mine
    return found


@dataclass(frozen=True)
class LegendEntry:
    """A line of the legend: name, colour, and lengths of dashes and gaps in line widths."""

    name: str
    colour: str
    dashes: tuple[float, ...]


def legend(data: SweepData) -> list[LegendEntry]:
    """Of every group that the charts show, in order."""
    jobs = _trained(data)
    look = styles([_name(job) for job in jobs])
    shown = dict.fromkeys(_name(job) for job in jobs if job.curves or _timed(job))
    return [
        LegendEntry(n, look[n][0], () if look[n][1] == "solid" else look[n][1][1]) for n in shown
    ]


def panels(data: SweepData) -> "list[Figure]":
    """Each chart as a figure without a legend: training loss, quality, loss scale, speed against
    quality; those that there is something for, none where nothing was trained."""
    return [_figure(data, [panel], named=False) for panel in _wanted(data)]


def overview(data: SweepData) -> "Figure | None":
    """All of them in one picture with the legend beside; None where there is nothing to draw."""
    wanted = _wanted(data)
    return _figure(data, wanted, named=True) if wanted else None


def _trained(data: SweepData) -> list[Job]:
    return [job for job in data.jobs if not job.result.trained_in]


def _wanted(data: SweepData) -> "list[Panel]":
    every: list[Panel] = [_train_loss, _quality, _scale, _trade]
    return [panel for panel in every if panel(None, _trained(data), {})]


def _figure(data: SweepData, wanted: "Sequence[Panel]", named: bool) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    jobs = _trained(data)
    look = styles([_name(job) for job in jobs])
    across, down = min(2, len(wanted)), (len(wanted) + 1) // 2
    size = (WIDTH * across + (1.8 if named else 0), HEIGHT * down)
    with rc_context({"font.size": 9, "font.family": FONT, "text.usetex": False}):
        figure = Figure(figsize=size, layout="constrained")
        if named:
            _legend(figure, legend(data))
        for i, panel in enumerate(wanted):
            axes = figure.add_subplot(down, across, i + 1)
            axes.grid(color="#e4e4e4", lw=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            panel(axes, jobs, look)
    return figure


def _legend(figure: "Figure", entries: Sequence[LegendEntry]) -> None:
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


def _name(job: Job) -> str:
    return job.result.group or job.result.label


def _timed(job: Job) -> bool:
    return job.result.status == "finished" and bool(job.result.examples_per_second)


def _curves(jobs: Sequence[Job], *keys: str) -> Iterator[tuple[Job, Points]]:
    for job in jobs:  # of each the first of these that it has
        found = [job.curves[key] for key in keys if key in job.curves]
        if kept := [curve for curve in found if curve.shape[-1]]:
            yield job, downsample(kept[0])


def _thin(jobs: Sequence[Job]) -> float:
    """Many lines are drawn finer."""
    return 1.3 if len(jobs) <= 8 else 0.9


def _train_loss(axes: "Axes | None", jobs: Sequence[Job], look: Mapping[str, Style]) -> bool:
    found = list(_curves(jobs, "train/loss"))
    if axes is None or not found:
        return bool(found)
    for job, (steps, values) in found:
        colour, dash = look[_name(job)]
        if len(steps) > 2 * MEANS and len(found) <= 8:
            axes.plot(*envelope(steps, values), color=colour, lw=0.4, alpha=0.25)
        axes.plot(*means(steps, values), color=colour, ls=dash, lw=_thin(jobs))
    title = "training loss"
    if any(len(steps) > 2 * MEANS for _, (steps, _) in found):
        title += f" (means over 1/{MEANS} of the run)"
    _finish(axes, title, [(look[_name(job)][0], p) for job, p in found], log=True)
    return True


def _quality(axes: "Axes | None", jobs: Sequence[Job], look: Mapping[str, Style]) -> bool:
    names = {job.result.quality for job in jobs} - {""}
    key = names.pop() if len(names) == 1 else VAL_LOSS
    found = list(_curves(jobs, key)) or list(_curves(jobs, key := VAL_LOSS))
    if axes is None or not found:
        return bool(found)
    few = all(len(steps) <= 40 for _, (steps, _) in found)
    for job, (steps, values) in found:
        colour, dash = look[_name(job)]
        drawn = envelope(steps, values)
        axes.plot(*drawn, color=colour, ls=dash, lw=_thin(jobs), marker="." if few else None, ms=4)
    log = key.endswith(("loss", "perplexity"))
    _finish(axes, plain_label(key), [(look[_name(job)][0], p) for job, p in found], log)
    return True


def _title(axes: "Axes", text: str) -> None:
    axes.set_title(text, fontsize=9, loc="left", parse_math=False)


def _finish(axes: "Axes", title: str, found: Sequence[tuple[str, Points]], log: bool) -> None:
    """Axes, and a cross at the upper edge where a curve stopped being finite."""
    values = np.concatenate([v[np.isfinite(v)] for _, (_, v) in found])
    if log and len(values) and values.min() > 0:
        axes.set_yscale("log")
    top = axes.get_xaxis_transform()
    lost = False
    for colour, (steps, v) in found:
        gone = ~np.isfinite(v)
        if gone.any():
            lost = True
            axes.plot(
                steps[gone.argmax()],
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
    _title(axes, title + (" (✖: first NaN or inf)" if lost else ""))
    axes.set_xlabel("optimizer step")


def _scale(axes: "Axes | None", jobs: Sequence[Job], look: Mapping[str, Style]) -> bool:
    found = list(_curves(jobs, "loss_scale/value", "loss_scale/changes"))
    if axes is None or not found:
        return bool(found)
    positive = False
    for job, (steps, values) in found:
        colour, dash = look[_name(job)]
        x, y = envelope(steps, values)
        positive = positive or bool((y > 0).any())
        axes.plot(x, y, color=colour, ls=dash, lw=1.1, drawstyle="steps-post")
        for _, (at, flags) in _curves([job], "loss_scale/overflow"):
            hit = at[flags > 0]
            hit = hit[:: max(1, math.ceil(len(hit) / BUCKETS))]
            height = values[np.searchsorted(steps[1:], hit, "right")]
            axes.plot(hit, height, "x", color=colour, ms=4, mew=0.9)
    if positive:
        axes.set_yscale("log", base=2)
    _title(axes, "loss scale (×: overflow, step skipped)")
    axes.set_xlabel("optimizer step")
    return True


def _trade(axes: "Axes | None", jobs: Sequence[Job], look: Mapping[str, Style]) -> bool:
    compared = compare([job.result for job in jobs])
    found = [c for c in compared if c.group.speed and c.group.quality]
    if axes is None or len(found) < 2:
        return len(found) >= 2
    ratio = all(c.speed for c in found)
    most = max(c.group.memory_mib or 0 for c in found)
    spots = [_spot(c, ratio) for c in found]
    for c, (x, y) in zip(found, spots, strict=True):
        colour = look[c.group.name][0]
        assert c.group.quality is not None
        size = max(15, 260 * (c.group.memory_mib or 0) / most) if most else 60
        axes.errorbar(x, y, yerr=c.group.quality.sd, color=colour, lw=1, capsize=3, fmt="none")
        axes.scatter([x], [y], s=size, color=colour, alpha=0.55, ec="white", zorder=3)
    front = sorted(_spot(c, ratio) for c in pareto_front(found))
    if len({c.group.device for c in found}) == 1 and len(front) > 1:
        axes.plot(*zip(*front, strict=True), color="#888888", lw=0.8, ls="--", zorder=1)
    axes.margins(0.18)
    _label(
        axes, [(plain_label(c.group.name, 26), spot) for c, spot in zip(found, spots, strict=True)]
    )
    axes.set_xlabel(f"speed × {BASE}" if ratio else "examples/s")
    quality = plain_label(found[0].group.jobs[0].quality)
    _title(axes, f"{quality} against speed (area: memory; dashed: Pareto front)")
    return True


def _spot(c: Comparison, ratio: bool) -> tuple[float, float]:
    assert c.group.speed is not None
    assert c.group.quality is not None
    speed = c.speed.value if ratio and c.speed else c.group.speed.mean
    return speed, c.group.quality.mean


def _label(axes: "Axes", named: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Each name where it covers neither a point nor another name; none where there is no room,
    for the legend has the colours."""
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # the layout decides where the points are
    scale = figure.dpi / 72
    at = [axes.transData.transform(spot) for _, spot in named]
    taken = [Bbox.from_bounds(x - 6 * scale, y - 6 * scale, 12 * scale, 12 * scale) for x, y in at]
    spare = [(1, 0), (-1, 0), (0, 13), (0, -13), (1, 12), (-1, 12), (1, -12), (-1, -12)]
    for (text, spot), (x, y) in zip(named, at, strict=True):
        width, height = 4.6 * len(text) * scale, 9 * scale
        for side, rise in spare:
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
