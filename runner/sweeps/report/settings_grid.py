"""Compare precisions within each setting: what a sweep varies beside precision and seed.

A setting is for example a learning rate or a model. The table has a row per precision and a column
per setting; the sentence counts for how many settings each verdict holds.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from runner.core import fmt
from runner.output.markup import Block, Cell, Heading, Items, Table, Text
from runner.sweeps.report.wording import (
    format_mean_sd,
    join_names,
    outcome_words,
    speed_word,
    verdict_word,
)
from runner.sweeps.verdict.compare import (
    BASELINE,
    Comparison,
    Group,
    has_several_models,
    qualities_by_seed,
)
from runner.sweeps.verdict.statistics import Tolerance, Verdict, quality_tests
from runner.tracking.result_table import shared_settings

MAX_SUMMARIES = 3
"""Precisions in the conclusion; the report's list has all."""
_NAMED_VERDICTS = (Verdict.BETTER, Verdict.STALLED, Verdict.WORSE, None)
"""Verdicts, and no verdict, that are rare and matter: the settings are named."""
_BEST_NOTE = (
    "best: measurably better than every other precision of its column (t tests of the differences "
    "over seeds, at 5 % for all of them together). A column without a mark has no measurable best."
)


@dataclass(frozen=True)
class _Grid:
    """The groups of one device by precision and setting.

    Attributes:
        rows: precisions, with keys of their own such as precision.keep_fp32=[head].
        columns: the settings.
        cells: comparison of each row and column; combinations that were not swept are missing.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    cells: Mapping[tuple[str, str], Comparison]

    @classmethod
    def of_device(cls, compared: Sequence[Comparison], device: str) -> "_Grid":
        """Return the groups of a device."""
        cells = {}
        for comparison in compared:
            group = comparison.group
            if group.device != device:
                continue
            shared = shared_settings(group.settings)
            # The precision with the keys that it does not share with 32-true.
            own_keys = [word for word in group.settings if word not in shared]
            cells[" ".join([group.precision, *own_keys]), " ".join(shared)] = comparison
        rows = dict.fromkeys(row for row, _ in cells)
        columns = dict.fromkeys(column for _, column in cells)
        return cls(list(rows), list(columns), cells)

    def column(self, setting: str) -> list[Comparison]:
        """Return the comparisons of one setting."""
        return [self.cells[row, setting] for row in self.rows if (row, setting) in self.cells]

    @property
    def is_grid(self) -> bool:
        """Return whether at least two settings have several precisions to compare."""
        return sum(len(self.column(setting)) > 1 for setting in self.columns) > 1


def settings_blocks(compared: Sequence[Comparison]) -> Iterator[Block]:
    """Yield a table of precisions × settings for each device, and a summary for each precision.

    Nothing is yielded for a sweep that does not compare precisions in several settings.
    """
    devices = dict.fromkeys(comparison.group.device for comparison in compared)
    grids = {device: _Grid.of_device(compared, device) for device in devices}
    grids = {device: grid for device, grid in grids.items() if grid.is_grid}
    if not grids:
        return
    yield Heading("Precisions in each setting")
    for device, grid in grids.items():
        if len(grids) > 1:
            yield Text(f"On {device or 'an unknown device'}:")
        found = [_measured_best(grid.column(setting)) for setting in grid.columns]
        best = {id(each) for each in found if each is not None}
        rows = []
        for row in grid.rows:
            comparisons = [grid.cells.get((row, setting)) for setting in grid.columns]
            rows.append(
                [Cell(row), *(_quality_cell(each, id(each) in best) for each in comparisons)]
            )
        yield Table(["precision", *grid.columns], rows)
        summaries = list(_summaries(grid))
        if summaries:
            yield Items(summaries)
        if best:
            yield Text(_BEST_NOTE, "small")
    if has_several_models([comparison.group for comparison in compared]):
        yield Text("Qualities of different models or data are not compared.", "small")


def _quality_cell(comparison: Comparison | None, is_best: bool) -> Cell:
    """Return a group's quality, or how its jobs ended without one; empty if it was not swept."""
    if comparison is None:
        return Cell("")
    group = comparison.group
    if group.quality is None:
        return Cell(outcome_words(group), "bad")
    text = format_mean_sd(group.quality)
    return Cell(text, "good", "best") if is_best else Cell(text)


def _measured_best(column: Sequence[Comparison]) -> Comparison | None:
    """Return the group that is measurably better than every other one of a setting, if any is."""
    ended = [comparison for comparison in column if comparison.group.quality]
    if len(ended) < 2:
        return None
    for candidate in ended:
        values = qualities_by_seed(candidate.group)
        direction = candidate.group.direction
        others = [qualities_by_seed(c.group) for c in ended if c is not candidate]
        # Better by whatever amount: nothing is tolerated.
        none = Tolerance(max_gap=0.0)
        tests = [
            quality_tests([values], other, direction, none, len(others))[0] for other in others
        ]
        if not candidate.has_stalled and all(test.verdict is Verdict.BETTER for test in tests):
            return candidate
    return None


def _summaries(grid: _Grid) -> Iterator[tuple[str, str]]:
    """Yield (precision, for how many settings each verdict against 32-true holds)."""
    for name in grid.rows:
        row = {}
        for setting in grid.columns:
            comparison = grid.cells.get((name, setting))
            if comparison and comparison.baseline is not None and not comparison.is_baseline:
                row[setting] = comparison
        if len(row) > 1:
            verdicts = _counts(row, verdict_word, _NAMED_VERDICTS)
            yield name, ", ".join([*verdicts, *_counts(row, speed_word)])


def _counts(
    row: Mapping[str, Comparison],
    word_of: Callable[[Comparison], str],
    named: Sequence[Verdict | None] = (),
) -> Iterator[str]:
    """Yield each word with the number of settings that it holds for, the most frequent first."""
    settings_by_word = fmt.grouped((word_of(each), setting) for setting, each in row.items())
    settings_by_word.pop("", None)
    for word, settings in sorted(settings_by_word.items(), key=lambda item: -len(item[1])):
        text = f"{word} in {len(settings)} of {len(row)} settings"
        difference = row[settings[0]].difference
        verdict = difference.verdict if difference else None
        if verdict in named and len(settings) < len(row):
            text += f" ({join_names(settings)})"
        yield text


def settings_sentence(ended: Sequence[Comparison], every: Sequence[Comparison]) -> str:
    """Return the best group, and how precisions compare with 32-true in each setting.

    Args:
        ended: the comparisons of one device whose groups have a quality.
        every: all comparisons of that device.
    """
    groups = [comparison.group for comparison in ended]
    sentences: list[str] = []
    if not has_several_models(groups):
        sentences.append(_best_sentence(groups))
    grid = _Grid.of_device(every, groups[0].device)
    summaries = [f"{name}: {text}" for name, text in _summaries(grid)]
    if summaries:
        more = len(summaries) - MAX_SUMMARIES
        rest = [f"{more} more precisions: see the report"] if more > 0 else []
        shown = "; ".join([*summaries[:MAX_SUMMARIES], *rest])
        sentences.append(f"Against {BASELINE} in each setting: {shown}.")
    if not sentences:
        sentences.append("Different models or data: their qualities are not compared.")
    return " ".join(sentences)


def best_group(groups: Sequence[Group]) -> Group:
    """Return the group with the best mean quality; every group must have one."""
    pick = max if groups[0].direction == "max" else min
    return pick(groups, key=lambda group: group.quality.mean if group.quality else math.nan)


def _best_sentence(groups: Sequence[Group]) -> str:
    """Return the best group, and the best group of each other precision."""
    best = best_group(groups)
    sentence = f"Best {best.metric}: {best.name} with {format_mean_sd(best.quality)}"
    rest = [group for group in groups if group.precision != best.precision]
    by_precision = fmt.grouped((group.precision, group) for group in rest)
    others = [best_group(of_precision) for of_precision in by_precision.values()]
    if others:
        names = join_names(f"{group.name} with {format_mean_sd(group.quality)}" for group in others)
        sentence += f"; best of the other precisions: {names}"
    if all(len(group.jobs) == 1 for group in groups):
        sentence += "; one seed each: not judged"
    return f"{sentence}."
