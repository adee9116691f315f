"""State a sweep's result in one or two sentences: what the numbers show, and what failed.

Each function writes the sentence of one situation (several seeds, one seed, no baseline, ...);
`_device_sentence` chooses among them.
"""

import math
from collections.abc import Sequence

from runner.modes.tables import shared_settings
from runner.sweep.report.compare import BASE, Comparison, Group
from runner.sweep.report.number_text import (
    MAX_NAMES,
    difference_words,
    format_mean_sd,
    format_range,
    format_ratio,
    join_names,
)
from runner.utils.formatting import format_number

NO_BASE = f"no {BASE} job to compare with; add precision={BASE}"
WORTHWHILE_MEMORY = 0.95
"""Another group's memory is mentioned if it is below this share of the fastest group's."""
FAILURE_WORDS = {
    "diverged": "diverged",
    "failed": "failed",
    "stopped": "stopped",
    "unavailable": "unavailable here",
}


def recommended_precision(comparisons: Sequence[Comparison]) -> Comparison | None:
    """Return the fastest group that is measurably faster than 32-true and not worse in quality.

    32-true itself if there is none such. None if the sweep cannot tell: no baseline, one seed,
    other settings swept, or several devices.
    """
    if len({(c.group.settings, c.group.device) for c in comparisons if c.group.finished_count}) > 1:
        return None
    candidates = [
        c
        for c in comparisons
        if c.is_baseline or (c.speed_verdict == "faster" and _is_not_worse(c))
    ]
    fit = [
        c for c in candidates if c.group.is_complete and c.speed_ratio and not c.group.is_evaluation
    ]
    if not _is_judged(comparisons) or not any(c.is_baseline for c in fit):
        return None
    return _fastest(fit)


def conclusion(comparisons: Sequence[Comparison], shortfall: str = "") -> str:
    """Return the result of a sweep and, in a sentence of its own, what did not end well.

    Args:
        comparisons: as compare() returns them.
        shortfall: which of the sweep's jobs did not begin; see SweepData.shortfall.
    """
    sentences = [conclusion_sentence(comparisons), failure_sentence(comparisons, shortfall)]
    return " ".join(filter(None, sentences))


def conclusion_sentence(comparisons: Sequence[Comparison]) -> str:
    """Return what the numbers show, one sentence per device."""
    ended = [c for c in comparisons if c.group.quality]
    devices = list(dict.fromkeys(c.group.device for c in ended))
    if not devices:
        return _no_result_sentence(comparisons)
    sentences = [
        _device_sentence([c for c in ended if c.group.device == device]) for device in devices
    ]
    if len(devices) == 1:
        return sentences[0]
    names = [device or "an unknown device" for device in devices]
    return " ".join(f"On {name}: {text}" for name, text in zip(names, sentences, strict=True))


def _no_result_sentence(comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return "No job left a result."
    if any(c.group.counts.get("finished") for c in comparisons):
        return "Nothing was trained or evaluated."
    return "No job finished with a finite result."


def failure_sentence(comparisons: Sequence[Comparison], shortfall: str = "") -> str:
    """Return which groups diverged, failed, stopped or cannot run here; empty if none."""
    parts = [shortfall] if shortfall else []
    for outcome, word in FAILURE_WORDS.items():
        groups = [c.group for c in comparisons if c.group.counts.get(outcome)]
        if groups:
            parts.append(f"{word}: {join_names(_failed_share(g, outcome) for g in groups)}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _failed_share(group: Group, outcome: str) -> str:
    """Return a group's name, with the number of its jobs that ended so unless all did."""
    count = group.counts[outcome]
    if count == len(group.jobs):
        return group.name
    return f"{group.name} ({count} of {len(group.jobs)})"


def _device_sentence(ended: Sequence[Comparison]) -> str:
    """Return the sentence on the groups of one device that ended with a quality."""
    groups = [c.group for c in ended]
    if any(group.is_evaluation for group in groups):
        return _evaluation_sentence(groups)
    if len(ended) == 1 and (ended[0].is_baseline or ended[0].baseline is None):
        return _single_group_sentence(ended[0])
    if len({group.settings for group in groups}) > 1:
        return _settings_sentence(groups)
    if not any(c.is_baseline for c in ended):
        return _no_baseline_sentence(ended)
    others = [c for c in ended if not c.is_baseline]
    if not any(c.speed_ratio for c in others):
        return _untimed_sentence(others)
    if _is_judged(ended):
        return _judged_sentence(ended)
    return _unjudged_sentence(ended)


def _single_group_sentence(only: Comparison) -> str:
    group = only.group
    if only.is_baseline:
        return f"Only {group.name} ended: {_facts(group)}."
    add = f"add precision={BASE}" if group.precision != BASE else "add another precision"
    return f"Only {group.name} ended: {_facts(group)}; to compare, {add}."


def _untimed_sentence(others: Sequence[Comparison]) -> str:
    """Compare quality alone: some jobs were too short for their speed to mean much."""
    compared = [_quality_facts(c) for c in others if c.difference]
    quality = others[0].group.jobs[0].quality if others else ""
    against = f" {quality} against {BASE}: {join_names(compared)}." if compared else ""
    if all(job.kernels == "emulated" for c in others for job in c.group.jobs):
        return f"Emulated: only the hardware tells speed.{against}"
    return f"Too short for a comparison of speed; train for more steps.{against}"


def _quality_facts(c: Comparison) -> str:
    assert c.difference is not None
    verdict = " ".join(filter(None, difference_words(c.difference)))
    return f"{c.group.name} {format_mean_sd(c.group.quality)} ({verdict})"


def _facts(group: Group) -> str:
    assert group.quality is not None
    seeds = f" ({group.quality.n} seeds)" if group.quality.n > 1 else ""
    speed = f", {format_number(group.speed.mean)} examples/s" if group.speed else ""
    return f"{group.jobs[0].quality} {format_mean_sd(group.quality)}{seeds}{speed}"


def _best(groups: Sequence[Group]) -> Group:
    pick = max if groups[0].jobs[0].direction == "max" else min
    return pick(groups, key=lambda group: group.quality.mean if group.quality else math.nan)


def _evaluation_sentence(groups: Sequence[Group]) -> str:
    """Return a sentence for each checkpoint and other setting, or the best group if many."""
    by_checkpoint: dict[str, list[Group]] = {}
    for group in groups:
        if group.change:
            by_checkpoint.setdefault(shared_settings(group.settings), []).append(group)
    if not 1 <= len(by_checkpoint) <= MAX_NAMES:
        best = _best(groups)
        return f"Evaluated, nothing trained: best {best.name} with {_facts(best)}."
    return " ".join(map(_checkpoint_sentence, by_checkpoint.values()))


def _checkpoint_sentence(groups: Sequence[Group]) -> str:
    """Return how evaluating one checkpoint in other precisions changes its quality."""
    first = groups[0]
    trained_in = next((job.trained_in for g in groups for job in g.jobs if job.trained_in), BASE)
    others = [g for g in groups if g.precision != trained_in] or groups
    lightest = min(others, key=lambda g: g.weights_mib.mean if g.weights_mib else math.inf)
    nearest = min(others, key=lambda g: abs(g.change.mean) if g.change else math.inf)
    # One group can be both: it is named once.
    changes = dict.fromkeys([_change_words(lightest), _change_words(nearest)])
    before = ""
    if first.quality and first.change:
        before = format_number(first.quality.mean - first.change.mean)
    quality = first.jobs[0].quality
    return f"{quality} was {before} as trained in {trained_in}: {'; '.join(changes)}."


def _change_words(group: Group) -> str:
    assert group.change is not None
    weights = ""
    if group.weights_mib:
        weights = f" ({format_number(group.weights_mib.mean)} MiB of weights)"
    return f"{group.name}{weights} changes it by {group.change.mean:+.3g}"


def _settings_sentence(groups: Sequence[Group]) -> str:
    """Return the best group of each precision; for a sweep over other settings, too."""
    best = _best(groups)
    quality = best.jobs[0].quality
    precisions = dict.fromkeys(g.precision for g in groups if g.precision != best.precision)
    rest = [_best([g for g in groups if g.precision == precision]) for precision in precisions]
    texts = [f"{group.name} with {format_mean_sd(group.quality)}" for group in rest]
    also = f"; best of the other precisions: {join_names(texts)}" if texts else ""
    seeds = "; one seed each: no verdict" if all(len(g.jobs) == 1 for g in groups) else ""
    return f"Best {quality}: {best.name} with {format_mean_sd(best.quality)}{also}{seeds}."


def _no_baseline_sentence(ended: Sequence[Comparison]) -> str:
    has_baseline = any(c.baseline for c in ended)
    reason = f"{BASE} reached no finite result to compare with" if has_baseline else NO_BASE
    reason = f"{reason[0].upper()}{reason[1:]}"
    timed = [c.group for c in ended if c.group.speed]
    if not timed:
        return f"{reason}."
    fastest = max(timed, key=lambda group: group.speed.mean if group.speed else 0)
    return f"{reason}. Fastest: {fastest.name}: {_facts(fastest)}."


def _unjudged_sentence(ended: Sequence[Comparison]) -> str:
    """Compare speed and memory, which one seed measures; quality needs more."""
    others = [c for c in ended if not c.is_baseline and c.group.is_complete and c.speed_ratio]
    if not others:
        return f"Only {BASE} ended well; nothing compares with it."
    fastest = _fastest(others)
    costs = _cost_words(fastest, "Nothing trained faster")
    quality = fastest.group.jobs[0].quality
    gap = f" ({fastest.difference.value:+.2g} {quality})" if fastest.difference else ""
    least = _least_memory_words(others, fastest)
    return f"{costs}{least}; quality not judged{gap}: {_unjudged_reason(ended)}."


def _unjudged_reason(ended: Sequence[Comparison]) -> str:
    single = [c.group.name for c in ended if c.group.quality and c.group.quality.n == 1]
    if not single:
        return "no spread over the seeds"
    if len(single) == len(ended):
        return "one seed each; add seed=0,1,2"
    return f"one seed of {join_names(single)}; add seed=0,1,2"


def _judged_sentence(ended: Sequence[Comparison]) -> str:
    """Name the fastest group that is not worse; several seeds on both sides judge quality."""
    quality = ended[0].group.jobs[0].quality
    others = [c for c in ended if not c.is_baseline and c.group.is_complete]
    fit = [c for c in others if c.speed_ratio and _is_not_worse(c)]
    if not fit:
        reason = "no other precision ended in full and was found not to be worse"
        return f"Stay with {BASE}: {reason} in {quality}."
    pick = _fastest(fit)
    assert pick.difference is not None
    verdict, numbers = difference_words(pick.difference)
    seeds = f"{pick.group.quality.n if pick.group.quality else 0} seeds"
    evidence = ", ".join(filter(None, [numbers, seeds]))
    costs = _cost_words(pick, "Nothing as good trained faster")
    return f"{costs}, and {verdict} in {quality} ({evidence}){_least_memory_words(fit, pick)}."


def _cost_words(c: Comparison, nothing_faster: str) -> str:
    """Return the fastest group's speed and memory; nothing_faster introduces one that is not."""
    if c.speed_verdict == "faster":
        text = f"{c.group.name} trains {_speed_words(c)}"
    elif c.speed_verdict == "unclear":
        text = f"{c.group.name} is {_speed_words(c)}"
    else:
        text = f"{nothing_faster} than {BASE}: {c.group.name} is {_speed_words(c)}"
    return ", ".join(filter(None, [text, _memory_words(c)]))


def _speed_words(c: Comparison) -> str:
    """Return for example `1.42 × as fast as 32-true`, or that it is about as fast."""
    if c.speed_verdict == "unclear":
        between = format_range(c.speed_ratio)
        return f"neither measurably faster nor slower than {BASE} ({between} ×)"
    if c.speed_verdict in ("faster", "slower"):
        return f"{format_ratio(c.speed_ratio)} × as fast as {BASE}"
    return f"about as fast as {BASE}" if c.speed_ratio else "not timed"


def _memory_words(c: Comparison) -> str:
    if c.memory_ratio is None:
        return ""
    what = "weights and optimizer state" if c.group.is_on_cpu else "peak memory"
    if f"{c.memory_ratio:.2f}" == "1.00":
        return f"with the same {what}"
    return f"with {c.memory_ratio:.2f} × its {what}"


def _least_memory_words(others: Sequence[Comparison], named: Comparison) -> str:
    """Return the group with the least memory, empty if it is the named one or hardly less."""
    known = [c for c in others if c.memory_ratio is not None]
    least = min(known, key=lambda c: c.memory_ratio or 0.0, default=named)
    named_ratio = 1.0 if named.memory_ratio is None else named.memory_ratio
    if least is named or (least.memory_ratio or 0.0) > WORTHWHILE_MEMORY * min(named_ratio, 1.0):
        return ""
    return f"; least memory: {least.group.name} {_memory_words(least)}"


def _fastest(comparisons: Sequence[Comparison]) -> Comparison:
    return max(comparisons, key=lambda c: c.speed_ratio.value if c.speed_ratio else 0)


def _is_judged(comparisons: Sequence[Comparison]) -> bool:
    return any(c.difference and c.difference.verdict != "unjudged" for c in comparisons)


def _is_not_worse(c: Comparison) -> bool:
    """Return whether quality was judged and not found worse."""
    if c.is_baseline:
        return True
    return c.difference is not None and c.difference.verdict in ("same", "better")
