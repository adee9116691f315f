"""Word verdicts, ratios and numbers, for the tables and sentences of reports and of mode=advise."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from runner.core import RunResult, fmt, metric_names
from runner.output.markup import Tone
from runner.sweeps.verdict.advise_request import TIMEOUT_WORDS
from runner.sweeps.verdict.compare import BASELINE, Comparison, Group
from runner.sweeps.verdict.ranking import PrecisionVerdict
from runner.sweeps.verdict.statistics import (
    MIN_SEEDS,
    Difference,
    Ratio,
    Spread,
    Verdict,
    format_interval,
)


class VerdictLook(NamedTuple):
    """How a verdict is shown in a table: its words, and their tone."""

    words: str
    tone: Tone = ""


VERDICT_LOOKS = {
    Verdict.RECOMMENDED: VerdictLook("recommended", "good"),
    Verdict.BASELINE: VerdictLook("baseline"),
    Verdict.BETTER: VerdictLook("better", "good"),
    Verdict.INDISTINGUISHABLE: VerdictLook("within tolerance"),
    Verdict.UNCLEAR: VerdictLook("not enough evidence", "quiet"),
    Verdict.UNJUDGED: VerdictLook("not judged", "quiet"),
    Verdict.STALLED: VerdictLook("weights no longer move", "bad"),
    Verdict.WORSE: VerdictLook("worse", "bad"),
    Verdict.DIVERGED: VerdictLook("diverged", "bad"),
    Verdict.SLOW: VerdictLook("too slow here", "quiet"),
    Verdict.FAILED: VerdictLook("cannot train this", "bad"),
    Verdict.UNAVAILABLE: VerdictLook("not on this machine", "quiet"),
}
OUTCOME_WORDS = {"unavailable": "unavailable here", "refused": "not tried"}
"""Outcomes of jobs whose names say too little."""
MIN_STAGNANT_SHARE = 0.01
"""Share of the weights that did not move, from which the table mentions it."""
MAX_LISTED_NAMES = 3
"""Names in a sentence; the rest are counted."""
MAX_RANGE = 100
"""Upper over lower end of an interval of ratios, above which it says nothing."""


def format_mean_sd(spread: Spread | None) -> str:
    """Return mean ± standard deviation with two digits of the deviation; for one value the mean."""
    if not spread:
        return ""
    if spread.sd:
        return format_interval(spread.mean, spread.sd)
    return f"{fmt.format_number(spread.mean)}{' ± 0' if spread.n > 1 else ''}"


def format_ratio(ratio: Ratio | None) -> str:
    """Return a ratio of speeds with two decimals, empty without one."""
    return f"{ratio.value:.2f}" if ratio else ""


def format_range(ratio: Ratio | None) -> str:
    """Return a ratio's interval over seeds; empty with one seed, and where it says nothing."""
    if not ratio or ratio.low == ratio.high or ratio.high > MAX_RANGE * ratio.low:
        return ""
    return f"{ratio.low:.2f} to {ratio.high:.2f}"


def join_names(names: Iterable[str], limit: int = MAX_LISTED_NAMES) -> str:
    """Return the first names, and how many more there are."""
    return fmt.first_names([*names], limit)


def capitalised_sentence(text: str) -> str:
    """Return a clause as a sentence."""
    # str.capitalize() would lower all letters but the first.
    return f"{text[0].upper()}{text[1:]}."


def outcome_words(group: Group) -> str:
    """Return how the jobs of a group ended."""
    return ", ".join(OUTCOME_WORDS.get(outcome, outcome) for outcome in group.counts)


def verdict_words(comparison: Comparison) -> str:
    """Return the verdict on a group against its baseline, or how its jobs ended without one."""
    if comparison.verdict:
        return VERDICT_LOOKS[comparison.verdict].words
    return "baseline" if comparison.is_baseline else outcome_words(comparison.group)


def difference_words(difference: Difference) -> tuple[str, str]:
    """Return the verdict on a difference to the baseline, and the numbers behind it."""
    words = VERDICT_LOOKS[difference.verdict].words
    value = difference.value
    half_width = difference.ci_half_width
    if difference.verdict is Verdict.UNJUDGED:
        return f"{words} (one seed)", f"{value:+.2g}"
    if difference.verdict in (Verdict.WORSE, Verdict.BETTER):
        return f"{words} by {format_interval(abs(value), half_width)}", ""
    if half_width == value == 0:
        return words, "identical in every seed"
    return words, format_interval(value, half_width, "+")


def common_verdict(comparisons: Sequence[Comparison]) -> str:
    """Return the verdict that all of many differences to the baseline share, else empty."""
    differences = [c.difference for c in comparisons if c.difference]
    # A verdict by how much differs from row to row.
    words = {difference_words(difference)[0] for difference in differences}
    is_common = len(words) == 1 and differences[0].verdict not in (Verdict.WORSE, Verdict.BETTER)
    return words.pop() if is_common and len(differences) > MAX_LISTED_NAMES else ""


def speed_words(comparison: Comparison) -> str:
    """Return a group's speed, for example `1.42 × as fast as 32-true`."""
    baseline = comparison.baseline.precision if comparison.baseline else BASELINE
    return f"{format_ratio(comparison.speed_ratio)} × as fast as {baseline}"


def equal_loss_words(comparison: Comparison) -> str:
    """Return a group's speed to an equal loss, for example `, 0.91 × to equal loss (0.84 to 0.98)`;
    empty where it is unknown."""
    ratio = comparison.equal_loss
    if not ratio:
        return ""
    if not ratio.value:
        return ", not reaching its loss"
    interval = format_range(ratio)
    return f", {format_ratio(ratio)} × to equal loss{interval and f' ({interval})'}"


def memory_words(comparison: Comparison, lead: str = "") -> str:
    """Return a group's memory, for example `0.60 × 32-true's peak memory`; empty if it is the
    same."""
    # Compared as printed: "1.00 × its memory" would read as a difference.
    ratio = "" if comparison.memory_ratio is None else f"{comparison.memory_ratio:.2f}"
    if ratio in ("", "1.00"):
        return ""
    # See RunResult.memory_mib.
    memory = "weights and optimizer state" if comparison.group.is_on_cpu else "peak memory"
    baseline = comparison.baseline.precision if comparison.baseline else BASELINE
    return f"{lead}{ratio} × {baseline}'s {memory}"


def speed_word(comparison: Comparison) -> str:
    """Return the verdict on speed in words, empty without one."""
    words = {"even": "about as fast", "unclear": "speed unclear"}
    words["no gain"] = "no faster to equal loss"
    return words.get(comparison.speed_verdict, comparison.speed_verdict)


def verdict_word(comparison: Comparison) -> str:
    """Return the verdict on quality in words, empty for an evaluated checkpoint."""
    if comparison.group.is_evaluation:
        return ""
    return VERDICT_LOOKS[comparison.verdict].words if comparison.verdict else "not compared"


def rating_words(verdict: PrecisionVerdict) -> str:
    """Return the verdict of mode=advise in few words."""
    if verdict.rating is Verdict.DIVERGED:
        return f"diverged at step {verdict.diverged_step}"
    if verdict.rating is Verdict.WORSE and verdict.test:
        return difference_words(verdict.test)[0]
    return VERDICT_LOOKS[verdict.rating].words


def rating_reason(verdict: PrecisionVerdict) -> str:
    """Return the reason of a verdict: numbers, float32's finding, what was tried."""
    parts = [reason_sentence(verdict), verdict.float32_finding]
    scale = verdict.group.loss_scale
    skipped = verdict.group.skipped
    # Without a skipped step the loss scale did not begin too high.
    if verdict.rating is Verdict.WORSE and scale and skipped and skipped.high:
        parts.append(
            "steps were skipped until the loss scale had fallen; try "
            f"precision.loss_scale.init_scale={scale.low:g}"
        )
    attempts = []
    for overrides, gap in verdict.attempted_remedies:
        loss = f"{verdict.request.noun} {verdict.request.sign * gap:+.2g}"
        attempts.append(f"{overrides} {'did not finish' if math.isnan(gap) else loss}")
    if attempts:
        parts.append(f"tried on one seed: {', '.join(attempts)}")
    return "; ".join(filter(None, parts))


def reason_sentence(verdict: PrecisionVerdict) -> str:
    """Return the numbers behind a verdict, or what prevented one."""
    group = verdict.group
    test = verdict.test
    request = verdict.request
    has_no_test = verdict.rating in (Verdict.FAILED, Verdict.UNAVAILABLE, Verdict.DIVERGED)
    if has_no_test and group.reasons:
        return group.reasons[0].split("\n")[0]
    if verdict.rating is Verdict.SLOW:
        step = min(job.steps for job in group.jobs)
        return f"a trial reached step {step} in {TIMEOUT_WORDS} {request.baseline}'s time"
    if not test:
        # Any other metric than the loss is the quality of the trials.
        spread = group.loss if request.metric == metric_names.VAL_LOSS else group.quality
        if not spread or verdict.name != request.baseline:
            return ""
        deviation = f"seeds differ by {fmt.format_number(spread.sd)}"
        seeds = "one seed" if spread.sd is None else deviation
        return f"{request.noun} {fmt.format_number(spread.mean)}, {seeds}"
    if test.n < MIN_SEEDS:
        gap = f"{request.sign * test.value:+.2g}"
        return f"{request.noun} {gap} over {test.n} of {MIN_SEEDS} seeds that a verdict needs"
    interval = format_interval(request.sign * test.value, test.ci_half_width, "+")
    return f"{request.noun} {interval}, tolerated {fmt.format_number(test.margin)}, {test.n} seeds"


def health_words(verdict: PrecisionVerdict) -> str:
    """Return what happened to the numbers: skipped steps, final scale, weights that stagnated."""
    group = verdict.group
    parts = []
    steps = sum(job.steps for job in group.jobs)
    skipped = sum(job.skipped_steps or 0 for job in group.jobs)
    if skipped:
        parts.append(f"{skipped / max(steps, 1):.1%} of steps overflowed")
    if group.loss_scale:
        parts.append(f"loss scale {fmt.format_number(group.loss_scale.low)} at the end")
    if group.stagnant_share >= MIN_STAGNANT_SHARE:
        parts.append(f"{group.stagnant_share:.0%} of the weights did not move")
    return "; ".join(parts)


def stagnation_sentence(groups: Iterable[Group]) -> str:
    """Return in which groups weights did not move; empty without any."""
    found = [group for group in groups if group.stagnant_share >= MIN_STAGNANT_SHARE]
    names = join_names(f"{group.name} {group.stagnant_share:.0%}" for group in found)
    note = "(updates under half a unit in a weight's last place)"
    return f"Weights that the last step did not move: {names} {note}." if found else ""


def unasked_sentences(results: Iterable[RunResult]) -> list[str]:
    """Return what jobs did not compute as asked, with the precisions."""
    return _with_precisions((text, job.precision) for job in results for text in job.caveats)


def cast_note(results: Iterable[RunResult]) -> str:
    """Return whose casts followed torch's list for CPUs; empty for none."""
    noted = [(result.cast_note, result.precision) for result in results if result.cast_note]
    return " ".join(_with_precisions(noted))


def _with_precisions(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return each text of pairs with a precision once, after its precisions."""
    named = fmt.grouped(pairs).items()
    return [f"{', '.join(dict.fromkeys(precisions))}: {text}" for text, precisions in named]
