"""What looks found, as a page and as heat maps of modules over steps."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runner.diagnostics.numerics.loss_scales import FIRST, OTHERS, loss_scales, suitable_range
from runner.diagnostics.numerics.results import (
    KINDS,
    NEGLIGIBLE,
    NOISE,
    SWALLOWED,
    VANISHED,
    Numerics,
    Sensitivity,
    TensorStats,
)
from runner.precision.emulation.formats import FORMATS
from runner.utils.markup import Block, Cell, Charts, Heading, Items, Table, Text, Tone, to_html
from runner.utils.plots import FONT, plain_label, svg_element

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, LogNorm
    from matplotlib.figure import Figure

ROWS, COLUMNS = 40, 40
"""Modules and steps that a heat map shows at most."""
WORST, ALL = 12, 10**9
LEAST = 1e-5
"""Share from which on a cell is coloured."""
LACKS: dict[Sensitivity, str] = {
    "range": "lacks range",
    "precision": "lacks precision",
    "none": "would do",
}
TONES: dict[Sensitivity, Tone] = {"range": "bad", "precision": "bad", "none": "good"}


def numerics_summary(numerics: Numerics) -> str:
    """Return in one line what each format lacks."""
    return ", ".join(f"{fmt} {format_verdict(numerics, fmt)}" for fmt in FORMATS)


def format_verdict(numerics: Numerics, fmt: str) -> str:
    """Say in words what a format lacks. Gradients that a loss scale saves lack no range; updates
    that are swallowed matter to who stores weights in the format alone."""
    scaled = fmt == "float16" and suitable_range(numerics) is not None
    does = "would do with a loss scale" if scaled else "would do"
    kinds = OTHERS if scaled else KINDS
    found, reasons = numerics.sensitivity(fmt, kinds), numerics.reasons(fmt, kinds)
    if found == "precision" and all(what != "noise" for *_, what, _ in reasons):
        return f"{does}, but not to store weights in"
    return does if found == "none" else LACKS[found]


def write_page(numerics: Numerics, label: str, path: Path) -> Path:
    """Write the report as a page, the run's own format first. Raises OSError: it cannot be
    written."""
    own = numerics.computed_in
    order = [own, *(fmt for fmt in FORMATS if fmt != own)]
    blocks: list[Block] = [*_top(numerics, order)]
    for fmt in order:
        blocks += [
            Heading(fmt),
            Charts([svg_element(heat_maps(numerics, fmt))]),
            _worst(numerics, fmt),
        ]
    path.write_text(to_html(f"Numerics of {label}", [*blocks, *_reading(numerics)]))
    return path


def draw_heat_maps(numerics: Numerics, path: Path) -> Path:
    """Draw the heat maps of the run's own compute format. Raises OSError: it cannot be written."""
    heat_maps(numerics, numerics.computed_in).savefig(path, dpi=110)
    return path


def format_share(value: float) -> str:
    """In percent."""
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:.0f} %"


def _top(numerics: Numerics, order: Sequence[str]) -> Iterator[Block]:
    steps = [look.step for look in numerics.looks]
    yield Text(
        f"precision={numerics.precision}, stores {numerics.storage}, computes {numerics.compute} · "
        f"{len(steps)} looks, steps {steps[0]} to {steps[-1]}",
        "small",
    )
    yield Text(f"{numerics_summary(numerics)}.", "answer")
    yield Text(loss_scale_sentence(numerics), "small")
    rows = []
    for fmt in order:
        worst = [Cell("nothing is lost", "quiet")]
        for module, kind, what, value in (numerics.reasons(fmt) or numerics.worst(fmt, ALL))[:1]:
            worst = [Cell(module, note=kind), Cell(what), Cell(format_share(value))]
        worst += [Cell("")] * (3 - len(worst))
        text = format_verdict(numerics, fmt)
        good = text == "would do with a loss scale"
        tone = "good" if good else TONES[numerics.sensitivity(fmt)]
        rows.append([Cell(fmt), Cell(text, tone), *worst])
    head = ["format", "verdict", "worst module", "what", "share"]
    yield Table(head, rows, frozenset({0, 1, 2, 3}))


def loss_scale_sentence(numerics: Numerics) -> str:
    """Say what a loss scale does to float16's gradients: the one in force, and any other."""
    force = _in_force(numerics) or "none"
    lacks = numerics.sensitivity("float16", ["gradients"])
    fate = "do not fit" if lacks == "range" else "fit"
    begun = f"Gradients in float16: with the loss scale in force ({force}) they {fate}."
    found = loss_scales(numerics)
    if found is None:
        return f"{begun} No loss scale makes all of them fit."
    least, greatest = found
    text = f"{begun} Loss scales from {least:g} to {greatest:g} make them fit"
    if greatest < FIRST:
        skipped = round(math.log2(FIRST / greatest))
        return (
            f"{text}; 16-mixed begins with {FIRST:g} and skips up to {skipped} steps to get there."
        )
    if least > FIRST:
        typed = f"type precision.loss_scale.init_scale={least:g}"
        return f"{text}; 16-mixed begins with {FIRST:g}: {typed}."
    return f"{text}; 16-mixed begins with {FIRST:g}, which does."


def _in_force(numerics: Numerics) -> str:
    """Return the loss scales of the looks in words, empty where there was none."""
    scales = [look.loss_scale for look in numerics.looks if look.loss_scale is not None]
    if not scales:
        return ""
    low, high = min(scales), max(scales)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _worst(numerics: Numerics, fmt: str) -> Block:
    found = numerics.worst(fmt, WORST)
    if not found:
        return Text("Nothing is lost.", "small")
    rows = [
        [Cell(module), Cell(kind), Cell(what), Cell(format_share(value), bar=value)]
        for module, kind, what, value in found
    ]
    return Table(["worst module", "kind", "what", "share"], rows, frozenset({0, 1, 2}))


def _reading(numerics: Numerics) -> Iterator[Block]:
    scaled = _in_force(numerics) or "1, for the run has none"
    vanished, noise, swallowed = (
        format_share(VANISHED),
        format_share(NOISE),
        format_share(SWALLOWED),
    )
    yield Heading("How to read this")
    said = {
        "overflow, underflow": "shares of the values other than zero that are past the largest of "
        f"the format, that become zero and are at least 2^-{NEGLIGIBLE} of the largest of their "
        "module and kind (what is smaller is float32's own rounding error)",
        "swallowed": "share of the weights with a gradient that stay where they are, were they "
        "stored in the format",
        "noise": "energy of the rounding error over the energy of the values, of all tensors of "
        "a module and kind together",
        "lacks range": f"something overflows, {vanished} of a module's values become zero, or "
        f"values that become zero or subnormal make a noise of {noise} or more",
        "lacks precision": f"noise is {noise} or more otherwise, or {swallowed} of a module's "
        "updates are swallowed, which matters to who stores weights in the format alone",
        "would do with a loss scale": "only gradients lack range, and there are loss scales that "
        "make all of them fit",
        "gradients": f"before clipping, multiplied by the loss scale ({scaled})",
        "FP8": "after a scale per tensor to the largest value of the format",
        "heat maps": "underflow and overflow together, for updates what is swallowed; white is "
        f"less than {LEAST:g}. Tables hold means over the looks",
    }
    yield Items(list(said.items()), small=True)


def table_cells(numerics: Numerics, fmt: str, kind: str) -> tuple[list[str], NDArray[np.float64]]:
    """Modules in the model's order, and the share that each loses at each look, [modules, looks];
    NaN where it was not measured."""
    names = list(dict.fromkeys(m.module for look in numerics.looks for m in look.measured))
    found = np.full((len(names), len(numerics.looks)), np.nan)
    for column, look in enumerate(numerics.looks):
        for m in look.measured:
            if m.kind == kind:
                found[names.index(m.module), column] = _cell(numerics, fmt, m)
    return names, found


def _cell(numerics: Numerics, fmt: str, m: TensorStats) -> float:
    lost = numerics.lost(m, fmt)
    if m.kind == "updates":
        return np.nan if lost.swallowed is None else lost.swallowed
    return min(1.0, lost.vanishing + lost.overflow)


def heat_maps(numerics: Numerics, fmt: str) -> "Figure":
    """Draw a panel per kind: modules down, steps across, the share lost as colour."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    every = {kind: table_cells(numerics, fmt, kind) for kind in KINDS}
    names = every[KINDS[0]][0]
    shown = {kind: found for kind, (_, found) in every.items() if not np.isnan(found).all()}
    rows = _rows(list(shown.values()))
    groups = np.array_split(np.arange(len(numerics.looks)), min(COLUMNS, len(numerics.looks)))
    steps = [numerics.looks[group[-1]].step for group in groups]
    with rc_context({"font.size": 8, "font.family": FONT, "text.usetex": False}):
        figure = Figure(
            figsize=(2.6 + 2.4 * len(shown), 1.3 + 0.19 * len(rows)), layout="constrained"
        )
        for i, (kind, found) in enumerate(shown.items(), 1):
            axes = figure.add_subplot(1, len(shown), i)
            _panel(axes, np.stack([np.fmax.reduce(found[rows][:, g], axis=1) for g in groups], 1))
            axes.set_title(kind, fontsize=9)
            ticks = sorted({*range(0, len(steps), -(-len(steps) // 5))})
            axes.set_xticks(ticks, [str(steps[t]) for t in ticks])
            axes.set_xlabel("optimizer step")
            labels = [_label(names[r]) if i == 1 else "" for r in rows]
            axes.set_yticks(range(len(rows)), labels, parse_math=False)
        _colours(figure, fmt, len(rows), len(names))
    return figure


def _label(name: str, most: int = 34) -> str:
    """Return the end of a dotted name, which tells modules of one kind apart."""
    return plain_label(name if len(name) <= most else f"…{name[1 - most :]}", most)


def _rows(found: Sequence[NDArray[np.float64]]) -> list[int]:
    """Modules that have room, those that lose most, in the model's order."""
    most = np.sum([np.nan_to_num(f).max(axis=1) for f in found], axis=0)
    return sorted(np.argsort(-most, kind="stable")[:ROWS].tolist())


def _panel(axes: "Axes", found: NDArray[np.float64]) -> None:
    """Coloured squares; nothing is drawn where nothing is lost."""
    from matplotlib.collections import PolyCollection

    rows, columns = np.nonzero(found >= LEAST)
    corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
    squares = np.stack([columns, rows], 1)[:, None, :] + corners
    values = found[rows, columns]
    cmap, norm = _look()
    axes.add_collection(PolyCollection(list(squares), array=values, cmap=cmap, norm=norm))
    axes.set_xlim(-0.5, found.shape[1] - 0.5)
    axes.set_ylim(found.shape[0] - 0.5, -0.5)
    axes.tick_params(length=0)


def _look() -> tuple["Colormap", "LogNorm"]:
    """Of so few colours that matplotlib puts no bitmap into an SVG, which the page would refuse."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    return colormaps["viridis_r"].resampled(20), LogNorm(LEAST, 1.0)


def _colours(figure: "Figure", fmt: str, rows: int, names: int) -> None:
    from matplotlib.cm import ScalarMappable

    some = f", the {rows} of {names} modules that lose most" if rows < names else ""
    figure.suptitle(f"share of values that {fmt} loses{some}", fontsize=9)
    cmap, norm = _look()
    drawn = ScalarMappable(norm, cmap)
    figure.colorbar(drawn, ax=figure.axes, fraction=0.03, label="share", aspect=max(5, rows))
