"""State what the jobs of a sweep show on each device, and which words to type next.

Each function writes the answer of one situation (several seeds, one seed, no baseline, ...);
`_device_conclusion` chooses among them. In a sweep over precision and something else, precisions
are compared within each setting: `settings_blocks` has a table of them, and the answer counts in
how many settings each precision is the one to train in.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from runner.core import fmt
from runner.output.markup import Block, Cell, Heading, Table, Text
from runner.sweeps.report.wording import (
    MAX_LISTED_NAMES,
    OUTCOME_WORDS,
    capitalised_sentence,
    difference_words,
    equal_loss_words,
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
    SECOND_SWEEP,
    Comparison,
    Group,
    has_several_models,
    qualities_by_seed,
)
from runner.sweeps.verdict.ranking import jobs_of
from runner.sweeps.verdict.statistics import (
    MAX_SEEDS,
    MIN_SEEDS,
    Tolerance,
    Verdict,
    format_interval,
    quality_tests,
)
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
MAX_CLAUSES = 2
"""Precisions or verdicts that an answer counts; the table has all."""
_HARMFUL = (Verdict.WORSE, Verdict.STALLED, None)
"""Verdicts, and no verdict, that count first."""
MAX_PARTS = 12
"""Settings or devices whose conclusions stand under an answer."""
_BEST_NOTE = (
    "best: measurably better than every other precision of its row (t tests of the differences "
    "over seeds, at 5 % for all of them together). A row without a mark has no measurable best."
)
Grid = Mapping[str, Mapping[str, Comparison]]
"""The groups of one device by setting, then by precision; combinations that were not swept are
missing. The name of a precision has keys of its own, such as precision.keep_fp32=[head]."""


@dataclass(frozen=True)
class Conclusion:
    """What jobs say that are compared with each other, and what to type next.

    Attributes:
        text: the answer, in at most 15 words.
        details: sentences with the numbers behind it.
        words: overrides to type: one `precision=` for the training that the answer decides on,
            else what the sweep's own command lacks for an answer.
        aim: what the words are for, where the text does not say so.
        pick: see Answer.pick.
        chosen: the precision to train in, with its own keys; empty where that is open.
    """

    text: str
    details: Sequence[str] = ()
    words: tuple[str, ...] = ()
    aim: str = ""
    pick: Comparison | None = None
    chosen: str = ""


def sweep_conclusion(comparisons: Sequence[Comparison]) -> Conclusion:
    """Return what the jobs of a sweep say, over all devices that have a result.

    Args:
        comparisons: see SweepData.compared.
    """
    by_device = fmt.grouped((c.group.device, c) for c in comparisons if c.group.quality)
    parts = {device: _device_conclusion(ended) for device, ended in by_device.items()}
    if not parts:
        return Conclusion(_no_result_sentence(comparisons))
    if len(parts) == 1:
        return next(iter(parts.values()))
    if any(comparison.group.is_evaluation for comparison in comparisons):
        details = [f"On {device}: {part.text}" for device, part in parts.items()]
        return Conclusion(f"Evaluated on {len(parts)} devices, nothing trained.", details)
    named = {}
    for device, part in parts.items():
        whole = " ".join([part.text, *part.details])
        named[f"On {device or 'an unknown device'}"] = replace(part, text=whole)
    return _joint_conclusion(named, "devices")


def _no_result_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return that no group has a quality."""
    if not comparisons:
        return "No job wrote a result."
    # Modes like plan and explain finish without a quality: that is no failure.
    if any(comparison.group.counts["finished"] for comparison in comparisons):
        return "Nothing was trained or evaluated."
    return "No job finished with a finite result."


def two_sweeps_conclusion(comparisons: Sequence[Comparison]) -> Conclusion:
    """Return the verdicts on each group of two sweeps against 32-true of the first one."""
    others = [each for each in comparisons if each.baseline and not each.is_baseline]
    if any(each.group.is_evaluation for each in comparisons):
        return Conclusion("Two sweeps that evaluated: the table has the changes.")
    if not others:
        reason = f"A has no {BASELINE} job with the settings of another one"
        return Conclusion(f"Nothing is compared: {reason}.")
    details = []
    for other in others:
        words = filter(None, [verdict_word(other), speed_word(other)])
        details.append(f"{other.group.name}: {', '.join(words) or 'no result'}.")
    second = [other for other in others if other.group.sweep == SECOND_SWEEP]
    # What does harm comes first: it must not be among what is left out.
    second.sort(key=lambda other: (other.verdict not in _HARMFUL, bool(other.group.quality)))
    counts = Counter(verdict_word(o) if o.group.quality else "without a result" for o in second)
    verdicts = [f"{count} {word}" for word, count in counts.items()]
    return Conclusion(f"B against {BASELINE} of A: {join_names(verdicts)}.", details)


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


def _joint_conclusion(parts: Mapping[str, Conclusion], kind: str) -> Conclusion:
    """Return in how many settings, or on how many devices, each precision is the one to train in.

    Args:
        parts: the conclusion of each, by the setting or the device.
        kind: what they are, in the plural.
    """
    details = [f"{name}: {part.text}" for name, part in [*parts.items()][:MAX_PARTS]]
    if len(parts) > MAX_PARTS:
        details.append(f"{len(parts) - MAX_PARTS} more {kind} are in the table.")
    picks = Counter(part.chosen for part in parts.values() if part.chosen)
    clauses = [f"in {name} in {count}" for name, count in picks.most_common(MAX_CLAUSES)]
    undecided = {part.words: part.aim for part in parts.values() if not part.chosen}
    # Settings that lack the same get it by one command.
    (words, aim), *other_words = [*undecided.items()] or [((), "")]
    if other_words:
        words, aim = (), ""
    if not clauses:
        text = f"None of {len(parts)} {kind} is decided yet."
        return Conclusion(text, details, words, aim)
    (first, count), *_ = picks.most_common(1)
    if count == len(parts):
        text = f"Train in {first} in each of {len(parts)} {kind}."
        return Conclusion(text, details, chosen=first)
    clauses[0] += f" of {len(parts)} {kind}"
    text = f"Train {', '.join(clauses)}."
    return Conclusion(text, details, words, aim)


def _device_conclusion(ended: Sequence[Comparison]) -> Conclusion:
    """Return what the groups of one device say that ended with a quality."""
    # From the situation that says least to the one that says most: each test may assume that the
    # situations before it are excluded.
    groups = [comparison.group for comparison in ended]
    if any(group.is_evaluation for group in groups):
        return _evaluation_conclusion(groups)
    if len(ended) == 1 and (ended[0].is_baseline or not ended[0].baseline):
        return _only_conclusion(ended[0])
    by_setting = fmt.grouped((" ".join(shared_settings(c.group.settings)), c) for c in ended)
    if len(by_setting) > 1:
        return _settings_conclusion(by_setting)
    if not any(comparison.is_baseline for comparison in ended):
        return _no_baseline_conclusion(ended)
    others = [other for other in ended if not other.is_baseline and not other.trains_less]
    if not others:
        return Conclusion(f"Stay with {BASELINE}: no other precision trains the same weights.")
    if not any(comparison.speed_ratio for comparison in others):
        return _untimed_conclusion(others)
    if any(comparison.is_judged for comparison in ended):
        return _judged_conclusion(ended, others)
    return _unjudged_conclusion(others)


def _settings_conclusion(by_setting: Mapping[str, Sequence[Comparison]]) -> Conclusion:
    """Return in how many settings each precision wins, and the best group of all."""
    parts = {}
    for setting, ended in by_setting.items():
        # What has no other precision beside it is in the sentence on the best group alone.
        if any(comparison.baseline and not comparison.is_baseline for comparison in ended):
            parts[setting] = _device_conclusion(ended)
    groups = [comparison.group for ended in by_setting.values() for comparison in ended]
    if has_several_models(groups):
        best = ["Different models or data: their qualities are not compared."]
    else:
        best = _best_sentences(groups)
    if not parts:
        return Conclusion(best[0], best[1:])
    joint = _joint_conclusion(parts, "settings")
    return replace(joint, details=[*joint.details, *best])


def _only_conclusion(comparison: Comparison) -> Conclusion:
    """Return the result of the only group with one, and what to type to compare it."""
    name = comparison.group.name
    facts = _group_facts(comparison.group)
    if comparison.is_baseline:
        text = f"Stay with {BASELINE}: no other precision finished."
        return Conclusion(text, [f"It reached {facts}."])
    other = "bf16-mixed" if name == BASELINE else name
    words = (f"precision={BASELINE},{other}",)
    return Conclusion(f"{name} finished: {facts}.", (), words, "to compare")


def _more_seeds(comparisons: Sequence[Comparison], count: int) -> tuple[str]:
    """Return the override for the seeds of groups and a number of further ones."""
    seeds = sorted({job.seed for job in jobs_of(comparisons) if job.seed is not None})
    unused = [seed for seed in range(count + len(seeds)) if seed not in seeds]
    return (f"seed={','.join(map(str, [*seeds, *unused[:count]]))}",)


def _untimed_conclusion(others: Sequence[Comparison]) -> Conclusion:
    """Compare quality alone: some jobs were too short for their speed to mean much."""
    parts = []
    words: tuple[str, ...] = ()
    aim = ""
    # What does harm comes first: of many only some are named.
    for other in sorted(
        others, key=lambda other: (other.verdict is not Verdict.WORSE, -other.loss_gap)
    ):
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
    details = [f"{quality} against {BASELINE}: {join_names(parts)}."] if parts else []
    jobs = jobs_of(others)
    if all(job.kernels == "emulated" for job in jobs):
        text = "Emulated: the hardware itself is needed to measure the speed."
        return Conclusion(text, details, words, aim)
    timed_ms = min((job.steps * job.step_ms for job in jobs if job.step_ms), default=MIN_TIMED_MS)
    factor = math.ceil(TIMED_STEPS_FACTOR * MIN_TIMED_MS / timed_ms) if timed_ms else 1
    steps = max(job.steps for job in jobs) * max(factor, 2)
    text = "Too short for a comparison of speed; train for more steps."
    return Conclusion(text, details, (f"train.max_steps={steps}", *words), aim)


def _group_facts(group: Group) -> str:
    """Return a group's mean quality, its number of seeds and its speed."""
    facts = f"{group.metric} {format_mean_sd(group.quality)}"
    if group.quality and group.quality.n > 1:
        facts += f" ({group.quality.n} seeds)"
    if group.speed:
        facts += f", {fmt.format_number(group.speed.mean)} examples/s"
    return facts


def _evaluation_conclusion(groups: Sequence[Group]) -> Conclusion:
    """Return how other precisions change each evaluated checkpoint, or the best group if many."""
    evaluated = [group for group in groups if group.change]
    by_checkpoint = fmt.grouped((shared_settings(group.settings), group) for group in evaluated)
    if not 1 <= len(by_checkpoint) <= MAX_LISTED_NAMES:
        best = best_group(groups)
        quality = f"{best.metric} {format_mean_sd(best.quality)}"
        return Conclusion(f"Evaluated, nothing trained: best {best.name} with {quality}.")
    details = [sentence for each in by_checkpoint.values() for sentence in _changes(each)]
    return Conclusion(details[0], details[1:])


def _changes(groups: Sequence[Group]) -> Iterator[str]:
    """Yield how evaluating one checkpoint in other precisions changes its quality."""
    first = groups[0]
    jobs = [job for group in groups for job in group.jobs]
    trained_in = next((job.trained_in for job in jobs if job.trained_in), BASELINE)
    # Evaluated in its own precision, a checkpoint weighs the same and changes by nothing.
    others = [group for group in groups if group.precision != trained_in] or groups
    lightest = min(others, key=lambda g: g.weights_mib.mean if g.weights_mib else math.inf)
    nearest = min(others, key=lambda g: abs(g.change.mean) if g.change else math.inf)
    # One group can be both: it is named once.
    yield from dict.fromkeys([_change_sentence(lightest), _change_sentence(nearest)])
    assert first.quality
    assert first.change
    before = fmt.format_number(first.quality.mean - first.change.mean)
    yield f"{first.metric} was {before} as trained in {trained_in}."


def _change_sentence(group: Group) -> str:
    assert group.change
    weights = ""
    if group.weights_mib:
        weights = f", with {fmt.format_number(group.weights_mib.mean)} MiB of weights"
    return f"{group.name} changes {group.metric} by {group.change.mean:+.3g}{weights}."


def _no_baseline_conclusion(ended: Sequence[Comparison]) -> Conclusion:
    reason = NO_BASELINE_REASON
    if any(comparison.baseline for comparison in ended):
        reason = f"{BASELINE} reached no finite result to compare with"
    text = capitalised_sentence(reason)
    groups = [comparison.group for comparison in ended]
    fastest = max(groups, key=lambda group: group.speed.mean if group.speed else 0.0)
    if not fastest.speed:
        return Conclusion(text)
    return Conclusion(text, [f"Fastest: {fastest.name}: {_group_facts(fastest)}."])


def _unjudged_conclusion(others: Sequence[Comparison]) -> Conclusion:
    """Compare speed and memory, which one seed measures; quality needs more."""
    timed = [other for other in others if other.speed_ratio and other.group.is_complete]
    if not timed:
        return Conclusion(f"Stay with {BASELINE}: {_no_speed_reason(others)}.")
    # What is no faster to an equal loss hides nothing that is.
    fastest = _fastest([other for other in timed if other.speed_verdict == "faster"] or timed)
    is_faster = fastest.speed_verdict == "faster"
    if is_faster and fastest.has_stalled:
        return _open_conclusion(fastest, others)
    text = f"Stay with {BASELINE}: nothing {_gain(fastest)} faster."
    if is_faster:
        text = f"Try {fastest.group.name} with more seeds: {speed_words(fastest)}."
    gap = f" ({fastest.difference.value:+.2g})" if fastest.difference else ""
    open_question = f"Whether {fastest.group.metric} differs{gap} takes more seeds to judge."
    words = _more_seeds(others, MIN_SEEDS - 1)
    return Conclusion(text, [*_cost_sentences(fastest, timed), open_question], words)


def _judged_conclusion(ended: Sequence[Comparison], others: Sequence[Comparison]) -> Conclusion:
    """Decide where several seeds on both sides judge quality.

    Recommended is the fastest group that is measurably faster and shown to be as good. Where a
    faster one is neither shown to be as good nor found worse, the answer is open.
    """
    quality = ended[0].group.metric
    baseline = next(comparison for comparison in ended if comparison.is_baseline)
    complete = [other for other in others if other.group.is_complete and other.difference]
    timed = [
        other for other in complete if other.speed_ratio and other.verdict is not Verdict.WORSE
    ]
    stay = {"words": (f"precision={BASELINE}",), "pick": baseline, "chosen": BASELINE}
    if not timed:
        worse = [other for other in complete if other.verdict is Verdict.WORSE]
        reason = _no_speed_reason(others)
        if worse:
            verb = "is" if len(worse) == 1 else "are"
            reason = f"{join_names(c.group.name for c in worse)} {verb} worse in {quality}"
        return Conclusion(f"Stay with {BASELINE}: {reason}.", [*_verdicts(complete)], **stay)
    faster = [other for other in timed if other.speed_verdict == "faster"]
    as_good = (Verdict.BETTER, Verdict.INDISTINGUISHABLE)
    fit = [other for other in faster if other.has_learned and other.verdict in as_good]
    if faster and not fit:
        return _open_conclusion(_fastest(faster), ended)
    pick = _fastest(fit or timed)
    assert pick.difference
    details = [*_verdicts([pick]), *_cost_sentences(pick, timed)]
    if fit:
        text = f"Train in {pick.group.name}: {speed_words(pick)}, {quality} {verdict_word(pick)}."
        own = _own_keys(pick.group)
        words = (f"precision={pick.group.precision}", *own)
        chosen = " ".join([pick.group.precision, *own])
        return Conclusion(text, details, words, pick=pick, chosen=chosen)
    text = f"Stay with {BASELINE}: nothing as good {_gain(pick)} faster."
    ratio = pick.speed_ratio
    if pick.speed_verdict == "no gain":
        text = f"Stay with {BASELINE}: {pick.group.name} is {speed_word(pick)}."
    is_unclear = pick.speed_verdict == "unclear" and not pick.was_busy
    if ratio and is_unclear and ratio.value > 1 + MIN_GAIN_SEEDS:
        return Conclusion(text, details, _more_seeds(ended, ratio.n), "to measure the speed")
    return Conclusion(text, details, **stay)


def _no_speed_reason(others: Sequence[Comparison]) -> str:
    """Return why none of other precisions can be compared by its speed."""
    is_any_whole = any(other.group.is_complete for other in others)
    return f"no other precision {'was timed' if is_any_whole else 'finished in full'}"


def _verdicts(compared: Sequence[Comparison]) -> Iterator[str]:
    """Yield the verdict on the quality of each group, with the numbers behind it."""
    for comparison in compared:
        if comparison.difference:
            verdict, numbers = difference_words(comparison.difference)
            evidence = ", ".join(filter(None, [numbers, f"{comparison.difference.n} seeds"]))
            yield f"{comparison.group.metric} of {comparison.group.name}: {verdict} ({evidence})."


def _own_keys(group: Group) -> list[str]:
    """Return the settings that the group does not share with its baseline."""
    shared = shared_settings(group.settings)
    return [word for word in group.settings if word not in shared]


def _open_conclusion(rival: Comparison, ended: Sequence[Comparison]) -> Conclusion:
    """Say why the fastest group is not recommended yet, and what would decide."""
    group = rival.group
    speed = f"{format_ratio(rival.speed_ratio)} × as fast"
    start = f"Stay with {BASELINE} for now: {group.name}, {speed},"
    costs = _cost_sentences(rival, [rival])
    if not rival.has_learned:
        details = ["Where nothing is learned nothing can be judged.", *costs]
        return Conclusion(f"{start} cannot be judged.", details)
    if rival.has_stalled:
        words = (f"precision={BASELINE},{group.precision}", "precision.update=kahan")
        share = fmt.format_percent(group.stagnant_share)
        details = [f"The last step moved none of {share} of its weights.", *costs]
        return Conclusion(f"{start} loses its updates.", details, words, "to keep such updates")
    difference = rival.difference
    assert difference
    quality = group.metric
    text = f"{start} may be worse."
    if math.isnan(difference.margin):
        known = f"The seeds of {BASELINE} do not differ, so that no tolerance is known."
        words = ("advise.max_gap=0.01",)
        return Conclusion(text, [known, *costs], words, "to accept a difference of 0.01")
    worst = rival.loss_gap + difference.ci_half_width
    numbers = f"{format_interval(difference.value, difference.ci_half_width, '+')}, "
    evidence = f"{numbers}{difference.n} seeds, tolerated {difference.margin:.2g}"
    details = [f"Its {quality} may be {worst:.2g} worse ({evidence})."]
    if difference.verdict is Verdict.UNJUDGED:
        details = [f"One seed does not show whether its {quality} differs."]
    count = difference.seeds_needed
    if count is None:
        details.append(f"At this difference {MAX_SEEDS} seeds would not show that it is not.")
        return Conclusion(text, [*details, *costs])
    seconds = sum(fmean(job.seconds for job in other.group.jobs) for other in ended)
    added = fmt.format_duration(seconds * (count - difference.n))
    details.append(f"About {count} seeds would decide, {added} more.")
    return Conclusion(text, [*details, *costs], _more_seeds(ended, count - difference.n))


def _gain(fastest: Comparison) -> str:
    """Return the verb of a sentence that nothing was faster than the baseline."""
    return "was measurably" if fastest.speed_verdict == "unclear" else "trained"


def _cost_sentences(named: Comparison, others: Sequence[Comparison]) -> Iterator[str]:
    """Yield a group's speed and memory, and the group with the least memory of all."""
    interval = format_range(named.speed_ratio)
    speed = f"{speed_words(named)}{interval and f' (95 % interval {interval})'}"
    if named.speed_verdict == "even":
        speed = f"about as fast as {BASELINE}{interval and f' ({interval} ×)'}"
    time_part = equal_loss_words(named)
    memory_part = memory_words(named, ", with ")
    # The answer itself says how fast the fastest is.
    if interval or time_part or memory_part or named.speed_verdict != "faster":
        yield f"{named.group.name} is {speed}{time_part}{memory_part}."

    def memory(comparison: Comparison) -> float:
        return 1.0 if comparison.memory_ratio is None else comparison.memory_ratio

    least = min(others, key=memory)
    # Neither the named group nor 32-true may need about as little.
    if memory(least) <= MAX_WORTHWHILE_MEMORY_SHARE * min(memory(named), 1.0):
        yield f"Least memory: {least.group.name} with {memory_words(least)}."


def _fastest(comparisons: Sequence[Comparison]) -> Comparison:
    return max(comparisons, key=lambda c: c.speed_ratio.value if c.speed_ratio else 0)


def settings_blocks(compared: Sequence[Comparison]) -> Iterator[Block]:
    """Yield a table of precisions × settings for each device.

    A setting is what a sweep varies beside precision and seed, for example a learning rate or a
    model. Nothing is yielded for a sweep that does not compare precisions in several settings.
    """
    grids = _grids(compared)
    if not grids:
        return
    yield Heading("Precisions in each setting")
    for device, grid in grids.items():
        if len(grids) > 1:
            yield Text(f"On {device or 'an unknown device'}:")
        best = [_measured_best([*column.values()]) for column in grid.values()]
        names = dict.fromkeys(name for column in grid.values() for name in column)
        rows = []
        for setting, column in grid.items():
            cells = [_quality_cell(column.get(name), best) for name in names]
            rows.append([Cell(setting or "default"), *cells])
        yield Table(["setting", *names], rows)
        if any(best):
            yield Text(_BEST_NOTE, "small")
    if has_several_models([comparison.group for comparison in compared]):
        yield Text("Qualities of different models or data are not compared.", "small")


def _grids(compared: Sequence[Comparison]) -> dict[str, Grid]:
    """Return the groups of each device that compares precisions in several settings."""
    cells = []
    for comparison in compared:
        group = comparison.group
        name = " ".join([group.precision, *_own_keys(group)])
        cells.append(
            (group.device, (" ".join(shared_settings(group.settings)), (name, comparison)))
        )
    grids = {}
    for device, of_device in fmt.grouped(cells).items():
        grid = {setting: dict(column) for setting, column in fmt.grouped(of_device).items()}
        if sum(len(column) > 1 for column in grid.values()) > 1:
            grids[device] = grid
    return grids


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


def best_group(groups: Sequence[Group]) -> Group:
    """Return the group with the best mean quality; every group must have one."""
    pick = max if groups[0].direction == "max" else min
    return pick(groups, key=lambda group: group.quality.mean if group.quality else math.nan)


def _best_sentences(groups: Sequence[Group]) -> list[str]:
    """Return the group with the best mean, then the best group of each other precision."""
    best = best_group(groups)
    sentences = [f"Best mean {best.metric}: {best.name} with {format_mean_sd(best.quality)}."]
    rest = [group for group in groups if group.precision != best.precision]
    by_precision = fmt.grouped((group.precision, group) for group in rest)
    others = [best_group(of_precision) for of_precision in by_precision.values()]
    if others:
        names = join_names(f"{group.name} with {format_mean_sd(group.quality)}" for group in others)
        sentences.append(f"Best of the other precisions: {names}.")
    if all(len(group.jobs) == 1 for group in groups):
        sentences.append("One seed each: which is best is not judged.")
    return sentences
