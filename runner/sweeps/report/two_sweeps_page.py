"""Write the report that compares two sweeps, A and B: report.md, report.html and report.png."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.sweeps.report.cells import range_cell
from runner.sweeps.report.compare import MIN_GAIN_ONE_SEED, MIN_GAIN_SEEDS, Group
from runner.sweeps.report.footnotes import TEST_SOURCES
from runner.sweeps.report.number_text import format_mean_sd, format_range, format_ratio, join_names
from runner.sweeps.report.statistics import Verdict
from runner.sweeps.report.two_sweeps import PairComparison, SweepComparison
from runner.sweeps.report.wording import VERDICT_TONES, difference_words, memory_name
from runner.utils.files import write_text
from runner.utils.markup import (
    Block,
    Cell,
    Charts,
    Commands,
    Heading,
    Items,
    Table,
    Text,
    to_html,
    to_markdown,
)
from runner.utils.plots import chart_style, plain_label, svg_element

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NAMES = 6
"""Names of groups in one clause of the conclusion."""
NO_COMMIT_NOTE = (
    "No commit is known of {sweeps}: the command ran outside a git repository, or an older version "
    "ran it. Whether the code is the same is not known."
)
CHANGES_NOTE = (
    "{sweeps} ran with changes that no commit holds: the code may differ even where the commit is "
    "the same."
)

_NOT_ENDED = "not compared, since it did not finish in both"
_SPEED_TITLES = {
    "faster": "faster",
    "slower": "slower",
    "even": "about as fast",
    "unclear": "speed unclear",
    "": "not timed",
}
_VERDICT_TITLES = {
    Verdict.SAME: "no measurable difference in {quality}",
    Verdict.BETTER: "better {quality}",
    Verdict.WORSE: "worse {quality}",
    Verdict.UNJUDGED: "no verdict on {quality}",
}
_NOT_COMPARABLE = "{quality} not comparable"


def write_comparison(compared: SweepComparison, folder: Path) -> list[Path]:
    """Write the report of a comparison into a folder, which is created; return the paths.

    Raises:
        OSError: the folder cannot be written to.
    """
    title = "Two sweeps, A and B"
    head = list(_difference_blocks(compared))
    body = list(_group_blocks(compared))
    details = list(_detail_blocks(compared))
    figure = _comparison_figure(compared.pairs)
    charts: list[Block] = [Charts([svg_element(figure)])] if figure is not None else []
    paths = [
        write_text(folder / "report.md", to_markdown(title, [*head, *body, *details])),
        write_text(folder / "report.html", to_html(title, [*head, *body, *charts, *details])),
    ]
    if figure is not None:
        picture_path = folder / "report.png"
        figure.savefig(picture_path, dpi=110)
        paths.append(picture_path)
    return paths


def _difference_blocks(compared: SweepComparison) -> Iterator[Block]:
    """Yield which sweeps A and B are, and what differs between them."""
    for letter, sweep in (("A", compared.first), ("B", compared.second)):
        facts = [f"{letter}: {sweep.name}", sweep.date, f"{len(sweep.data.jobs)} jobs"]
        yield Text(" · ".join(filter(None, facts)), "small")
    yield Heading("What differs")
    if compared.differences:
        rows = []
        for difference in compared.differences:
            rows.append([Cell(difference.name), Cell(difference.first), Cell(difference.second)])
        yield Table(["", "A", "B"], rows, frozenset({0, 1, 2}))
    else:
        yield Text(_sameness(compared))
    for note in _code_notes(compared):
        yield Text(note, "small")


def _sameness(compared: SweepComparison) -> str:
    """Return what is the same in both sweeps, of what both recorded."""
    recorded = [
        noun
        for noun, attribute in (("versions", "environment"), ("data", "data"), ("config", "config"))
        if any(getattr(origin, attribute) for origin in compared.first.origins)
        and any(getattr(origin, attribute) for origin in compared.second.origins)
    ]
    if not recorded:
        return "Nothing was recorded that could differ: no versions, data or config."
    return f"Nothing that both recorded ({', '.join(recorded)})."


def _code_notes(compared: SweepComparison) -> Iterator[str]:
    """Yield what the commits do not say of the code."""
    sweeps = (("A", compared.first), ("B", compared.second))
    unknown = [name for name, each in sweeps if not any(o.commit for o in each.origins)]
    changed = [name for name, each in sweeps if any(o.has_changes for o in each.origins)]
    if unknown:
        yield NO_COMMIT_NOTE.format(sweeps=" and ".join(unknown))
    if changed:
        yield CHANGES_NOTE.format(sweeps=" and ".join(changed))


def _group_blocks(compared: SweepComparison) -> Iterator[Block]:
    """Yield the conclusion, and the table and sentences of the groups that both sweeps have."""
    yield Heading("B against A")
    yield Text(comparison_sentence(compared), "answer")
    yield _pairs_table(compared.pairs)
    yield Items([(pair.second.name, _pair_sentence(pair)) for pair in compared.pairs])
    for letter, names in (("A", compared.only_first), ("B", compared.only_second)):
        if names:
            yield Text(f"Only in {letter}: {', '.join(names)}.", "small")


def _detail_blocks(compared: SweepComparison) -> Iterator[Block]:
    commands = [*compared.first.data.commands, *compared.second.data.commands]
    if any(commands):
        yield Heading("Commands")
        yield Commands([command for command in commands if command])
    differences = [pair.comparison.difference for pair in compared.pairs]
    tests = {difference.test for difference in differences if difference} - {""}
    notes = []
    if tests:
        source = TEST_SOURCES["Welch" if "Welch" in tests else "paired t"]
        notes.append(
            (
                "Quality",
                f"B's mean minus A's with its 95 % interval ({source}; seeds are paired where both "
                "sweeps drew the same batches). An interval that contains 0 is no measurable "
                "difference, which is not equality.",
            )
        )
    if any(pair.comparison.speed_ratio for pair in compared.pairs):
        notes.append(
            (
                "Speed",
                "B's examples/s over A's, the median over seeds with the range. Called faster or "
                f"slower where the range excludes 1 and the median is more than "
                f"{MIN_GAIN_SEEDS:.0%} from it ({MIN_GAIN_ONE_SEED:.0%} with one seed).",
            )
        )
    if notes:
        yield Heading("How this was compared")
        yield Items(notes, small=True)


def _pairs_table(pairs: Sequence[PairComparison]) -> Table:
    """Return the table with a row per group, without columns that are empty."""
    columns: list[tuple[str, Callable[[PairComparison], Cell]]] = [
        ("job", lambda pair: Cell(pair.second.name)),
        ("A", lambda pair: Cell(_failure_words(pair.first), "bad")),
        ("B", lambda pair: Cell(_failure_words(pair.second), "bad")),
        (f"A {_quality_name(pairs)}", lambda pair: _quality_cell(pair.first)),
        (f"B {_quality_name(pairs)}", lambda pair: _quality_cell(pair.second)),
        ("B against A", _difference_cell),
        ("speed × A", _speed_cell),
        ("memory × A", _memory_cell),
        ("A skipped", lambda pair: range_cell(pair.first.skipped)),
        ("B skipped", lambda pair: range_cell(pair.second.skipped)),
        ("A final scale", lambda pair: range_cell(pair.first.loss_scale)),
        ("B final scale", lambda pair: range_cell(pair.second.loss_scale)),
    ]
    made = [(title, [cell(pair) for pair in pairs]) for title, cell in columns]
    shown = [(title, cells) for title, cells in made if any(cell.text for cell in cells)]
    titles = [title for title, _ in shown]
    words = frozenset(
        titles.index(name) for name in ("job", "A", "B", "B against A") if name in titles
    )
    rows = [[cells[i] for _, cells in shown] for i in range(len(pairs))]
    return Table(titles, rows, words, cards=True)


def _quality_name(pairs: Sequence[PairComparison]) -> str:
    """Return the name of the quality that all jobs share, else "quality"."""
    jobs = [job for pair in pairs for job in (*pair.first.jobs, *pair.second.jobs)]
    names = {job.quality for job in jobs if job.quality}
    return names.pop() if len(names) == 1 else "quality"


def _failure_words(group: Group) -> str:
    """Return how the jobs ended; empty if all finished."""
    if set(group.counts) == {"finished"}:
        return ""
    jobs = len(group.jobs)
    return ", ".join(f"{count}/{jobs} {outcome}" for outcome, count in group.counts.items())


def _quality_cell(group: Group) -> Cell:
    note = f"{group.quality.n} seeds" if group.quality and group.quality.n > 1 else ""
    return Cell(format_mean_sd(group.quality), note=note)


def _difference_cell(pair: PairComparison) -> Cell:
    if pair.obstacle:
        return Cell("not comparable", "quiet", pair.obstacle)
    difference = pair.comparison.difference
    if difference is None:
        return Cell("")
    verdict, numbers = difference_words(difference)
    return Cell(verdict, VERDICT_TONES.get(difference.verdict, ""), numbers)


def _speed_cell(pair: PairComparison) -> Cell:
    ratio = pair.comparison.speed_ratio
    return Cell(format_ratio(ratio), note=format_range(ratio))


def _memory_cell(pair: PairComparison) -> Cell:
    ratio = pair.comparison.memory_ratio
    return Cell("" if ratio is None else f"{ratio:.2f}")


def _pair_sentence(pair: PairComparison) -> str:
    """Return what B's group shows against A's, in one sentence."""
    if not pair.ended_in_both:
        endings = [f"A {_failure_words(pair.first) or 'finished'}"]
        endings.append(f"B {_failure_words(pair.second) or 'finished'}")
        return f"not compared: {'; '.join(endings)}."
    clauses = [_quality_clause(pair), _speed_clause(pair), _memory_clause(pair)]
    return f"{', '.join(filter(None, clauses))}."


def _quality_clause(pair: PairComparison) -> str:
    quality = pair.second.jobs[0].quality or "quality"
    if pair.obstacle:
        return f"{quality} is not comparable ({pair.obstacle})"
    difference = pair.comparison.difference
    if difference is None:
        return "no quality to compare"
    verdict, numbers = difference_words(difference)
    evidence = f" ({numbers})" if numbers else ""
    preposition = "on" if difference.verdict is Verdict.UNJUDGED else "in"
    return f"{verdict} {preposition} {quality}{evidence}"


def _speed_clause(pair: PairComparison) -> str:
    ratio = format_ratio(pair.comparison.speed_ratio)
    match pair.comparison.speed_verdict:
        case "faster" | "slower":
            return f"{ratio} × as fast as A"
        case "even":
            return "about as fast as A"
        case "unclear":
            spread = format_range(pair.comparison.speed_ratio)
            return f"neither measurably faster nor slower than A ({spread} ×)"
    return "not timed"


def _memory_clause(pair: PairComparison) -> str:
    ratio = pair.comparison.memory_ratio
    if ratio is None:
        return ""
    name = memory_name(pair.comparison)
    # Compared as printed: "1.00 × the memory" would read as a difference.
    if f"{ratio:.2f}" == "1.00":
        return f"with the same {name}"
    return f"with {ratio:.2f} × the {name}"


def comparison_sentence(compared: SweepComparison) -> str:
    """Return what B shows against A over all groups, in one sentence."""
    quality = _quality_name(compared.pairs)
    names_by_clause: dict[str, list[str]] = {}
    for pair in compared.pairs:
        for clause, name in _clauses_of(pair, quality):
            names_by_clause.setdefault(clause, []).append(name)
    # In the order of the table's columns: quality first.
    order = [*_quality_titles(quality), *_SPEED_TITLES.values(), _NOT_ENDED]
    clauses = []
    for title in order:
        if title in names_by_clause:
            clauses.append(f"{title}: {join_names(names_by_clause[title], MAX_NAMES)}")
    date = f" of {compared.first.date}" if compared.first.date else ""
    return f"B against A{date}: {'; '.join(clauses)}."


def _quality_titles(quality: str) -> list[str]:
    titles = [*_VERDICT_TITLES.values(), _NOT_COMPARABLE]
    return [title.format(quality=quality) for title in titles]


def _clauses_of(pair: PairComparison, quality: str) -> Iterator[tuple[str, str]]:
    """Yield (title of a clause, the group's name in it) for quality and speed."""
    name = pair.second.name
    if not pair.ended_in_both:
        yield _NOT_ENDED, name
        return
    difference = pair.comparison.difference
    if pair.obstacle:
        yield _NOT_COMPARABLE.format(quality=quality), name
    elif difference is not None:
        yield _VERDICT_TITLES[difference.verdict].format(quality=quality), name
    verdict = pair.comparison.speed_verdict
    ratio = f" ({format_ratio(pair.comparison.speed_ratio)} ×)"
    yield _SPEED_TITLES[verdict], f"{name}{ratio}" if verdict in ("faster", "slower") else name


def _comparison_figure(pairs: Sequence[PairComparison]) -> "Figure | None":
    """Return a figure of A's and B's quality per group, None if no group has both."""
    from matplotlib.figure import Figure

    drawn = [pair for pair in pairs if pair.first.quality and pair.second.quality]
    if not drawn:
        return None
    with chart_style(font_size=9):
        figure = Figure(figsize=(6.4, 1.2 + 0.45 * len(drawn)), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(color="#e4e4e4", lw=0.6, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
        for row, pair in enumerate(drawn):
            for group, offset, colour in (
                (pair.first, -0.12, "#888888"),
                (pair.second, 0.12, "#0072B2"),
            ):
                assert group.quality is not None
                axes.errorbar(
                    group.quality.mean,
                    row + offset,
                    xerr=group.quality.sd,
                    fmt="o",
                    color=colour,
                    ms=5,
                    capsize=3,
                )
        axes.set_yticks(range(len(drawn)), [plain_label(pair.second.name) for pair in drawn])
        for label in axes.get_yticklabels():
            label.set_parse_math(False)
        axes.invert_yaxis()
        title = (
            f"{plain_label(_quality_name(drawn))}, mean and deviation over seeds (grey: A, blue: B)"
        )
        axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    return figure
