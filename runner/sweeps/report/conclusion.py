"""State a sweep's result: in one or two sentences, and in a table of precisions and settings.

Each function writes the sentence of one situation (several seeds, one seed, no baseline, ...);
`_device_sentence` chooses among them. In a sweep over precision and something else, precisions are
compared within each setting: what the sweep varies beside precision and seed, such as a learning
rate or a model.
"""

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from runner.config.invocation import given_keys
from runner.modes.result import shared_settings
from runner.sweeps.report.load import SweepData
from runner.sweeps.report.wording import (
    MAX_LISTED_NAMES,
    OUTCOME_WORDS,
    VERDICT_WORDS,
    difference_words,
    format_mean_sd,
    format_range,
    format_ratio,
    join_names,
    memory_words,
    outcome_words,
    speed_words,
    stagnation_sentence,
)
from runner.sweeps.sweep_resume import RUNNER_COMMAND
from runner.sweeps.verdict.compare import (
    BASELINE,
    Comparison,
    Group,
    caveats_of,
    has_several_models,
    qualities_by_seed,
    sweep_letter,
)
from runner.sweeps.verdict.statistics import Verdict, quality_difference
from runner.utils.formatting import format_number, grouped
from runner.utils.markup import Block, Cell, Heading, Items, Table, Text
from runner.utils.terminal import quote_command

NO_BASELINE_REASON = f"no {BASELINE} job to compare with; add precision={BASELINE}"
MAX_WORTHWHILE_MEMORY_SHARE = 0.95
"""Another group's memory is mentioned if it is at most this share of the named group's and of
the baseline's."""
FAILURES = ("diverged", "failed", "stopped", "refused", "unavailable")
"""Outcomes without a result, in the order of the sentence on them."""
MAX_SUMMARIES = 3
"""Precisions in the conclusion; the report's list has all."""
_NOT_COMPARED = "not compared"
_NAMED_WORDS = (VERDICT_WORDS[Verdict.BETTER], VERDICT_WORDS[Verdict.WORSE], _NOT_COMPARED)
"""Results that are rare and matter: the settings are named."""
_BEST_NOTE = (
    "best: measurably better than every other precision of its column (95 % interval of the "
    "difference over seeds). A column without a mark has no measurable best."
)


def recommended_precision(comparisons: Sequence[Comparison]) -> Comparison | None:
    """Return the fastest group that is measurably faster than 32-true and not worse in quality.

    Returns:
        32-true itself if no other group is such. None if the sweep cannot answer: it has no
        baseline, one seed, no speed of a judged group, other settings swept, or several devices.
    """
    finished = [comparison.group for comparison in comparisons if comparison.group.finished_count]
    # Each combination of settings and device has an answer of its own: no row is marked as the one.
    if len({(group.settings, group.device) for group in finished}) > 1:
        return None
    if not any(comparison.is_judged and comparison.speed_ratio for comparison in comparisons):
        return None
    candidates = []
    for comparison in comparisons:
        group = comparison.group
        is_comparable = group.is_complete and not group.is_evaluation and comparison.speed_ratio
        is_gain = comparison.speed_verdict == "faster" and comparison.is_not_worse
        if is_comparable and (comparison.is_baseline or is_gain):
            candidates.append(comparison)
    if not any(candidate.is_baseline for candidate in candidates):
        return None
    return _fastest(candidates)


def conclusion_text(data: SweepData) -> str:
    """Return the result of a sweep and, in a sentence each, the reservations about it."""
    compared = data.compared
    return " ".join(
        [data.no_answer or conclusion_sentence(compared), *reservations(data, compared)]
    )


def next_command(data: SweepData, compared: Sequence[Comparison]) -> str:
    """Return the command that resumes a sweep without an answer, that repeats one with too few
    seeds for an answer, or that trains once in the precision that it recommends; else empty."""
    if data.no_answer:
        return data.resume_command
    words: list[str] = []
    # A store may hold what nobody could type.
    with suppress(ValueError):
        words = shlex.split(data.commands[0]) if len(data.commands) == 1 else []
    if words[:3] != RUNNER_COMMAND or given_keys():
        return ""
    pick = recommended_precision(compared)
    if pick is not None:
        others = pick.group.jobs[0].left_out
        presets = ("sweep", "hydra.", "hydra/", "launcher=", "-m", "--multirun")
        dropped = ("precision=", "seed=", *presets, *others)
        end = f"precision={pick.group.precision}"
    elif compared and f"Type {_more_seeds(compared[0])}" in conclusion_sentence(compared):
        dropped = ("seed=",)
        end = _more_seeds(compared[0])
    else:
        return ""
    kept = [word for word in words[3:] if not word.lstrip("+").startswith(dropped)]
    return quote_command([*RUNNER_COMMAND, *kept, end])


def reservations(data: SweepData, compared: Sequence[Comparison]) -> list[str]:
    """Return sentences on what did not end well or learned nothing, what was not computed as asked,
    and a busy machine."""
    sentences = [
        failure_sentence(compared, data.missing_jobs_clause),
        data.untrained_sentence,
        *caveats_of(comparison.group for comparison in compared),
        stagnation_sentence(comparison.group for comparison in compared),
        data.flips_sentence,
        data.speed_reservation,
    ]
    return [*filter(None, sentences)]


def conclusion_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return what the numbers show, one sentence per device.

    Args:
        comparisons: see SweepData.compared.
    """
    if any(sweep_letter(comparison.group.name) for comparison in comparisons):
        return _two_sweeps_sentence(comparisons)
    if not comparisons:
        return "No job wrote a result."
    by_device = grouped((c.group.device, c) for c in comparisons if c.group.quality)
    if by_device:
        sentences = []
        for device, ended in by_device.items():
            every = [c for c in comparisons if c.group.device == device]
            sentence = _device_sentence(ended, every)
            place = f"On {device or 'an unknown device'}: " if len(by_device) > 1 else ""
            sentences.append(f"{place}{sentence}")
        return " ".join(sentences)
    # Modes like plan and explain finish without a quality: that is no failure.
    if any(comparison.group.counts.get("finished") for comparison in comparisons):
        return "Nothing was trained or evaluated."
    return "No job finished with a finite result."


def _two_sweeps_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return the verdicts on each group of two sweeps against 32-true of the first one."""
    clauses = []
    for comparison in comparisons:
        if comparison.baseline is None or comparison.is_baseline:
            continue
        words = [_verdict_word(comparison), _speed_word(comparison)]
        clauses.append(f"{comparison.group.name}: {', '.join(filter(None, words)) or 'no result'}")
    if clauses:
        return f"Against {BASELINE} of A: {'; '.join(clauses)}."
    return f"Nothing is compared: A has no {BASELINE} job with the settings of another one."


def failure_sentence(comparisons: Sequence[Comparison], missing_jobs: str = "") -> str:
    """Return which groups diverged, failed, stopped or cannot run here; empty if none."""
    parts = []
    if missing_jobs:
        parts.append(missing_jobs)
    for outcome in FAILURES:
        names = []
        for comparison in comparisons:
            group = comparison.group
            count = group.counts.get(outcome, 0)
            # The number of jobs, unless all ended so.
            share = f" ({count} of {len(group.jobs)})" if count < len(group.jobs) else ""
            if count:
                names.append(f"{group.name}{share}")
        if names:
            parts.append(f"{OUTCOME_WORDS.get(outcome, outcome)}: {join_names(names)}")
    return _capitalised_sentence("; ".join(parts)) if parts else ""


def _capitalised_sentence(text: str) -> str:
    # str.capitalize() would lower all letters but the first.
    return f"{text[0].upper()}{text[1:]}."


def _device_sentence(ended: Sequence[Comparison], every: Sequence[Comparison]) -> str:
    """Return the sentence on the groups of one device that ended with a quality.

    Args:
        ended: those groups.
        every: all groups of the device.
    """
    # From the situation that says least to the one that says most: each test may assume that the
    # situations before it are excluded.
    groups = [comparison.group for comparison in ended]
    if any(group.is_evaluation for group in groups):
        return _evaluation_sentence(groups)
    if len(ended) == 1 and (ended[0].is_baseline or ended[0].baseline is None):
        return _only_sentence(ended[0])
    if len({group.settings for group in groups}) > 1:
        return _settings_sentence(ended, every)
    others = [comparison for comparison in ended if not comparison.is_baseline]
    if len(others) == len(ended):
        return _no_baseline_sentence(ended)
    if not any(comparison.speed_ratio for comparison in others):
        return _untimed_sentence(others)
    if any(comparison.is_judged for comparison in ended):
        return _judged_sentence(ended)
    return _unjudged_sentence(ended)


def _only_sentence(comparison: Comparison) -> str:
    """Return the result of the only group with one, and what to type to compare it."""
    name = comparison.group.name
    facts = _group_facts(comparison.group)
    if comparison.is_baseline:
        return f"Stay with {BASELINE}: no other precision finished. It reached {facts}."
    other = "bf16-mixed" if name == BASELINE else name
    advice = _typed([f"precision={BASELINE},{other}"], [comparison], "to compare")
    return f"{name} finished: {facts}.{advice}"


def _typed(words: Sequence[str], ended: Sequence[Comparison], aim: str = "") -> str:
    """Return a sentence on what to type; empty for trainings by another trainer."""
    if not any(comparison.group.jobs[0].overrides for comparison in ended):
        return ""
    return f" Type {' '.join(filter(None, [quote_command(words), aim]))}."


def _more_seeds(comparison: Comparison) -> str:
    """Return the override for three seeds, or for twice as many as a group has."""
    count = max(3, 2 * comparison.group.quality.n) if comparison.group.quality else 3
    return f"seed={','.join(map(str, range(count)))}"


def _untimed_sentence(others: Sequence[Comparison]) -> str:
    """Compare quality alone: some jobs were too short for their speed to mean much."""
    against = ""
    compared = []
    for other in others:
        if other.difference:
            assert other.group.quality is not None
            words = difference_words(other.difference)
            verdict = ", ".join(filter(None, words)) if other.is_judged else words[1]
            # Without its standard deviation: the difference has another ±, an interval.
            mean = format_number(other.group.quality.mean)
            compared.append(f"{other.group.name} {mean} ({verdict})")
    if compared:
        quality = others[0].group.jobs[0].quality
        against = f" {quality} against {BASELINE}: {join_names(compared)}."
    if any(other.difference and not other.is_judged for other in others):
        against += _typed([_more_seeds(others[0])], others, "to judge the differences")
    jobs = [job for other in others for job in other.group.jobs]
    if all(job.kernels == "emulated" for job in jobs):
        return f"Emulated: the hardware itself is needed to measure the speed.{against}"
    return f"Too short for a comparison of speed; train for more steps.{against}"


def _group_facts(group: Group) -> str:
    """Return a group's mean quality, its number of seeds and its speed."""
    assert group.quality is not None
    facts = f"{group.jobs[0].quality} {format_mean_sd(group.quality)}"
    if group.quality.n > 1:
        facts += f" ({group.quality.n} seeds)"
    if group.speed:
        facts += f", {format_number(group.speed.mean)} examples/s"
    return facts


def _evaluation_sentence(groups: Sequence[Group]) -> str:
    """Return a sentence for each checkpoint and other setting, or the best group if many."""
    evaluated = [group for group in groups if group.change]
    by_checkpoint = grouped((shared_settings(group.settings), group) for group in evaluated)
    if not 1 <= len(by_checkpoint) <= MAX_LISTED_NAMES:
        best = _best_group(groups)
        return f"Evaluated, nothing trained: best {best.name} with {_group_facts(best)}."
    return " ".join(map(_checkpoint_sentence, by_checkpoint.values()))


def _checkpoint_sentence(groups: Sequence[Group]) -> str:
    """Return how evaluating one checkpoint in other precisions changes its quality."""
    first = groups[0]
    jobs = [job for group in groups for job in group.jobs]
    trained_in = next((job.trained_in for job in jobs if job.trained_in), BASELINE)
    # Evaluated in its own precision, a checkpoint weighs the same and changes by nothing.
    others = [group for group in groups if group.precision != trained_in] or groups
    lightest = min(others, key=lambda g: g.weights_mib.mean if g.weights_mib else math.inf)
    nearest = min(others, key=lambda g: abs(g.change.mean) if g.change else math.inf)
    # One group can be both: it is named once.
    changes = dict.fromkeys([_change_words(lightest), _change_words(nearest)])
    trained_quality = ""
    if first.quality and first.change:
        trained_quality = format_number(first.quality.mean - first.change.mean)
    quality = first.jobs[0].quality
    return f"{quality} was {trained_quality} as trained in {trained_in}: {'; '.join(changes)}."


def _change_words(group: Group) -> str:
    assert group.change is not None
    weights = ""
    if group.weights_mib:
        weights = f" ({format_number(group.weights_mib.mean)} MiB of weights)"
    return f"{group.name}{weights} changes it by {group.change.mean:+.3g}"


def _no_baseline_sentence(ended: Sequence[Comparison]) -> str:
    reason = NO_BASELINE_REASON
    if any(comparison.baseline for comparison in ended):
        reason = f"{BASELINE} reached no finite result to compare with"
    sentence = _capitalised_sentence(reason)
    timed = [comparison.group for comparison in ended if comparison.group.speed]
    if not timed:
        return sentence
    fastest = max(timed, key=lambda group: group.speed.mean if group.speed else 0)
    return f"{sentence} Fastest: {fastest.name}: {_group_facts(fastest)}."


def _unjudged_sentence(ended: Sequence[Comparison]) -> str:
    """Compare speed and memory, which one seed measures; quality needs more."""
    timed = [other for other in _complete_others(ended) if other.speed_ratio]
    if not timed:
        return f"Stay with {BASELINE}: no other precision finished."
    fastest = _fastest(timed)
    least = _least_memory_words(timed, fastest)
    gap = f" ({fastest.difference.value:+.2g})" if fastest.difference else ""
    costs = _cost_words(fastest, f"Try {fastest.group.name} with more seeds", "nothing")
    quality = f"{fastest.group.jobs[0].quality} differs{gap}"
    advice = _typed([_more_seeds(fastest)], ended)
    return f"{costs}{least}. Whether {quality} takes more seeds to judge.{advice}"


def _judged_sentence(ended: Sequence[Comparison]) -> str:
    """Name the fastest group that is not worse; several seeds on both sides judge quality."""
    quality = ended[0].group.jobs[0].quality
    others = _complete_others(ended)
    fit = [other for other in others if other.speed_ratio and other.is_not_worse]
    if not fit:
        worse = []
        for other in others:
            if other.difference and other.is_judged and not other.is_not_worse:
                worse.append(f"{other.group.name} is {difference_words(other.difference)[0]}")
        reason = f"in {quality} {join_names(worse)}" if worse else "no other one finished in full"
        return f"Stay with {BASELINE}: {reason}.{_typed([f'precision={BASELINE}'], ended)}"
    pick = _fastest(fit)
    assert pick.group.quality is not None
    assert pick.difference is not None
    verdict, numbers = difference_words(pick.difference)
    evidence = ", ".join(filter(None, [numbers, f"{pick.group.quality.n} seeds"]))
    costs = _cost_words(pick, f"Train in {pick.group.name}", "nothing as good")
    least = _least_memory_words(fit, pick)
    name = pick.group.name if pick.speed_verdict == "faster" else BASELINE
    advice = _typed(f"precision={name}".split(), [pick])
    return f"{costs}; {quality}: {verdict} ({evidence}){least}.{advice}"


def _complete_others(ended: Sequence[Comparison]) -> list[Comparison]:
    """Return the complete groups other than the baseline."""
    others = [comparison for comparison in ended if not comparison.is_baseline]
    return [other for other in others if other.group.is_complete]


def _cost_words(comparison: Comparison, lead: str, nothing: str) -> str:
    """Return the fastest group's speed and memory, after what to do.

    Args:
        comparison: the fastest group.
        lead: what to do where it is faster.
        nothing: what did not train faster, where it is not.
    """
    name = comparison.group.name
    ratio = comparison.speed_ratio
    if comparison.speed_verdict == "faster":
        text = f"{lead}: {speed_words(comparison)}"
    elif comparison.speed_verdict == "unclear":
        over_seeds = format_range(ratio) and f" ({format_range(ratio)} over seeds)"
        speed = f"{format_ratio(ratio)} × as fast{over_seeds}"
        text = f"Stay with {BASELINE}: {nothing} was measurably faster. {name} is {speed}"
    else:
        is_slower = comparison.speed_verdict == "slower"
        range_words = format_range(ratio) and f" ({format_range(ratio)} ×)"
        even = f"about as fast as {BASELINE}{range_words}"
        speed = speed_words(comparison) if is_slower else even
        text = f"Stay with {BASELINE}: {nothing} trained faster. {name} is {speed}"
    return ", ".join(filter(None, [text, _memory_clause(comparison)]))


def _memory_clause(comparison: Comparison) -> str:
    words = memory_words(comparison)
    return f"with {words}" if words else ""


def _least_memory_words(others: Sequence[Comparison], named: Comparison) -> str:
    """Return the group with the least memory, empty if it is the named one or hardly less."""
    known = [other for other in others if other.memory_ratio is not None]
    least = min(known, key=lambda other: other.memory_ratio or 0.0, default=named)
    if least is named:
        return ""
    named_ratio = 1.0 if named.memory_ratio is None else named.memory_ratio
    # Neither the named group nor 32-true may need about as little.
    limit = MAX_WORTHWHILE_MEMORY_SHARE * min(named_ratio, 1.0)
    if (least.memory_ratio or 0.0) > limit:
        return ""
    return f"; least memory: {least.group.name} {_memory_clause(least)}"


def _fastest(comparisons: Sequence[Comparison]) -> Comparison:
    return max(comparisons, key=lambda c: c.speed_ratio.value if c.speed_ratio else 0)


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
    cells: dict[tuple[str, str], Comparison]

    @classmethod
    def of_device(cls, compared: Sequence[Comparison], device: str) -> "_Grid":
        """Return the groups of a device."""
        cells = {}
        for comparison in compared:
            group = comparison.group
            if group.device != device:
                continue
            setting = shared_settings(group.settings)
            # The precision with the keys that it does not share with 32-true.
            shared = setting.split()
            own_keys = [word for word in group.settings.split() if word not in shared]
            cells[" ".join([group.precision, *own_keys]), setting] = comparison
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
        best = {id(_measured_best(grid.column(setting))) for setting in grid.columns}
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
        if any(cell.note == "best" for row in rows for cell in row):
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
        direction = candidate.group.jobs[0].direction
        others = [qualities_by_seed(c.group) for c in ended if c is not candidate]
        differences = [quality_difference(values, other, direction) for other in others]
        if all(difference.verdict is Verdict.BETTER for difference in differences):
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
            yield name, ", ".join([*_counts(row, _verdict_word), *_counts(row, _speed_word)])


def _speed_word(comparison: Comparison) -> str:
    """Return the verdict on speed in words, empty without one."""
    words = {"even": "about as fast", "unclear": "speed unclear"}
    return words.get(comparison.speed_verdict, comparison.speed_verdict)


def _verdict_word(comparison: Comparison) -> str:
    """Return the verdict on quality in words, empty for an evaluated checkpoint."""
    if comparison.group.is_evaluation:
        return ""
    if comparison.difference is None:
        return _NOT_COMPARED
    return VERDICT_WORDS[comparison.difference.verdict]


def _counts(row: dict[str, Comparison], word_of: Callable[[Comparison], str]) -> Iterator[str]:
    """Yield each word with the number of settings that it holds for, the most frequent first."""
    settings_by_word = grouped((word_of(each), setting) for setting, each in row.items())
    settings_by_word.pop("", None)
    for word, settings in sorted(settings_by_word.items(), key=lambda item: -len(item[1])):
        text = f"{word} in {len(settings)} of {len(row)} settings"
        if word in _NAMED_WORDS and len(settings) < len(row):
            text += f" ({join_names(settings)})"
        yield text


def _settings_sentence(ended: Sequence[Comparison], every: Sequence[Comparison]) -> str:
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


def _best_group(groups: Sequence[Group]) -> Group:
    """Return the group with the best mean quality; every group must have one."""
    pick = max if groups[0].jobs[0].direction == "max" else min
    return pick(groups, key=lambda group: group.quality.mean if group.quality else math.nan)


def _best_sentence(groups: Sequence[Group]) -> str:
    """Return the best group, and the best group of each other precision."""
    best = _best_group(groups)
    sentence = f"Best {best.jobs[0].quality}: {best.name} with {format_mean_sd(best.quality)}"
    rest = [group for group in groups if group.precision != best.precision]
    by_precision = grouped((group.precision, group) for group in rest)
    others = [_best_group(of_precision) for of_precision in by_precision.values()]
    if others:
        names = join_names(f"{group.name} with {format_mean_sd(group.quality)}" for group in others)
        sentence += f"; best of the other precisions: {names}"
    if all(len(group.jobs) == 1 for group in groups):
        sentence += "; one seed each: not judged"
    return f"{sentence}."
