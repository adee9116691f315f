"""State what the jobs of a sweep show on each device, and which words to type next.

Each function writes the answer of one situation (several seeds, one seed, no baseline, ...);
`_device_answer` chooses among them. In a sweep over precision and something else, precisions are
compared within each setting: `settings_blocks` has a table of them, and a sentence counts for how
many settings each verdict holds.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from runner.core import fmt
from runner.output.markup import Block, Cell, Heading, Items, Table, Text
from runner.sweeps.report.wording import (
    MAX_LISTED_NAMES,
    OUTCOME_WORDS,
    capitalised_sentence,
    difference_words,
    format_interval,
    format_mean_sd,
    format_range,
    format_ratio,
    join_names,
    memory_words,
    outcome_words,
    speed_word,
    speed_words,
    verdict_word,
)
from runner.sweeps.verdict.compare import (
    BASELINE,
    MIN_GAIN_SEEDS,
    Comparison,
    Group,
    has_several_models,
    qualities_by_seed,
)
from runner.sweeps.verdict.ranking import jobs_of
from runner.sweeps.verdict.statistics import MAX_SEEDS, MIN_SEEDS, Tolerance, Verdict, quality_tests
from runner.tracking.result_table import shared_settings
from runner.training.callbacks.runner_callbacks import MIN_TIMED_MS

NO_BASELINE_REASON = f"no {BASELINE} job to compare with; add precision={BASELINE}"
MAX_WORTHWHILE_MEMORY_SHARE = 0.95
"""Another group's memory is mentioned if it is at most this share of the named group's and of
the baseline's."""
FAILURES = ("diverged", "failed", "stopped", "refused", "unavailable")
"""Outcomes without a result, in the order of the sentence on them."""
TIMED_STEPS_FACTOR = 4
"""Jobs that were too short should take this multiple of the shortest time that is measured."""
MAX_SUMMARIES = 3
"""Precisions in the conclusion; the report's list has all."""
_NAMED_VERDICTS = (Verdict.BETTER, Verdict.STALLED, Verdict.WORSE, None)
"""Verdicts, and no verdict, that are rare and matter: the settings are named."""
_BEST_NOTE = (
    "best: measurably better than every other precision of its column (t tests of the differences "
    "over seeds, at 5 % for all of them together). A column without a mark has no measurable best."
)
Grid = Mapping[str, Mapping[str, Comparison]]
"""The groups of one device by setting, then by precision; combinations that were not swept are
missing. The name of a precision has keys of its own, such as precision.keep_fp32=[head]."""


@dataclass(frozen=True)
class DeviceAnswer:
    """What the jobs of one device say, and what to type next.

    Attributes:
        text: one or two sentences.
        words: overrides to type: one `precision=` for the training that the answer decides on,
            else what the sweep's own command lacks for an answer.
        aim: what the words are for, where the text does not say so.
        pick: see Answer.pick.
    """

    text: str
    words: tuple[str, ...] = ()
    aim: str = ""
    pick: Comparison | None = None


def device_answers(comparisons: Sequence[Comparison]) -> dict[str, DeviceAnswer]:
    """Return the answer of each device that has a result, by the device's name.

    Args:
        comparisons: see SweepData.compared.
    """
    by_device = fmt.grouped((c.group.device, c) for c in comparisons if c.group.quality)
    return {device: _device_answer(ended, comparisons) for device, ended in by_device.items()}


def no_result_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return that no group has a quality."""
    if not comparisons:
        return "No job wrote a result."
    # Modes like plan and explain finish without a quality: that is no failure.
    if any(comparison.group.counts["finished"] for comparison in comparisons):
        return "Nothing was trained or evaluated."
    return "No job finished with a finite result."


def two_sweeps_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return the verdicts on each group of two sweeps against 32-true of the first one."""
    clauses = []
    for comparison in comparisons:
        if not comparison.baseline or comparison.is_baseline:
            continue
        words = [verdict_word(comparison), speed_word(comparison)]
        clauses.append(f"{comparison.group.name}: {', '.join(filter(None, words)) or 'no result'}")
    if clauses:
        return f"Against {BASELINE} of A: {'; '.join(clauses)}."
    return f"Nothing is compared: A has no {BASELINE} job with the settings of another one."


def failure_sentence(comparisons: Sequence[Comparison], missing_jobs: str = "") -> str:
    """Return which groups diverged, failed, stopped or cannot run here; empty if none."""
    parts = [missing_jobs] if missing_jobs else []
    for outcome in FAILURES:
        names = []
        for group in (comparison.group for comparison in comparisons):
            count = group.counts[outcome]
            # The number of jobs, unless all ended so.
            share = f" ({count} of {len(group.jobs)})" if count < len(group.jobs) else ""
            names += [f"{group.name}{share}"] if count else []
        if names:
            parts.append(f"{OUTCOME_WORDS.get(outcome, outcome)}: {join_names(names)}")
    return capitalised_sentence("; ".join(parts)) if parts else ""


def frozen_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return which groups train few of their weights and are not compared; empty without any."""
    frozen = [comparison.group for comparison in comparisons if comparison.trains_less]
    names = join_names(f"{g.name} {fmt.format_percent(g.trained_share)}" for g in frozen)
    start = "Not compared, for few of the weights train and the rest is frozen"
    return f"{start}: {names}." if frozen else ""


def _device_answer(ended: Sequence[Comparison], every: Sequence[Comparison]) -> DeviceAnswer:
    """Return the answer of the groups of one device that ended with a quality.

    Args:
        ended: those groups.
        every: all groups of the sweep.
    """
    # From the situation that says least to the one that says most: each test may assume that the
    # situations before it are excluded.
    groups = [comparison.group for comparison in ended]
    if any(group.is_evaluation for group in groups):
        return DeviceAnswer(_evaluation_sentence(groups))
    if len(ended) == 1 and (ended[0].is_baseline or not ended[0].baseline):
        return _only_answer(ended[0])
    if len({group.settings for group in groups}) > 1:
        return DeviceAnswer(settings_sentence(ended, every))
    if not any(comparison.is_baseline for comparison in ended):
        return DeviceAnswer(_no_baseline_sentence(ended))
    others = [other for other in ended if not other.is_baseline and not other.trains_less]
    if not others:
        return DeviceAnswer(f"Stay with {BASELINE}: no other precision trains the same weights.")
    if not any(comparison.speed_ratio for comparison in others):
        return _untimed_answer(others)
    if any(comparison.is_judged for comparison in ended):
        return _judged_answer(ended, others)
    return _unjudged_answer(others)


def _only_answer(comparison: Comparison) -> DeviceAnswer:
    """Return the result of the only group with one, and what to type to compare it."""
    name = comparison.group.name
    facts = _group_facts(comparison.group)
    if comparison.is_baseline:
        return DeviceAnswer(
            f"Stay with {BASELINE}: no other precision finished. It reached {facts}."
        )
    other = "bf16-mixed" if name == BASELINE else name
    words = (f"precision={BASELINE},{other}",)
    return DeviceAnswer(f"{name} finished: {facts}.", words, "to compare")


def _more_seeds(comparisons: Sequence[Comparison], count: int) -> tuple[str]:
    """Return the override for the seeds of groups and a number of further ones."""
    seeds = sorted({job.seed for job in jobs_of(comparisons) if job.seed is not None})
    unused = [seed for seed in range(count + len(seeds)) if seed not in seeds]
    return (f"seed={','.join(map(str, [*seeds, *unused[:count]]))}",)


def _untimed_answer(others: Sequence[Comparison]) -> DeviceAnswer:
    """Compare quality alone: some jobs were too short for their speed to mean much."""
    parts = []
    words: tuple[str, ...] = ()
    aim = ""
    # What does harm comes first: of many only some are named.
    for other in sorted(others, key=lambda other: (not other.is_worse, -other.loss_gap)):
        if not other.difference:
            continue
        assert other.group.quality
        verdict, numbers = difference_words(other.difference)
        if other.is_judged:
            numbers = ", ".join(filter(None, [verdict, numbers]))
        else:
            words = _more_seeds(others, MIN_SEEDS - 1)
            aim = "to judge the differences"
        # Without its standard deviation: the difference has another ±, an interval.
        mean = fmt.format_number(other.group.quality.mean)
        parts.append(f"{other.group.name} {mean} ({numbers})")
    quality = others[0].group.metric
    against = f" {quality} against {BASELINE}: {join_names(parts)}." if parts else ""
    jobs = jobs_of(others)
    if all(job.kernels == "emulated" for job in jobs):
        text = f"Emulated: the hardware itself is needed to measure the speed.{against}"
        return DeviceAnswer(text, words, aim)
    timed_ms = min((job.steps * job.step_ms for job in jobs if job.step_ms), default=MIN_TIMED_MS)
    factor = math.ceil(TIMED_STEPS_FACTOR * MIN_TIMED_MS / timed_ms) if timed_ms else 1
    steps = max(job.steps for job in jobs) * max(factor, 2)
    text = f"Too short for a comparison of speed; train for more steps.{against}"
    return DeviceAnswer(text, (f"train.max_steps={steps}", *words), aim)


def _group_facts(group: Group) -> str:
    """Return a group's mean quality, its number of seeds and its speed."""
    facts = f"{group.metric} {format_mean_sd(group.quality)}"
    if group.quality and group.quality.n > 1:
        facts += f" ({group.quality.n} seeds)"
    if group.speed:
        facts += f", {fmt.format_number(group.speed.mean)} examples/s"
    return facts


def _evaluation_sentence(groups: Sequence[Group]) -> str:
    """Return a sentence for each checkpoint and other setting, or the best group if many."""
    evaluated = [group for group in groups if group.change]
    by_checkpoint = fmt.grouped((shared_settings(group.settings), group) for group in evaluated)
    if not 1 <= len(by_checkpoint) <= MAX_LISTED_NAMES:
        best = best_group(groups)
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
    assert first.quality
    assert first.change
    before = fmt.format_number(first.quality.mean - first.change.mean)
    return f"{first.metric} was {before} as trained in {trained_in}: {'; '.join(changes)}."


def _change_words(group: Group) -> str:
    assert group.change
    weights = ""
    if group.weights_mib:
        weights = f" ({fmt.format_number(group.weights_mib.mean)} MiB of weights)"
    return f"{group.name}{weights} changes it by {group.change.mean:+.3g}"


def _no_baseline_sentence(ended: Sequence[Comparison]) -> str:
    reason = NO_BASELINE_REASON
    if any(comparison.baseline for comparison in ended):
        reason = f"{BASELINE} reached no finite result to compare with"
    sentence = capitalised_sentence(reason)
    groups = [comparison.group for comparison in ended]
    fastest = max(groups, key=lambda group: group.speed.mean if group.speed else 0.0)
    if not fastest.speed:
        return sentence
    return f"{sentence} Fastest: {fastest.name}: {_group_facts(fastest)}."


def _unjudged_answer(others: Sequence[Comparison]) -> DeviceAnswer:
    """Compare speed and memory, which one seed measures; quality needs more."""
    timed = [other for other in others if other.speed_ratio and other.group.is_complete]
    if not timed:
        return DeviceAnswer(f"Stay with {BASELINE}: no other precision finished.")
    fastest = _fastest(timed)
    if fastest.speed_verdict == "faster" and fastest.has_stalled:
        return _open_answer(fastest, others)
    least = _least_memory_words(timed, fastest)
    gap = f" ({fastest.difference.value:+.2g})" if fastest.difference else ""
    costs = _cost_words(fastest, f"Try {fastest.group.name} with more seeds", "nothing")
    quality = f"{fastest.group.metric} differs{gap}"
    words = _more_seeds(others, MIN_SEEDS - 1)
    return DeviceAnswer(f"{costs}{least}. Whether {quality} takes more seeds to judge.", words)


def _judged_answer(ended: Sequence[Comparison], others: Sequence[Comparison]) -> DeviceAnswer:
    """Decide where several seeds on both sides judge quality.

    Recommended is the fastest group that is measurably faster and shown to be as good. Where a
    faster one is neither shown to be as good nor found worse, the answer is open.
    """
    quality = ended[0].group.metric
    baseline = next(comparison for comparison in ended if comparison.is_baseline)
    complete = [other for other in others if other.group.is_complete and other.difference]
    timed = [other for other in complete if other.speed_ratio and not other.is_worse]
    stay = (f"precision={BASELINE}",)
    if not timed:
        worse = []
        for other in complete:
            if other.difference and other.is_worse:
                worse.append(f"{other.group.name} is {difference_words(other.difference)[0]}")
        reason = f"in {quality} {join_names(worse)}" if worse else "no other one finished in full"
        return DeviceAnswer(f"Stay with {BASELINE}: {reason}.", stay, pick=baseline)
    faster = [other for other in timed if other.speed_verdict == "faster"]
    as_good = (Verdict.BETTER, Verdict.INDISTINGUISHABLE)
    fit = [other for other in faster if other.has_learned and other.verdict in as_good]
    if faster and not fit:
        return _open_answer(_fastest(faster), ended)
    pick = _fastest(fit or timed)
    assert pick.difference
    verdict, numbers = difference_words(pick.difference)
    evidence = ", ".join(filter(None, [numbers, f"{pick.difference.n} seeds"]))
    costs = _cost_words(pick, f"Train in {pick.group.name}", "nothing as good")
    least = _least_memory_words(timed, pick)
    words = (f"precision={pick.group.precision}",) if fit else stay
    text = f"{costs}; {quality}: {verdict} ({evidence}){least}."
    ratio = pick.speed_ratio
    is_unclear = pick.speed_verdict == "unclear" and not pick.was_busy
    if ratio and is_unclear and ratio.value > 1 + MIN_GAIN_SEEDS:
        return DeviceAnswer(text, _more_seeds(ended, ratio.n), "to measure the speed")
    return DeviceAnswer(text, words, pick=pick if fit else baseline)


def _open_answer(rival: Comparison, ended: Sequence[Comparison]) -> DeviceAnswer:
    """Say why the fastest group is not recommended yet, and what would decide."""
    group = rival.group
    gains = ", ".join(filter(None, [speed_words(rival), memory_words(rival, "with ")]))
    start = f"Stay with {BASELINE} for now: {group.name} is {gains}, but"
    if not rival.has_learned:
        return DeviceAnswer(f"{start} where nothing is learned nothing can be judged.")
    if rival.has_stalled:
        words = (f"precision={BASELINE},{group.precision}", "precision.update=kahan")
        share = fmt.format_percent(group.stagnant_share)
        text = f"{start} the last step moved none of {share} of its weights."
        return DeviceAnswer(text, words, "to keep such updates")
    difference = rival.difference
    assert difference
    quality = group.metric
    worst = rival.loss_gap + difference.ci_half_width
    numbers = f"{format_interval(difference.value, difference.ci_half_width, '+')}, "
    if math.isnan(difference.margin):
        words = ("advise.max_gap=0.01",)
        text = f"{start} the seeds of {BASELINE} do not differ, so that no tolerance is known."
        return DeviceAnswer(text, words, "to accept a difference of 0.01")
    text = (
        f"{start} its {quality} may be {worst:.2g} worse ({numbers}{difference.n} seeds, tolerated "
        f"{difference.margin:.2g})."
    )
    if difference.verdict is Verdict.UNJUDGED:
        text = f"{start} one seed does not show whether its {quality} differs."
    count = difference.seeds_needed
    if count is None:
        return DeviceAnswer(
            f"{text} At this difference {MAX_SEEDS} seeds would not show that it is not."
        )
    seconds = sum(fmean(job.seconds for job in other.group.jobs) for other in ended)
    added = fmt.format_duration(seconds * (count - difference.n))
    text = f"{text} About {count} seeds would decide, {added} more."
    return DeviceAnswer(text, _more_seeds(ended, count - difference.n))


def _cost_words(comparison: Comparison, lead: str, nothing: str) -> str:
    """Return the fastest group's speed and memory, after what to do.

    Args:
        comparison: the fastest group.
        lead: what to do where it is faster.
        nothing: what did not train faster, where it is not.
    """
    interval = format_range(comparison.speed_ratio)
    gain = "trained"
    speed = speed_words(comparison)
    if comparison.speed_verdict == "unclear":
        gain = "was measurably"
        between = interval and f" (95 % interval {interval})"
        speed = f"{format_ratio(comparison.speed_ratio)} × as fast{between}"
    elif comparison.speed_verdict == "even":
        speed = f"about as fast as {BASELINE}{interval and f' ({interval} ×)'}"
    text = f"Stay with {BASELINE}: {nothing} {gain} faster. {comparison.group.name} is {speed}"
    if comparison.speed_verdict == "faster":
        text = f"{lead}: {speed}"
    return ", ".join(filter(None, [text, memory_words(comparison, "with ")]))


def _least_memory_words(others: Sequence[Comparison], named: Comparison) -> str:
    """Return the group with the least memory, empty if it is the named one or hardly less."""

    def memory(comparison: Comparison) -> float:
        return 1.0 if comparison.memory_ratio is None else comparison.memory_ratio

    least = min(others, key=memory)
    # Neither the named group nor 32-true may need about as little.
    if memory(least) > MAX_WORTHWHILE_MEMORY_SHARE * min(memory(named), 1.0):
        return ""
    return f"; least memory: {least.group.name} {memory_words(least, 'with ')}"


def _fastest(comparisons: Sequence[Comparison]) -> Comparison:
    return max(comparisons, key=lambda c: c.speed_ratio.value if c.speed_ratio else 0)


def settings_blocks(compared: Sequence[Comparison]) -> Iterator[Block]:
    """Yield a table of precisions × settings for each device, and a summary for each precision.

    A setting is what a sweep varies beside precision and seed, for example a learning rate or a
    model. Nothing is yielded for a sweep that does not compare precisions in several settings.
    """
    devices = dict.fromkeys(comparison.group.device for comparison in compared)
    grids = {}
    for device in devices:
        grid = _grid(compared, device)
        if sum(len(column) > 1 for column in grid.values()) > 1:
            grids[device] = grid
    if not grids:
        return
    yield Heading("Precisions in each setting")
    for device, grid in grids.items():
        if len(grids) > 1:
            yield Text(f"On {device or 'an unknown device'}:")
        best = [_measured_best([*column.values()]) for column in grid.values()]
        rows = []
        for row in _precisions(grid):
            cells = [_quality_cell(column.get(row), best) for column in grid.values()]
            rows.append([Cell(row), *cells])
        yield Table(["precision", *grid], rows)
        summaries = [*_summaries(grid)]
        if summaries:
            yield Items(summaries)
        if any(best):
            yield Text(_BEST_NOTE, "small")
    if has_several_models([comparison.group for comparison in compared]):
        yield Text("Qualities of different models or data are not compared.", "small")


def _grid(compared: Sequence[Comparison], device: str) -> Grid:
    """Return the groups of a device."""
    cells = []
    for comparison in compared:
        group = comparison.group
        shared = shared_settings(group.settings)
        # The precision with the keys that it does not share with 32-true.
        own_keys = [word for word in group.settings if word not in shared]
        if group.device == device:
            name = " ".join([group.precision, *own_keys])
            cells.append((" ".join(shared), (name, comparison)))
    return {setting: dict(column) for setting, column in fmt.grouped(cells).items()}


def _precisions(grid: Grid) -> dict[str, None]:
    return dict.fromkeys(name for column in grid.values() for name in column)


def _quality_cell(comparison: Comparison | None, best: Sequence[Comparison | None]) -> Cell:
    """Return a group's quality, or how its jobs ended without one; empty if it was not swept."""
    if not comparison:
        return Cell("")
    group = comparison.group
    if not group.quality:
        return Cell(outcome_words(group), "bad")
    text = format_mean_sd(group.quality)
    return Cell(text, "good", "best") if comparison in best else Cell(text)


def _measured_best(column: Sequence[Comparison]) -> Comparison | None:
    """Return the group that is measurably better than every other one of a setting, if any is."""
    ended = [comparison for comparison in column if comparison.group.quality]
    for candidate in ended:
        values = qualities_by_seed(candidate.group)
        direction = candidate.group.direction
        others = [qualities_by_seed(c.group) for c in ended if c is not candidate]
        # Better by whatever amount: nothing is tolerated.
        none = Tolerance(max_gap=0.0)
        tests = [
            quality_tests([values], other, direction, none, len(others))[0] for other in others
        ]
        is_better = tests and all(test.verdict is Verdict.BETTER for test in tests)
        if is_better and not candidate.has_stalled:
            return candidate
    return None


def _summaries(grid: Grid) -> Iterator[tuple[str, str]]:
    """Yield (precision, for how many settings each verdict against 32-true holds)."""
    for name in _precisions(grid):
        row = {}
        for setting, column in grid.items():
            comparison = column.get(name)
            if comparison and comparison.baseline and not comparison.is_baseline:
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
        if row[settings[0]].verdict in named and len(settings) < len(row):
            text += f" ({join_names(settings)})"
        yield text


def settings_sentence(ended: Sequence[Comparison], every: Sequence[Comparison]) -> str:
    """Return the best group, and how precisions compare with 32-true in each setting.

    Args:
        ended: the comparisons of one device whose groups have a quality.
        every: all comparisons of the sweep.
    """
    groups = [comparison.group for comparison in ended]
    sentences: list[str] = []
    if not has_several_models(groups):
        sentences.append(_best_sentence(groups))
    grid = _grid(every, groups[0].device)
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
