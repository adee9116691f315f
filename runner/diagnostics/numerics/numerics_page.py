"""Show what was measured of a run's numbers as a page and as heat maps of modules over steps."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runner.core import fmt
from runner.diagnostics.numerics.results import (
    INITIAL_SCALE,
    KINDS,
    KINDS_WITHOUT_GRADIENTS,
    NEGLIGIBLE_EXPONENT_GAP,
    NOISE_SHARE_LIMIT,
    SWALLOWED_SHARE_LIMIT,
    VANISHING_SHARE_LIMIT,
    Complaint,
    Numerics,
    loss_scales,
    suitable_range,
)
from runner.output.markup import Block, Cell, Charts, Heading, Items, Table, Text, to_html
from runner.output.plots import CHART_WIDTH_INCHES, chart_style, module_label, svg_element
from runner.precision.emulation.formats import FORMATS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, LogNorm
    from matplotlib.figure import Figure

MAX_MAP_ROWS = 40
"""Modules that a heat map shows; of more, those that lose most."""
ROW_HEIGHT_INCHES = 0.18
MAX_MAP_STEPS = 40
"""Columns of a heat map; where there are more steps, a column has the worst of several."""
WORST_TABLE_ROWS = 12
MIN_COLOURED_SHARE = 1e-5
"""Least share that a cell is coloured for."""


def numerics_summary(numerics: Numerics) -> str:
    """Return what each format lacks, a line for each, and what was not judged."""
    return "\n".join(f"  {name}: {verdict}" for name, verdict in _verdicts(numerics))


def _verdicts(numerics: Numerics) -> Iterator[tuple[str, str]]:
    """Yield each format and its verdict, with the module that is the worst reason for it."""
    for name in FORMATS:
        verdict = format_verdict(numerics, name)
        # A format that would do has no reason, but may lose something all the same.
        for module, kind, what, value in (numerics.reasons(name) or numerics.worst(name))[:1]:
            verdict += f" (most: {fmt.format_share(value)} {what} in the {kind} of {module})"
        yield name, verdict
    for kind, names in numerics.unjudged().items():
        yield "not judged, for all are 0", f"{kind} of {fmt.first_names(names, 4)}"


def format_verdict(numerics: Numerics, name: str) -> str:
    """Return in words what a format lacks.

    Gradients that a loss scale saves lack no range; updates that are swallowed matter only where
    weights are stored in the format alone.
    """
    scaled = name == "float16" and suitable_range(numerics) is not None
    good = "would do with a loss scale" if scaled else "would do"
    kinds = KINDS_WITHOUT_GRADIENTS if scaled else KINDS
    lacks = numerics.sensitivity(name, kinds)
    reasons = numerics.reasons(name, kinds)
    if lacks == "precision" and all(what != "noise" for *_, what, _ in reasons):
        return f"{good}, but not to store weights in"
    return good if lacks == "none" else f"lacks {lacks}"


def write_page(numerics: Numerics, label: str, path: Path) -> Path:
    """Write the report as a page, the run's own format first.

    Raises:
        OSError: the file cannot be written.
    """
    own = numerics.computed_in
    order = [own, *(name for name in FORMATS if name != own)]
    steps = [snapshot.step for snapshot in numerics.probes]
    formats = f"stores {numerics.storage}, computes {numerics.compute}"
    looks = f"{len(steps)} looks, steps {steps[0]} to {steps[-1]}"
    blocks: list[Block] = [
        Text(f"precision={numerics.precision}, {formats} · {looks}", "small"),
        Items(list(_verdicts(numerics))),
        Text(loss_scale_sentence(numerics), "small"),
    ]
    for name in order:
        blocks.append(Heading(name))
        maps = [heat_maps(numerics, name, [kind]) for kind in KINDS]
        blocks.append(Charts([svg_element(figure) for figure in maps if figure.axes]))
        rows = [
            [
                Cell(module, note=note),
                Cell(kind),
                Cell(what),
                Cell(fmt.format_share(value), bar=value),
            ]
            for (module, kind, what, value), note in _worst_of_stacks(numerics.worst(name))
        ]
        head = ["worst module", "kind", "what", "share"]
        worst = Table(head, rows, frozenset({0, 1, 2}))
        blocks.append(worst if rows else Text("Nothing is lost.", "small"))
    blocks += [Heading("How to read this"), Items(_explanations(numerics), small=True)]
    path.write_text(to_html(f"Numerics of {label}", blocks))
    return path


def _worst_of_stacks(complaints: Sequence[Complaint]) -> list[tuple[Complaint, str]]:
    """Return the worst losses, the worst first; of the experts of a stack only the worst one, with
    a note on the others."""
    groups: dict[tuple[str, str, str], list[Complaint]] = {}
    for complaint in complaints:
        module, kind, what, _ = complaint
        groups.setdefault((_stack_of(module), kind, what), []).append(complaint)
    rows = []
    for group in list(groups.values())[:WORST_TABLE_ROWS]:
        least = fmt.format_share(group[-1][3])
        note = f"the most of {len(group)} experts, the least {least}" if len(group) > 1 else ""
        rows.append((group[0], note))
    return rows


def _stack_of(module: str) -> str:
    """Return the name of an expert's stack; of another module its own."""
    stack, bracket, _ = module.rpartition("[")
    return f"{stack}[…]" if bracket else module


def draw_heat_maps(numerics: Numerics, path: Path) -> Path:
    """Draw the heat maps of the run's own compute format into a file.

    Raises:
        OSError: the file cannot be written.
    """
    heat_maps(numerics, numerics.computed_in).savefig(path, dpi=110)
    return path


def loss_scale_sentence(numerics: Numerics) -> str:
    """Return what a loss scale does to float16's gradients: the one in force, and any other."""
    in_force = _scales_in_force(numerics) or "none"
    lacks = numerics.sensitivity("float16", ["gradients"])
    fit = "do not fit" if lacks == "range" else "fit"
    begun = f"Gradients in float16: with the loss scale in force ({in_force}) they {fit}."
    scales = loss_scales(numerics)
    if scales is None and lacks == "none":
        return "No gradient other than 0 was measured, so that no loss scale can be judged."
    if scales is None:
        return f"{begun} No loss scale makes all of them fit."
    text = f"{begun} Loss scales from {scales.least:g} to {scales.greatest:g} make them fit"
    initial = f"16-mixed begins with {INITIAL_SCALE:g}"
    if scales.greatest < INITIAL_SCALE:
        # A dynamic scale is halved after a skipped step.
        skipped = round(math.log2(INITIAL_SCALE / scales.greatest))
        return f"{text}; {initial} and skips up to {skipped} steps to get there."
    if scales.least > INITIAL_SCALE:
        # A dynamic scale grows, too, but by default doubles only after 2000 steps.
        return f"{text}; {initial}: type precision.loss_scale.init_scale={scales.least:g}."
    return f"{text}; {initial}, which does."


def _scales_in_force(numerics: Numerics) -> str:
    """Return the loss scales of the snapshots in words, empty where there was none."""
    scales = [probe.loss_scale for probe in numerics.probes if probe.loss_scale is not None]
    if not scales:
        return ""
    low = min(scales)
    high = max(scales)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _explanations(numerics: Numerics) -> list[tuple[str, str]]:
    """Return the page's terms, with the limits of the verdicts."""
    scaled = _scales_in_force(numerics) or "1, for the run has none"
    vanished = fmt.format_share(VANISHING_SHARE_LIMIT)
    noise = fmt.format_share(NOISE_SHARE_LIMIT)
    swallowed = fmt.format_share(SWALLOWED_SHARE_LIMIT)
    terms = {
        "overflow, underflow": "shares of the values other than zero that are past the largest of "
        f"the format, that become zero and are at least 2^-{NEGLIGIBLE_EXPONENT_GAP} of the "
        "largest of their module and kind (what is smaller is float32's own rounding error)",
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
        "experts": "experts.down_proj[3] is the matrix of expert 3 of a stacked weight, experts[3] "
        "the tokens that come to the expert; of all experts the worst is shown",
        "FP8": "after a scale per tensor to the largest value of the format",
        "heat maps": "underflow and overflow together, for updates what is swallowed; without "
        f"colour is less than {MIN_COLOURED_SHARE:g}, and modules that never lose more are left "
        "out. Tables hold means over the looks",
    }
    return list(terms.items())


def lost_shares(numerics: Numerics, name: str, kind: str) -> tuple[list[str], NDArray[np.float64]]:
    """Return the share that each module loses at each snapshot.

    Returns:
        The modules in the model's order, and the shares, [modules, snapshots]; NaN where a module
        was not measured.
    """
    # A dict keeps the order and, unlike a set, drops repetitions with it.
    names = list(dict.fromkeys(_stack_of(stats.module) for stats in numerics.measured))
    shares = np.full((len(names), len(numerics.probes)), np.nan)
    for column, snapshot in enumerate(numerics.probes):
        for stats in snapshot.measured:
            if stats.kind != kind:
                continue
            lost = numerics.quantization_loss(stats, name)
            share = (
                lost.swallowed if kind == "updates" else min(1.0, lost.vanishing + lost.overflow)
            )
            if share is not None:
                # The worst expert of a stack counts.
                row = names.index(_stack_of(stats.module))
                shares[row, column] = np.fmax(shares[row, column], share)
    return names, shares


def heat_maps(numerics: Numerics, name: str, kinds: Sequence[str] = KINDS) -> "Figure":
    """Draw a panel for each of the kinds that loses something: the modules that do down, steps
    across, the share lost as colour."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    columns = min(MAX_MAP_STEPS, len(numerics.probes))
    groups = np.array_split(np.arange(len(numerics.probes)), columns)
    steps = [numerics.probes[group[-1]].step for group in groups]
    colours = _colour_scale()
    panels = []
    for kind in kinds:
        names, shares = lost_shares(numerics, name, kind)
        most = np.nan_to_num(shares).max(axis=1)
        losing = np.flatnonzero(most >= MIN_COLOURED_SHARE)
        # The modules that lose most, in the model's order.
        rows = sorted(losing[np.argsort(-most[losing], kind="stable")][:MAX_MAP_ROWS])
        if rows:
            title = kind if len(rows) == len(losing) else f"{kind}, the worst {len(rows)} modules"
            # The worst of a group: one bad step among hundreds must stay visible.
            worst = [np.fmax.reduce(shares[rows][:, group], axis=1) for group in groups]
            panels.append((title, [names[row] for row in rows], np.stack(worst, 1)))
    height = max((len(names) for _, names, _ in panels), default=0)
    with chart_style():
        size = (CHART_WIDTH_INCHES * max(1, len(panels)), 1.7 + ROW_HEIGHT_INCHES * height)
        figure = Figure(figsize=size, layout="constrained")
        for i, (title, names, shares) in enumerate(panels, 1):
            axes = figure.add_subplot(1, len(panels), i)
            shown = np.where(shares >= MIN_COLOURED_SHARE, shares, np.nan)
            draw_heat_map(axes, shown, names, steps, *colours)
            axes.set_title(title)
            axes.set_xlabel("optimizer step")
            # The rows of all panels have one height.
            axes.set_ylim(height - 0.5, -0.5)
        figure.suptitle(f"{'share of values' if panels else 'nothing'} that {name} loses")
        if panels:
            scale = ScalarMappable(*colours)
            look = {"location": "bottom", "aspect": 30, "format": lambda x, _: fmt.format_share(x)}
            figure.colorbar(scale, ax=figure.axes, ticks=(1e-4, 1e-2, 1), **look)
    return figure


def draw_heat_map(
    axes: "Axes",
    values: NDArray[np.float64],
    names: Sequence[str],
    steps: Sequence[int],
    norm: "LogNorm",
    cmap: "Colormap | str",
) -> None:
    """Draw coloured squares, and nothing where a value is NaN.

    Args:
        axes: of the map.
        values: [modules, steps].
        names: of the modules, from the top.
        steps: of which some have a label.
        norm: scale of the values.
        cmap: colours.
    """
    from matplotlib.collections import PolyCollection

    rows, columns = np.nonzero(np.isfinite(values))
    corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
    squares = np.stack([columns, rows], 1)[:, None, :] + corners
    cells = PolyCollection(list(squares), array=values[rows, columns], cmap=cmap, norm=norm)
    axes.add_collection(cells)
    axes.set_xlim(-0.5, len(steps) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    ticks = range(0, len(steps), -(-len(steps) // 5))
    axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    # A module's name may hold a $, which is no mathematics.
    axes.set_yticks(range(len(names)), [module_label(name) for name in names], parse_math=False)
    axes.grid(visible=False)
    axes.tick_params(length=0)


def _colour_scale() -> tuple["LogNorm", "Colormap"]:
    """Return the logarithmic scale of shares, and its colours."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm

    # Without the ends of the map, of which a white or a dark page hides one. With more colours
    # matplotlib puts a bitmap into the SVG, which the page would refuse.
    colours = colormaps["plasma_r"](np.linspace(0.08, 0.75, 20))
    return LogNorm(MIN_COLOURED_SHARE, 1.0), ListedColormap(colours)
