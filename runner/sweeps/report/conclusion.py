"""State what the jobs of a sweep show on each device, and which words to type next.

Each function writes the answer of one situation (several seeds, one seed, no baseline, ...);
`_device_answer` chooses among them. In a sweep over precision and something else, precisions are
compared within each setting, see settings_grid.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from runner.core import fmt
from runner.sweeps.report.settings_grid import best_group, settings_sentence
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
    speed_word,
    speed_words,
    verdict_word,
)
from runner.sweeps.verdict.compare import BASELINE, MIN_GAIN_SEEDS, Comparison, Group
from runner.sweeps.verdict.statistics import MAX_SEEDS, MIN_SEEDS, Verdict
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


@dataclass(frozen=True)
class DeviceAnswer:
    """What the jobs of one device say, and what to type next.

    Attributes:
        text: one or two sentences.
        words: see Answer.words.
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
    return {
        device: _device_answer(ended, [c for c in comparisons if c.group.device == device])
        for device, ended in by_device.items()
    }


def no_result_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return that no group has a quality."""
    if not comparisons:
        return "No job wrote a result."
    # Modes like plan and explain finish without a quality: that is no failure.
    if any(comparison.group.counts.get("finished") for comparison in comparisons):
        return "Nothing was trained or evaluated."
    return "No job finished with a finite result."


def two_sweeps_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return the verdicts on each group of two sweeps against 32-true of the first one."""
    clauses = []
    for comparison in comparisons:
        if comparison.baseline is None or comparison.is_baseline:
            continue
        words = [verdict_word(comparison), speed_word(comparison)]
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
    return capitalised_sentence("; ".join(parts)) if parts else ""


def frozen_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return which groups train few of their weights and are not compared; empty without any."""
    shares = {c.group.name: c.group.trained_share for c in comparisons if c.trains_less}
    texts = join_names(f"{name} {fmt.format_percent(share)}" for name, share in shares.items())
    start = f"Not compared, for few of the weights train and the rest is frozen: {texts}"
    return f"{start}." if shares else ""


def _device_answer(ended: Sequence[Comparison], every: Sequence[Comparison]) -> DeviceAnswer:
    """Return the answer of the groups of one device that ended with a quality.

    Args:
        ended: those groups.
        every: all groups of the device.
    """
    # From the situation that says least to the one that says most: each test may assume that the
    # situations before it are excluded.
    groups = [comparison.group for comparison in ended]
    if any(group.is_evaluation for group in groups):
        return DeviceAnswer(_evaluation_sentence(groups))
    if len(ended) == 1 and (ended[0].is_baseline or ended[0].baseline is None):
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
    jobs = [job for comparison in comparisons for job in comparison.group.jobs]
    seeds = sorted({job.seed for job in jobs if job.seed is not None})
    unused = [seed for seed in range(count + len(seeds)) if seed not in seeds]
    return (f"seed={','.join(map(str, [*seeds, *unused[:count]]))}",)


def _untimed_answer(others: Sequence[Comparison]) -> DeviceAnswer:
    """Compare quality alone: some jobs were too short for their speed to mean much."""
    compared = [other for other in others if other.difference]
    # What does harm comes first: of many only some are named.
    compared.sort(key=lambda other: (not other.is_worse, -_loss_gap(other)))
    parts = []
    for other in compared:
        assert other.difference is not None
        assert other.group.quality is not None
        words = difference_words(other.difference)
        verdict = ", ".join(filter(None, words)) if other.is_judged else words[1]
        # Without its standard deviation: the difference has another ±, an interval.
        mean = fmt.format_number(other.group.quality.mean)
        parts.append(f"{other.group.name} {mean} ({verdict})")
    quality = others[0].group.metric
    against = f" {quality} against {BASELINE}: {join_names(parts)}." if parts else ""
    jobs = [job for other in others for job in other.group.jobs]
    words: tuple[str, ...] = ()
    aim = ""
    if any(not other.is_judged for other in compared):
        words = _more_seeds(others, MIN_SEEDS - 1)
        aim = "to judge the differences"
    if all(job.kernels == "emulated" for job in jobs):
        text = f"Emulated: the hardware itself is needed to measure the speed.{against}"
        return DeviceAnswer(text, words, aim)
    timed_ms = min((job.steps * job.step_ms for job in jobs if job.step_ms), default=MIN_TIMED_MS)
    factor = math.ceil(TIMED_STEPS_FACTOR * MIN_TIMED_MS / timed_ms) if timed_ms else 1
    steps = max(job.steps for job in jobs) * max(factor, 2)
    words = (f"train.max_steps={steps}", *words)
    text = f"Too short for a comparison of speed; train for more steps.{against}"
    return DeviceAnswer(text, words, aim)


def _loss_gap(comparison: Comparison) -> float:
    """Return by how much the quality is worse than the baseline's, in its own unit."""
    assert comparison.difference is not None
    sign = -1 if comparison.group.direction == "max" else 1
    return sign * comparison.difference.value


def _group_facts(group: Group) -> str:
    """Return a group's mean quality, its number of seeds and its speed."""
    assert group.quality is not None
    facts = f"{group.metric} {format_mean_sd(group.quality)}"
    if group.quality.n > 1:
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
    trained_quality = ""
    if first.quality and first.change:
        trained_quality = fmt.format_number(first.quality.mean - first.change.mean)
    quality = first.metric
    return f"{quality} was {trained_quality} as trained in {trained_in}: {'; '.join(changes)}."


def _change_words(group: Group) -> str:
    assert group.change is not None
    weights = ""
    if group.weights_mib:
        weights = f" ({fmt.format_number(group.weights_mib.mean)} MiB of weights)"
    return f"{group.name}{weights} changes it by {group.change.mean:+.3g}"


def _no_baseline_sentence(ended: Sequence[Comparison]) -> str:
    reason = NO_BASELINE_REASON
    if any(comparison.baseline for comparison in ended):
        reason = f"{BASELINE} reached no finite result to compare with"
    sentence = capitalised_sentence(reason)
    timed = [comparison.group for comparison in ended if comparison.group.speed]
    if not timed:
        return sentence
    fastest = max(timed, key=lambda group: group.speed.mean if group.speed else 0)
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
    fit = [other for other in faster if other.has_learned and other.is_as_good]
    if faster and not fit:
        return _open_answer(_fastest(faster), ended)
    pick = _fastest(fit or timed)
    assert pick.group.quality is not None
    assert pick.difference is not None
    verdict, numbers = difference_words(pick.difference)
    evidence = ", ".join(filter(None, [numbers, f"{pick.difference.n} seeds"]))
    costs = _cost_words(pick, f"Train in {pick.group.name}", "nothing as good")
    least = _least_memory_words(timed, pick)
    words = (f"precision={pick.group.precision}",) if fit else stay
    text = f"{costs}; {quality}: {verdict} ({evidence}){least}."
    ratio = pick.speed_ratio
    assert ratio is not None
    if pick.speed_verdict == "unclear" and not pick.was_busy and ratio.value > 1 + MIN_GAIN_SEEDS:
        return DeviceAnswer(text, _more_seeds(ended, ratio.n), "to measure the speed")
    return DeviceAnswer(text, words, pick=pick if fit else baseline)


def _open_answer(rival: Comparison, ended: Sequence[Comparison]) -> DeviceAnswer:
    """Say why the fastest group is not recommended yet, and what would decide."""
    group = rival.group
    gains = ", ".join(filter(None, [speed_words(rival), _memory_clause(rival)]))
    start = f"Stay with {BASELINE} for now: {group.name} is {gains}, but"
    if not rival.has_learned:
        return DeviceAnswer(f"{start} where nothing is learned nothing can be judged.")
    if rival.has_stalled:
        words = (f"precision={BASELINE},{group.precision}", "precision.update=kahan")
        share = fmt.format_percent(group.stagnant_share)
        text = f"{start} the last step moved none of {share} of its weights."
        return DeviceAnswer(text, words, "to keep such updates")
    difference = rival.difference
    assert difference is not None
    quality = group.metric
    worst = _loss_gap(rival) + difference.ci_half_width
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
    name = comparison.group.name
    ratio = comparison.speed_ratio
    interval = format_range(ratio)
    if comparison.speed_verdict == "faster":
        text = f"{lead}: {speed_words(comparison)}"
    elif comparison.speed_verdict == "unclear":
        between = interval and f" (95 % interval {interval})"
        speed = f"{format_ratio(ratio)} × as fast{between}"
        text = f"Stay with {BASELINE}: {nothing} was measurably faster. {name} is {speed}"
    else:
        is_slower = comparison.speed_verdict == "slower"
        even = f"about as fast as {BASELINE}{interval and f' ({interval} ×)'}"
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
