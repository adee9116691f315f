"""The one sentence that a sweep's numbers carry, and the words that its tables use."""

import math
from collections.abc import Iterable, Sequence

from runner.modes.tables import shared_settings
from runner.sweep.report.compare import BASE, Comparison, Group
from runner.sweep.report.statistics import Difference, Ratio, Spread
from runner.utils.formatting import format_number

NAMED = 3
NO_BASE = f"no {BASE} job to compare with; add precision={BASE}"


def format_mean_sd(spread: Spread | None) -> str:
    """Mean ± standard deviation, to the deviation's second digit; the mean alone of one value."""
    if spread is None:
        return ""
    if not spread.sd:
        return format_number(spread.mean) + (" ± 0" if spread.n > 1 else "")
    return format_interval(spread.mean, spread.sd)


def format_interval(value: float, error: float, sign: str = "") -> str:
    """Both with as many digits as the error's second one asks for; sign="+" shows a value's."""
    places = 1 - math.floor(math.log10(min(error, 1e300))) if error > 0 else 4
    if not -3 < places <= 8:
        return f"{value:{sign}.3g} ± {error:.2g}"
    places = max(0, places)
    return f"{value:{sign}.{places}f} ± {error:.{places}f}"


def format_ratio(ratio: Ratio | None) -> str:
    """A ratio of speeds."""
    return f"{ratio.value:.2f}" if ratio else ""


def format_range(ratio: Ratio | None) -> str:
    """Its range over seeds; empty of one."""
    if ratio is None or ratio.low == ratio.high:
        return ""
    return f"{ratio.low:.2f} to {ratio.high:.2f}"


def quality_sentence(d: Difference) -> tuple[str, str]:
    """What a difference in quality is, and the numbers behind it."""
    if d.half is None:
        return "no verdict", f"{d.value:+.2g}, one seed: no spread"
    if d.half == 0:
        if d.verdict == "same":
            return "no measurable difference", "identical in every seed"
        return "no verdict", f"{d.value:+.2g} in every seed: no spread"
    if d.verdict == "same":
        return "no measurable difference", format_interval(d.value, d.half, "+")
    return f"{d.verdict} by {format_interval(abs(d.value), d.half)}", ""


def join_names(found: Iterable[str], most: int = NAMED) -> str:
    """The first ones, and how many more there are."""
    every = list(found)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def recommended_precision(comparisons: Sequence[Comparison]) -> Comparison | None:
    """The fastest group that is measured to be faster than 32-true and not to be worse in quality,
    else 32-true itself. None where the sweep cannot tell: no baseline, one seed, other settings
    swept, or several devices."""
    if len({(c.group.settings, c.group.device) for c in comparisons if c.group.finished}) > 1:
        return None
    fit = [c for c in comparisons if c.is_base or (c.pace == "faster" and _not_worse(c))]
    fit = [c for c in fit if c.group.sound and c.speed and not c.group.evaluated]
    judged = any(c.quality and c.quality.verdict != "unjudged" for c in comparisons)
    if not judged or not any(c.is_base for c in fit):
        return None
    return max(fit, key=lambda c: c.speed.value if c.speed else 0)


def conclusion(comparisons: Sequence[Comparison], missing: str = "") -> str:
    """What the sweep answers and, in a sentence of its own, what did not end well.

    Args:
        comparisons: as compare() returns them.
        missing: what the sweep did not come to.
    """
    return " ".join(
        filter(None, [conclusion_sentence(comparisons), failure_sentence(comparisons, missing)])
    )


def conclusion_sentence(comparisons: Sequence[Comparison]) -> str:
    """What the numbers carry, in a sentence per device."""
    ended = [c for c in comparisons if c.group.quality]
    devices = list(dict.fromkeys(c.group.device for c in ended))
    told = {d: _on_device([c for c in ended if c.group.device == d]) for d in devices}
    if len(devices) < 2:
        return next(iter(told.values()), _nothing(comparisons))
    return " ".join(f"On {d or 'an unknown device'}: {text}" for d, text in told.items())


def _nothing(comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return "No job left a result."
    if any(c.group.counts.get("finished") for c in comparisons):
        return "Nothing was trained or evaluated."
    return "No job finished with a finite result."


def failure_sentence(comparisons: Sequence[Comparison], missing: str = "") -> str:
    """Who diverged, failed, stopped or cannot run here; empty where all is well."""
    parts = [missing] if missing else []
    words = {
        "diverged": "diverged",
        "failed": "failed",
        "stopped": "stopped",
        "unavailable": "unavailable here",
    }
    for key, word in words.items():
        hit = [c.group for c in comparisons if c.group.counts.get(key)]
        texts = [
            g.name + (f" ({g.counts[key]} of {len(g.jobs)})" if g.counts[key] < len(g.jobs) else "")
            for g in hit
        ]
        if texts:
            parts.append(f"{word}: {join_names(texts)}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _on_device(ended: Sequence[Comparison]) -> str:
    first = ended[0].group
    if any(c.group.evaluated for c in ended):
        return _evaluated([c.group for c in ended])
    if len(ended) == 1 and ended[0].is_base:
        return f"Only {first.name} ended: {_facts(first)}."
    if len(ended) == 1 and ended[0].base is None:
        add = f"add precision={BASE}" if first.precision != BASE else "add another precision"
        return f"Only {first.name} ended: {_facts(first)}; to compare, {add}."
    if len({c.group.settings for c in ended}) > 1:
        return _settings([c.group for c in ended])
    if not any(c.is_base for c in ended):
        return _no_base(ended)
    if not any(c.speed for c in ended if not c.is_base):
        return _untimed([c for c in ended if not c.is_base])
    if any(c.quality and c.quality.verdict != "unjudged" for c in ended):
        return _several(ended)
    return _unjudged(ended)


def _joined_sentence(quality: Difference) -> str:
    """Join a difference's verdict and the numbers behind it."""
    return " ".join(filter(None, quality_sentence(quality)))


def _untimed(others: Sequence[Comparison]) -> str:
    """Quality alone: the jobs were too short, or 32-true's were, for their speed to mean much."""
    told = [
        f"{c.group.name} {format_mean_sd(c.group.quality)} ({_joined_sentence(c.quality)})"
        for c in others
        if c.quality
    ]
    quality = others[0].group.jobs[0].quality if others else ""
    against = f" {quality} against {BASE}: {join_names(told)}." if told else ""
    if all(job.kernels == "emulated" for c in others for job in c.group.jobs):
        return f"Emulated: only the hardware tells speed.{against}"
    return f"Too short for a comparison of speed; train for more steps.{against}"


def _facts(group: Group) -> str:
    assert group.quality is not None
    seeds = f" ({group.quality.n} seeds)" if group.quality.n > 1 else ""
    speed = f", {format_number(group.speed.mean)} examples/s" if group.speed else ""
    return f"{group.jobs[0].quality} {format_mean_sd(group.quality)}{seeds}{speed}"


def _best(groups: Sequence[Group]) -> Group:
    pick = max if groups[0].jobs[0].direction == "max" else min
    return pick(groups, key=lambda g: g.quality.mean if g.quality else math.nan)


def _evaluated(groups: Sequence[Group]) -> str:
    """A sentence for each checkpoint and whatever else was swept, where they are few."""
    changed: dict[str, list[Group]] = {}
    for group in groups:
        if group.change:
            changed.setdefault(shared_settings(group.settings), []).append(group)
    if not 1 <= len(changed) <= NAMED:
        best = _best(groups)
        return f"Evaluated, nothing trained: best {best.name} with {_facts(best)}."
    return " ".join(map(_changes, changed.values()))


def _changes(changed: Sequence[Group]) -> str:
    """Of one checkpoint."""
    quality = changed[0].jobs[0].quality
    own = next((j.trained_in for g in changed for j in g.jobs if j.trained_in), BASE)

    def told(group: Group) -> str:
        assert group.change is not None
        weights = (
            f" ({format_number(group.weights_mib.mean)} MiB of weights)"
            if group.weights_mib
            else ""
        )
        return f"{group.name}{weights} changes it by {group.change.mean:+.3g}"

    others = [g for g in changed if g.precision != own] or changed
    nearest = min(others, key=lambda g: abs(g.change.mean) if g.change else math.inf)
    least = min(others, key=lambda g: g.weights_mib.mean if g.weights_mib else math.inf)
    picked = dict.fromkeys([told(least), told(nearest)])
    first = changed[0]
    before = (
        format_number(first.quality.mean - first.change.mean)
        if first.quality and first.change
        else ""
    )
    return f"{quality} was {before} as trained in {own}: {'; '.join(picked)}."


def _settings(groups: Sequence[Group]) -> str:
    """Other settings were swept, too: the best of each precision."""
    best = _best(groups)
    quality = best.jobs[0].quality
    others = dict.fromkeys(g.precision for g in groups if g.precision != best.precision)
    rest = [_best([g for g in groups if g.precision == precision]) for precision in others]
    texts = [f"{g.name} with {format_mean_sd(g.quality)}" for g in rest]
    also = f"; best of the other precisions: {join_names(texts)}" if texts else ""
    seeds = "; one seed each: no verdict" if all(len(g.jobs) == 1 for g in groups) else ""
    return f"Best {quality}: {best.name} with {format_mean_sd(best.quality)}{also}{seeds}."


def _no_base(ended: Sequence[Comparison]) -> str:
    timed = [c.group for c in ended if c.group.speed]
    base = next((c.base for c in ended if c.base), None)
    why = f"{BASE} reached no finite result to compare with" if base else NO_BASE
    why = f"{why[0].upper()}{why[1:]}"
    if not timed:
        return f"{why}."
    fastest = max(timed, key=lambda g: g.speed.mean if g.speed else 0)
    return f"{why}. Fastest: {fastest.name}: {_facts(fastest)}."


def _pace(c: Comparison) -> str:
    """As `1.42 × as fast as 32-true`, or that it is about as fast."""
    if c.pace == "unclear":
        return f"neither measurably faster nor slower than {BASE} ({format_range(c.speed)} ×)"
    if c.pace not in ("faster", "slower"):
        return f"about as fast as {BASE}" if c.speed else "not timed"
    return f"{format_ratio(c.speed)} × as fast as {BASE}"


def _memory(c: Comparison) -> str:
    if c.memory is None:
        return ""
    what = "weights and optimizer state" if c.group.on_cpu else "peak memory"
    if f"{c.memory:.2f}" == "1.00":
        return f"with the same {what}"
    return f"with {c.memory:.2f} × its {what}"


def _not_worse(c: Comparison) -> bool:
    """Judged, and not found worse."""
    return c.is_base or (c.quality is not None and c.quality.verdict in ("same", "better"))


def _unjudged(ended: Sequence[Comparison]) -> str:
    """Speed and memory are facts of one seed, too."""
    others = [c for c in ended if not c.is_base and c.group.sound and c.speed]
    if not others:
        return f"Only {BASE} ended well; nothing compares with it."
    fastest = max(others, key=lambda c: c.speed.value if c.speed else 0)
    if fastest.pace == "unclear":
        text = f"{fastest.group.name} is {_pace(fastest)}"
    elif fastest.pace != "faster":
        text = f"Nothing trained faster than {BASE}: {fastest.group.name} is {_pace(fastest)}"
    else:
        text = f"{fastest.group.name} trains {_pace(fastest)}"
    text = ", ".join(filter(None, [text, _memory(fastest)]))
    single = [c.group.name for c in ended if c.group.quality and c.group.quality.n == 1]
    lone = "one seed each" if len(single) == len(ended) else f"one seed of {join_names(single)}"
    reason = f"{lone}; add seed=0,1,2" if single else "no spread over the seeds"
    quality = fastest.group.jobs[0].quality
    gap = f" ({fastest.quality.value:+.2g} {quality})" if fastest.quality else ""
    return f"{text}{_least(others, fastest)}; quality not judged{gap}: {reason}."


def _least(others: Sequence[Comparison], than: Comparison) -> str:
    """The least memory, where another has it."""
    known = [c for c in others if c.memory is not None]
    least = min(known, key=lambda c: c.memory or 0.0, default=than)
    mine = 1.0 if than.memory is None else than.memory
    if least is than or (least.memory or 0.0) > 0.95 * min(mine, 1.0):
        return ""
    return f"; least memory: {least.group.name} {_memory(least)}"


def _several(ended: Sequence[Comparison]) -> str:
    """Seeds on both sides: quality is judged, and the fastest that is not worse comes first."""
    quality = ended[0].group.jobs[0].quality
    fit = [c for c in ended if not c.is_base and c.group.sound and c.speed and _not_worse(c)]
    if not fit:
        why = "no other precision ended in full and was found not to be worse"
        return f"Stay with {BASE}: {why} in {quality}."
    pick = max(fit, key=lambda c: c.speed.value if c.speed else 0)
    assert pick.quality is not None
    what, numbers = quality_sentence(pick.quality)
    seeds = f"{pick.group.quality.n if pick.group.quality else 0} seeds"
    judged = f"{what} in {quality} ({numbers}{', ' if numbers else ''}{seeds})"
    if pick.pace == "faster":
        text = f"{pick.group.name} trains {_pace(pick)}"
    elif pick.pace == "unclear":
        text = f"{pick.group.name} is {_pace(pick)}"
    else:
        text = f"Nothing as good trained faster than {BASE}: {pick.group.name} is {_pace(pick)}"
    text = ", ".join(filter(None, [text, _memory(pick)]))
    return f"{text}, and {judged}{_least(fit, pick)}."
