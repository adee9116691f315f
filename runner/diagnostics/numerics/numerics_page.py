"""Judge precisions by what was measured of a run's numbers, and show it as a page with heat maps of
modules over steps."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.core import RunOutput, files, fmt, layout, terminal
from runner.diagnostics.numerics.results import (
    INITIAL_SCALE,
    KINDS,
    NEGLIGIBLE_EXPONENT_GAP,
    NOISE_SHARE_LIMIT,
    SWALLOWED_SHARE_LIMIT,
    VANISHING_SHARE_LIMIT,
    Complaint,
    Numerics,
    loss_scales,
)
from runner.output.markup import Block, Cell, Charts, Heading, Items, Origin, Table, Text, to_html
from runner.output.plots import CHART_WIDTH_INCHES, chart_style, module_label, svg_element
from runner.precision import registry
from runner.precision.emulation.formats import FORMATS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure

MAX_MAP_ROWS = 40
"""Modules that a heat map shows; of more, those that lose most."""
ROW_HEIGHT_INCHES = 0.18
MAX_MAP_STEPS = 40
"""Columns of a heat map; where there are more steps, a column has the worst of several."""
WORST_TABLE_ROWS = 12
UNFOLDED_ROWS = 4
"""Rows of a table of modules that a page shows before a click."""
OUTLINE = "#D55E00"
"""Colour around the cells of a heat map that decide."""
JUDGED_PRECISIONS = (
    *("bf16-mixed", "16-mixed", "bf16-true", "16-true"),
    *("float8-tensorwise", "transformer-engine-current"),
)
"""Precisions all of whose formats are measured; the FP8 recipes scale each tensor as it is, as the
measurement does."""
_LIMITS = {
    "overflow": 0.0,
    "underflow": VANISHING_SHARE_LIMIT,
    "noise": NOISE_SHARE_LIMIT,
    "swallowed": SWALLOWED_SHARE_LIMIT,
}
"""Share from which on a loss decides; first what a remedy of the others does not cure."""
MIN_COLOURED_SHARE = 1e-5
"""Least share that a cell is coloured for."""


class Suitability(NamedTuple):
    """Whether a precision would do for the model that was measured.

    Attributes:
        precision: its name.
        verdict: in words.
        why: the number that decides.
    """

    precision: str
    verdict: str
    why: str


def judge_precisions(numerics: Numerics) -> list[Suitability]:
    """Return for each of JUDGED_PRECISIONS whether it would do."""
    return [_judge_precision(numerics, name) for name in JUDGED_PRECISIONS]


def _judge_precision(numerics: Numerics, name: str) -> Suitability:
    precision = registry.load_precision(name)
    losses: list[Complaint] = []
    lacks = set()
    for narrow, kinds in precision.formats.items():
        rounded = list(kinds)
        if narrow == "float16":
            # The measured gradients are multiplied by the run's loss scale, not the precision's.
            problem = _gradient_problem(numerics, has_scale="gradients" not in kinds)
            if problem:
                return Suitability(name, "too little range", problem)
            rounded = [kind for kind in kinds if kind != "gradients"]
        losses += numerics.worst(narrow, kinds=rounded)
        lacks.add(numerics.sensitivity(narrow, rounded))

    if not losses:
        return Suitability(name, "would do", "nothing is lost")
    worst = max(losses, key=_rank)
    module, kind, what, share = worst
    limit = _LIMITS[what]
    why = f"{fmt.format_share(share)} {what} in the {kind} of {module}"
    why += f", limit {fmt.format_share(limit)}" * bool(limit)
    if "range" in lacks:
        return Suitability(name, "too little range", why)
    if "precision" not in lacks:
        return Suitability(name, "would do", f"nearest to a limit: {why}")
    if what != "swallowed":
        return Suitability(name, "too much noise", why)
    remedy = precision.update_remedy.rstrip(", ")
    return Suitability(name, "loss of updates", f"{why}; type {remedy}" if remedy else why)


def _gradient_problem(numerics: Numerics, has_scale: bool) -> str:
    """Return why float16 does not hold the gradients; empty where it does, or all are 0."""
    scales = loss_scales(numerics)
    if scales is None:
        is_lacking = numerics.sensitivity("float16", ["gradients"]) != "none"
        return "no loss scale makes all gradients fit" if is_lacking else ""
    if has_scale or scales.least <= 1 <= scales.greatest:
        return ""
    return f"gradients fit only with a loss scale, from {scales.least:g} to {scales.greatest:g}"


def _rank(loss: Complaint) -> tuple[bool, int, float]:
    """Return by what a loss is the one that decides, or is nearest to do so."""
    *_, what, share = loss
    limit = _LIMITS[what]
    is_past = share >= limit
    order = -[*_LIMITS].index(what) if is_past else 0
    return is_past, order, share / limit if limit else math.inf


def precision_answer(verdicts: Sequence[Suitability]) -> str:
    """Return the precisions by their verdicts, as the answer to which one would do."""
    in_order = sorted(verdicts, key=lambda one: one.verdict != "would do")
    groups = fmt.grouped((one.verdict, one.precision) for one in in_order)
    return " ".join(f"{verdict.capitalize()}: {', '.join(groups[verdict])}." for verdict in groups)


def answer_lines(numerics: Numerics) -> list[str]:
    """Return the answer, a line for each precision, and what was not judged."""
    verdicts = judge_precisions(numerics)
    lines = [precision_answer(verdicts)]
    lines += [f"{name}: {verdict}: {why}" for name, verdict, why in verdicts]
    return lines + [f"{name}: {text}" for name, text in _unjudged(numerics)]


def _unjudged(numerics: Numerics) -> Iterator[tuple[str, str]]:
    """Yield the modules that no number other than 0 was measured of."""
    for kind, names in numerics.unjudged().items():
        yield "not judged, for all are 0", f"{kind} of {fmt.first_names(names, 4)}"


def page_head(output: RunOutput, device: str, note: str = "") -> list[Block]:
    """Return the first lines of the page of a run that ends now.

    Args:
        output: of the run, whose folder holds its environment.
        device: its name.
        note: of the user, tracking.note.
    """
    facts = {}
    with suppress(OSError, ValueError):  # a full disk took the file: the page is as good without it
        facts = files.read_json(output.out / layout.ENVIRONMENT)
    versions = {key: facts.get(key) for key in layout.GIT_KEYS} | facts.get("packages", {})
    words = facts.get("command", [])
    # A call of the Python API is one text.
    commands = [terminal.quote_command(words)] if len(words) > 1 else words
    # Not its id: the store may open the run later than this.
    run = f"run {fmt.relative_path(output.out)}"
    return [*Origin(fmt.now_ms() / 1000, device, run, note, versions, commands).blocks()]


def write_page(numerics: Numerics, label: str, head: Sequence[Block], path: Path) -> Path:
    """Write the report as a page: the precisions, then the formats, the run's own first.

    Raises:
        OSError: the file cannot be written.
    """
    own = numerics.computed_in
    order = [own, *(name for name in FORMATS if name != own)]
    steps = [snapshot.step for snapshot in numerics.probes]
    formats = f"stores {numerics.storage}, computes {numerics.compute}"
    looks = f"{len(steps)} looks, steps {steps[0]} to {steps[-1]}"
    verdicts = judge_precisions(numerics)
    cells = [[Cell(text) for text in verdict] for verdict in verdicts]
    blocks: list[Block] = [
        *head,
        Text(f"precision={numerics.precision}, {formats} · {looks}", "small"),
        Text(precision_answer(verdicts), "answer"),
        Table(["precision", "verdict", "why"], cells, frozenset({0, 1, 2})),
        Text(loss_scale_sentence(numerics), "small"),
        Items(list(_unjudged(numerics)), small=True),
    ]
    for name in order:
        blocks.append(Heading(name))
        maps = filter(None, (heat_map(numerics, name, kind) for kind in KINDS))
        blocks.append(Charts([*map(svg_element, maps)]))
        rows = [
            [
                Cell(module, note=note),
                Cell(kind),
                Cell(what),
                Cell(fmt.format_share(value), bar=value),
            ]
            for (module, kind, what, value), note in _worst_of_stacks(numerics.worst(name))
        ]
        titles = ["worst module", "kind", "what", "share"]
        worst = folded_table(titles, rows, frozenset({0, 1, 2}))
        blocks.append(worst if rows else Text("Nothing is lost.", "small"))
    blocks += [Heading("How to read this"), Items(_explanations(), small=True)]
    path.write_text(to_html(f"Numerics of {label}", blocks))
    return path


def folded_table(head: Sequence[str], rows: list[list[Cell]], words: frozenset[int]) -> Table:
    """Return a table of modules, all but the first rows folded."""
    folded = max(0, len(rows) - UNFOLDED_ROWS)
    return Table(head, rows, words, folded=folded, fold_title=f"{folded} more")


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


def loss_scale_sentence(numerics: Numerics) -> str:
    """Return the loss scales that make float16's gradients fit, and whether 16-mixed finds one."""
    scales = loss_scales(numerics)
    if scales is None:
        lacks = numerics.sensitivity("float16", ["gradients"])
        if lacks == "none":
            return "No gradient other than 0 was measured, so that no loss scale can be judged."
        return "No loss scale makes all gradients fit float16."
    text = (
        f"Loss scales from {scales.least:g} to {scales.greatest:g} make the gradients fit float16"
    )
    initial = f"16-mixed begins with {INITIAL_SCALE:g}"
    if scales.greatest < INITIAL_SCALE:
        # A dynamic scale is halved after a skipped step.
        skipped = round(math.log2(INITIAL_SCALE / scales.greatest))
        return f"{text}; {initial} and skips up to {skipped} steps to get there."
    if scales.least > INITIAL_SCALE:
        # A dynamic scale grows, too, but by default doubles only after 2000 steps.
        return f"{text}; {initial}: type precision.loss_scale.init_scale={scales.least:g}."
    return f"{text}; {initial}, which does."


def _explanations() -> list[tuple[str, str]]:
    """Return the page's terms, with the limits of the verdicts."""
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
        "too little range": f"something overflows, {vanished} of a module's values become zero, or "
        f"values that become zero or subnormal make a noise of {noise} or more",
        "too much noise": f"{noise} or more otherwise",
        "loss of updates": f"{swallowed} of a module's updates are swallowed, by a precision that "
        "stores weights in the format",
        "gradients": "before clipping, multiplied by the loss scale in force",
        "experts": "experts.down_proj[3] is the matrix of expert 3 of a stacked weight, experts[3] "
        "the tokens that come to the expert; of all experts the worst is shown",
        "FP8": "after a scale per tensor to the largest value of the format",
        "heat maps": "underflow and overflow together, for updates what is swallowed; the more, "
        f"the stronger, on a logarithmic scale. Outlined are cells with an overflow, {vanished} of "
        f"underflow or {swallowed} of swallowed updates. Empty is less than "
        f"{MIN_COLOURED_SHARE:g}, and modules that never lose more are left out. Tables hold means "
        "over the looks",
    }
    return list(terms.items())


def lost_shares(
    numerics: Numerics, name: str, kind: str
) -> tuple[list[str], NDArray[np.float64], NDArray[np.bool_]]:
    """Return the share that each module loses at each snapshot, of a stack of experts the worst.

    Returns:
        The modules in the model's order, the shares, [modules, snapshots], NaN where a module was
        not measured, and whether a share is past a limit of the verdicts.
    """
    # A dict keeps the order and, unlike a set, drops repetitions with it.
    names = list(dict.fromkeys(_stack_of(stats.module) for stats in numerics.measured))
    shares = np.full((len(names), len(numerics.probes)), np.nan)
    decides = np.zeros(shares.shape, bool)
    for column, snapshot in enumerate(numerics.probes):
        for stats in snapshot.measured:
            if stats.kind != kind:
                continue
            lost = numerics.quantization_loss(stats, name)
            share = min(1.0, lost.vanishing + lost.overflow)
            is_past = bool(lost.overflow) or lost.vanishing >= VANISHING_SHARE_LIMIT
            if kind == "updates":
                share = np.nan if lost.swallowed is None else lost.swallowed
                is_past = share >= SWALLOWED_SHARE_LIMIT
            cell = names.index(_stack_of(stats.module)), column
            shares[cell] = np.fmax(shares[cell], share)
            decides[cell] |= is_past
    return names, shares, decides


def heat_map(numerics: Numerics, name: str, kind: str) -> "Figure | None":
    """Draw what a format loses of a kind of values: the modules that do down, steps across, the
    share as strength, what decides with an outline; None where nothing is lost."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    names, shares, decides = lost_shares(numerics, name, kind)
    most = np.nan_to_num(shares).max(axis=1)
    losing = np.flatnonzero(most >= MIN_COLOURED_SHARE)
    if not len(losing):
        return None
    # The modules that lose most, in the model's order.
    rows = sorted(losing[np.argsort(-most[losing], kind="stable")][:MAX_MAP_ROWS])
    columns = min(MAX_MAP_STEPS, len(numerics.probes))
    groups = np.array_split(np.arange(len(numerics.probes)), columns)
    steps = [numerics.probes[group[-1]].step for group in groups]
    # The worst of a group: one bad step among hundreds must stay visible.
    worst = np.stack([np.fmax.reduce(shares[rows][:, group], axis=1) for group in groups], 1)
    outlined = np.stack([decides[rows][:, group].any(axis=1) for group in groups], 1)
    norm = LogNorm(MIN_COLOURED_SHARE, 1.0)
    with chart_style():
        size = (CHART_WIDTH_INCHES, 1.7 + ROW_HEIGHT_INCHES * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        shown = np.where(worst >= MIN_COLOURED_SHARE, worst, np.nan)
        draw_heat_map(axes, shown, outlined, [names[row] for row in rows], steps, norm)
        extent = "" if len(rows) == len(losing) else f"\nthe worst {len(rows)} modules"
        axes.set_title(f"share of {kind} that {name} loses{extent}", loc="right")
        axes.set_xlabel("optimizer step")
        look = {"location": "bottom", "aspect": 30, "format": lambda x, _: fmt.format_share(x)}
        if outlined.any():
            look["label"] = "outlined: past the limit of a verdict"
        scale = ScalarMappable(norm, _strengths())
        figure.colorbar(scale, ax=axes, ticks=(1e-4, 1e-2, 1), **look)
    return figure


def draw_heat_map(
    axes: "Axes",
    values: NDArray[np.float64],
    outlined: NDArray[np.bool_],
    names: Sequence[str],
    steps: Sequence[int],
    norm: "LogNorm",
) -> None:
    """Draw squares, the stronger the larger a value is, and nothing where it is NaN.

    Args:
        axes: of the map.
        values: [modules, steps].
        outlined: whether a square has an outline, [modules, steps].
        names: of the modules, from the top.
        steps: of which some have a label.
        norm: scale of the values.
    """
    from matplotlib.collections import PolyCollection

    rows, columns = np.nonzero(np.isfinite(values))
    # With gaps between them, in which the outlines are.
    corners = 0.46 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
    squares = np.stack([columns, rows], 1)[:, None, :] + corners
    widths = np.where(outlined[rows, columns], 1.2, 0.0)
    look = {"edgecolors": OUTLINE, "linewidths": widths, "cmap": _strengths(), "norm": norm}
    axes.add_collection(PolyCollection(list(squares), array=values[rows, columns], **look))
    axes.set_xlim(-0.5, len(steps) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    ticks = range(0, len(steps), -(-len(steps) // 5))
    axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    # A module's name may hold a $, which is no mathematics.
    axes.set_yticks(range(len(names)), [module_label(name) for name in names], parse_math=False)
    axes.grid(visible=False)
    axes.tick_params(length=0)


def _strengths() -> "ListedColormap":
    """Return the page's ink from faint to strong: on a light page and a dark one the largest value
    has the highest contrast."""
    from matplotlib.colors import ListedColormap

    # With more colours matplotlib puts a bitmap into the SVG, which the page would refuse.
    return ListedColormap([(0.0, 0.0, 0.0, alpha) for alpha in np.linspace(0.35, 1.0, 20) ** 2])
