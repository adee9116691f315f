"""State a sweep's result in one or two sentences: what the numbers show, and what failed.

Each function writes the sentence of one situation (several seeds, one seed, no baseline, ...);
`_device_sentence` chooses among them.
"""

import math
from collections.abc import Sequence

from runner.modes.tables import shared_settings
from runner.sweeps.report.settings_summary import (
    best_group,
    settings_sentence,
    speed_word,
    verdict_word,
)
from runner.sweeps.report.wording import (
    MAX_LISTED_NAMES,
    difference_words,
    format_mean_sd,
    format_range,
    join_names,
    memory_name,
    memory_words,
    speed_words,
)
from runner.sweeps.verdict.compare import BASELINE, Comparison, Group, sweep_letter
from runner.utils.formatting import format_number

NO_BASELINE_REASON = f"no {BASELINE} job to compare with; add precision={BASELINE}"
MAX_WORTHWHILE_MEMORY_SHARE = 0.95
"""Another group's memory is mentioned if it is at most this share of the named group's and of
the baseline's."""
FAILURE_WORDS = {
    "diverged": "diverged",
    "failed": "failed",
    "stopped": "stopped",
    "unavailable": "unavailable here",
}


def recommended_precision(comparisons: Sequence[Comparison]) -> Comparison | None:
    """Return the fastest group that is measurably faster than 32-true and not worse in quality.

    Returns:
        32-true itself if no other group is such. None if the sweep cannot answer: it has no
        baseline, one seed, other settings swept, or several devices.
    """
    finished = [comparison.group for comparison in comparisons if comparison.group.finished_count]
    # Each combination of settings and device has an answer of its own: no row is marked as the one.
    if len({(group.settings, group.device) for group in finished}) > 1:
        return None
    if not any(comparison.is_judged for comparison in comparisons):
        return None
    candidates = [comparison for comparison in comparisons if _is_recommendable(comparison)]
    if not any(candidate.is_baseline for candidate in candidates):
        return None
    return _fastest(candidates)


def _is_recommendable(comparison: Comparison) -> bool:
    """Return whether the group is 32-true or faster and not worse, and ended in full."""
    group = comparison.group
    if not group.is_complete or group.is_evaluation:
        return False
    if comparison.speed_ratio is None:
        return False
    if comparison.is_baseline:
        return True
    return comparison.speed_verdict == "faster" and comparison.is_not_worse


def conclusion_text(comparisons: Sequence[Comparison], missing_jobs: str = "") -> str:
    """Return the result of a sweep and, in a sentence of its own, what did not end well.

    Args:
        comparisons: as compare_with_baselines() returns them.
        missing_jobs: which of the sweep's jobs did not begin; see SweepData.missing_jobs_clause.
    """
    sentences = [conclusion_sentence(comparisons), failure_sentence(comparisons, missing_jobs)]
    return " ".join(filter(None, sentences))


def conclusion_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return what the numbers show, one sentence per device."""
    if any(sweep_letter(comparison.group.name) for comparison in comparisons):
        return _two_sweeps_sentence(comparisons)
    by_device: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.group.quality:
            by_device.setdefault(comparison.group.device, []).append(comparison)
    if not by_device:
        return _no_result_sentence(comparisons)
    sentences = {}
    for device, ended in by_device.items():
        every = [comparison for comparison in comparisons if comparison.group.device == device]
        sentences[device] = _device_sentence(ended, every)
    if len(sentences) == 1:
        return next(iter(sentences.values()))
    parts = []
    for device, sentence in sentences.items():
        name = device or "an unknown device"
        parts.append(f"On {name}: {sentence}")
    return " ".join(parts)


def _two_sweeps_sentence(comparisons: Sequence[Comparison]) -> str:
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


def _no_result_sentence(comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return "No job wrote a result."
    # Modes like plan and inspect finish without a quality: that is no failure.
    if any(comparison.group.counts.get("finished") for comparison in comparisons):
        return "Nothing was trained or evaluated."
    return "No job finished with a finite result."


def failure_sentence(comparisons: Sequence[Comparison], missing_jobs: str = "") -> str:
    """Return which groups diverged, failed, stopped or cannot run here; empty if none."""
    parts = []
    if missing_jobs:
        parts.append(missing_jobs)
    groups = [comparison.group for comparison in comparisons]
    for outcome, words in FAILURE_WORDS.items():
        names = [_failed_share(group, outcome) for group in groups if group.counts.get(outcome)]
        if names:
            parts.append(f"{words}: {join_names(names)}")
    if not parts:
        return ""
    return f"{_capitalise('; '.join(parts))}."


def _capitalise(text: str) -> str:
    """Return the text with a capital first letter; str.capitalize() would lower all others."""
    return f"{text[0].upper()}{text[1:]}"


def _failed_share(group: Group, outcome: str) -> str:
    """Return a group's name, with the number of its jobs that ended so unless all did."""
    count = group.counts[outcome]
    if count == len(group.jobs):
        return group.name
    return f"{group.name} ({count} of {len(group.jobs)})"


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
        return _single_group_sentence(ended[0])
    if len({group.settings for group in groups}) > 1:
        return settings_sentence(ended, every)
    others = [comparison for comparison in ended if not comparison.is_baseline]
    if len(others) == len(ended):
        return _no_baseline_sentence(ended)
    if not any(comparison.speed_ratio for comparison in others):
        return _untimed_sentence(others)
    if any(comparison.is_judged for comparison in ended):
        return _judged_sentence(ended)
    return _unjudged_sentence(ended)


def _single_group_sentence(only: Comparison) -> str:
    group = only.group
    facts = _group_facts(group)
    if only.is_baseline:
        return f"Only {group.name} ended: {facts}."
    addition = "add another precision"
    if group.precision != BASELINE:
        addition = f"add precision={BASELINE}"
    return f"Only {group.name} ended: {facts}; to compare, {addition}."


def _untimed_sentence(others: Sequence[Comparison]) -> str:
    """Compare quality alone: some jobs were too short for their speed to mean much."""
    against = ""
    compared = [_quality_facts(other) for other in others if other.difference]
    if compared:
        quality = others[0].group.jobs[0].quality
        against = f" {quality} against {BASELINE}: {join_names(compared)}."
    jobs = [job for other in others for job in other.group.jobs]
    if all(job.kernels == "emulated" for job in jobs):
        return f"Emulated: the hardware itself is needed to measure the speed.{against}"
    return f"Too short for a comparison of speed; train for more steps.{against}"


def _quality_facts(comparison: Comparison) -> str:
    """Return a group's name, mean quality, and the verdict on its difference to 32-true's."""
    assert comparison.difference is not None
    group = comparison.group
    words, numbers = difference_words(comparison.difference)
    separator = ", " if numbers.startswith("identical") else " "
    verdict = separator.join(filter(None, (words, numbers)))
    return f"{group.name} {format_mean_sd(group.quality)} ({verdict})"


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
    by_checkpoint: dict[str, list[Group]] = {}
    for group in groups:
        if group.change:
            by_checkpoint.setdefault(shared_settings(group.settings), []).append(group)
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
    lightest = min(others, key=_weights_mib)
    nearest = min(others, key=_change_size)
    # One group can be both: it is named once.
    changes = dict.fromkeys([_change_words(lightest), _change_words(nearest)])
    trained_quality = ""
    if first.quality and first.change:
        trained_quality = format_number(first.quality.mean - first.change.mean)
    quality = first.jobs[0].quality
    return f"{quality} was {trained_quality} as trained in {trained_in}: {'; '.join(changes)}."


def _weights_mib(group: Group) -> float:
    return group.weights_mib.mean if group.weights_mib else math.inf


def _change_size(group: Group) -> float:
    return abs(group.change.mean) if group.change else math.inf


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
    sentence = f"{_capitalise(reason)}."
    timed = [comparison.group for comparison in ended if comparison.group.speed]
    if not timed:
        return sentence
    fastest = max(timed, key=lambda group: group.speed.mean if group.speed else 0)
    return f"{sentence} Fastest: {fastest.name}: {_group_facts(fastest)}."


def _unjudged_sentence(ended: Sequence[Comparison]) -> str:
    """Compare speed and memory, which one seed measures; quality needs more."""
    others = _complete_others(ended)
    timed = [other for other in others if other.speed_ratio]
    if not timed:
        return f"Only {BASELINE} ended well; nothing compares with it."
    fastest = _fastest(timed)
    costs = _cost_words(fastest, "Nothing trained faster")
    gap = ""
    if fastest.difference:
        quality = fastest.group.jobs[0].quality
        gap = f" ({fastest.difference.value:+.2g} {quality})"
    least = _least_memory_words(timed, fastest)
    return f"{costs}{least}; quality not judged{gap}: {_unjudged_reason(ended)}."


def _unjudged_reason(ended: Sequence[Comparison]) -> str:
    groups = [comparison.group for comparison in ended]
    single = [group.name for group in groups if group.quality and group.quality.n == 1]
    if not single:
        return "no spread over the seeds"
    # The seed of a training by another trainer may be unknown.
    has_seeds = any(job.seed is not None for group in groups for job in group.jobs)
    advice = "add seed=0,1,2" if has_seeds else "train each with several seeds"
    whose = "each" if len(single) == len(ended) else f"of {join_names(single)}"
    return f"one seed {whose}; {advice}"


def _judged_sentence(ended: Sequence[Comparison]) -> str:
    """Name the fastest group that is not worse; several seeds on both sides judge quality."""
    quality = ended[0].group.jobs[0].quality
    others = _complete_others(ended)
    fit = [other for other in others if other.speed_ratio and other.is_not_worse]
    if not fit:
        reason = "no other precision ended in full and was found not to be worse"
        return f"Stay with {BASELINE}: {reason} in {quality}."
    pick = _fastest(fit)
    assert pick.difference is not None
    verdict, numbers = difference_words(pick.difference)
    seed_count = pick.group.quality.n if pick.group.quality else 0
    evidence = f"{seed_count} seeds"
    if numbers:
        evidence = f"{numbers}, {evidence}"
    costs = _cost_words(pick, "Nothing as good trained faster")
    least = _least_memory_words(fit, pick)
    return f"{costs}, and {verdict} in {quality} ({evidence}){least}."


def _complete_others(ended: Sequence[Comparison]) -> list[Comparison]:
    """Return the complete groups other than the baseline."""
    others = [comparison for comparison in ended if not comparison.is_baseline]
    return [other for other in others if other.group.is_complete]


def _cost_words(comparison: Comparison, nothing_faster: str) -> str:
    """Return the fastest group's speed and memory; nothing_faster introduces one that is not."""
    name = comparison.group.name
    speed = _speed_clause(comparison)
    if comparison.speed_verdict == "faster":
        text = f"{name} trains {speed}"
    elif comparison.speed_verdict == "unclear":
        text = f"{name} is {speed}"
    else:
        text = f"{nothing_faster} than {BASELINE}: {name} is {speed}"
    return ", ".join(filter(None, [text, _memory_clause(comparison)]))


def _speed_clause(comparison: Comparison) -> str:
    """Return for example `1.42 × as fast as 32-true`, or that it is about as fast."""
    if comparison.speed_verdict == "unclear":
        between = format_range(comparison.speed_ratio)
        return f"neither measurably faster nor slower than {BASELINE} ({between} ×)"
    if comparison.speed_verdict in ("faster", "slower"):
        return speed_words(comparison)
    if comparison.speed_ratio is None:
        return "not timed"
    return f"about as fast as {BASELINE}"


def _memory_clause(comparison: Comparison) -> str:
    if comparison.memory_ratio is None:
        return ""
    return f"with {memory_words(comparison) or f'the same {memory_name(comparison)}'}"


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
