"""Word verdicts and ratios, for the tables and sentences of reports and of mode=advise."""

import math

from runner.sweeps.report.compare import BASELINE, Comparison
from runner.sweeps.report.number_text import format_interval, format_ratio
from runner.sweeps.report.ranking import PrecisionVerdict
from runner.sweeps.report.statistics import MIN_SEEDS, Difference, Verdict
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.formatting import format_number
from runner.utils.markup import Tone

VERDICT_WORDS = {
    Verdict.BETTER: "better",
    Verdict.WORSE: "worse",
    Verdict.SAME: "no measurable difference",
    Verdict.INDISTINGUISHABLE: "indistinguishable",
    Verdict.UNCLEAR: "not enough evidence",
    Verdict.UNJUDGED: "no verdict",
    Verdict.RECOMMENDED: "recommended",
    Verdict.BASELINE: "baseline",
    Verdict.DIVERGED: "diverged",
    Verdict.SLOW: "too slow here",
    Verdict.FAILED: "cannot train this",
    Verdict.UNAVAILABLE: "not on this machine",
}
VERDICT_TONES: dict[Verdict, Tone] = {
    **dict.fromkeys((Verdict.RECOMMENDED, Verdict.BETTER), "good"),
    **dict.fromkeys((Verdict.WORSE, Verdict.DIVERGED, Verdict.FAILED), "bad"),
    **dict.fromkeys(
        (Verdict.UNCLEAR, Verdict.UNJUDGED, Verdict.SLOW, Verdict.UNAVAILABLE), "quiet"
    ),
}
MIN_STAGNANT_SHARE = 0.01
"""Share of the weights that did not move, from which the table mentions it."""


def difference_words(difference: Difference) -> tuple[str, str]:
    """Return the verdict on a difference to the baseline, and the numbers behind it."""
    words = VERDICT_WORDS[difference.verdict]
    value = difference.value
    half_width = difference.ci_half_width
    if difference.verdict is Verdict.UNJUDGED:
        seeds = " in every seed" if half_width == 0 else ", one seed"
        return words, f"{value:+.2g}{seeds}: no spread"
    if difference.verdict is Verdict.SAME:
        is_identical = half_width == 0
        numbers = format_interval(value, half_width, "+")
        return words, "identical in every seed" if is_identical else numbers
    return f"{words} by {format_interval(abs(value), half_width)}", ""


def speed_words(comparison: Comparison) -> str:
    """Return a group's speed, for example `1.42 × as fast as 32-true`."""
    baseline = comparison.baseline.precision if comparison.baseline else BASELINE
    return f"{format_ratio(comparison.speed_ratio)} × as fast as {baseline}"


def memory_words(comparison: Comparison) -> str:
    """Return a group's memory, for example `0.60 × its peak memory`; empty if it is the same."""
    # Compared as printed: "1.00 × its memory" would read as a difference.
    ratio = "" if comparison.memory_ratio is None else f"{comparison.memory_ratio:.2f}"
    return "" if ratio in ("", "1.00") else f"{ratio} × its {memory_name(comparison)}"


def memory_name(comparison: Comparison) -> str:
    """Return which memory is compared; see Group.memory_mib."""
    return "weights and optimizer state" if comparison.group.is_on_cpu else "peak memory"


def rating_words(verdict: PrecisionVerdict) -> str:
    """Return the verdict of mode=advise in few words."""
    if verdict.rating is Verdict.DIVERGED:
        return f"diverged at step {verdict.diverged_step}"
    if verdict.rating is Verdict.WORSE and verdict.test:
        return difference_words(verdict.test)[0]
    return VERDICT_WORDS[verdict.rating]


def rating_reason(verdict: PrecisionVerdict) -> str:
    """Return the reason of a verdict: numbers, float32's finding, what was tried."""
    parts = (
        reason_sentence(verdict),
        verdict.float32_finding,
        _loss_scale_remedy(verdict),
        _attempts_words(verdict),
    )
    return "; ".join(filter(None, parts))


def reason_sentence(verdict: PrecisionVerdict) -> str:
    """Return the numbers behind a verdict, or what prevented one."""
    group = verdict.group
    test = verdict.test
    has_no_test = verdict.rating in (Verdict.FAILED, Verdict.UNAVAILABLE, Verdict.DIVERGED)
    if has_no_test and group.reasons:
        return group.reasons[0].split("\n")[0]
    if verdict.rating is Verdict.SLOW:
        step = min(job.steps for job in group.jobs)
        return f"a trial reached step {step} in more than four times {verdict.baseline}'s time"
    if test is None:
        return _baseline_loss_words(verdict) if verdict.name == verdict.baseline else ""
    if test.n < MIN_SEEDS:
        gap = f"{verdict.sign * test.value:+.2g}"
        return f"{verdict.noun} {gap} over {test.n} of {MIN_SEEDS} seeds that a verdict needs"
    interval = format_interval(verdict.sign * test.value, test.ci_half_width, "+")
    return f"{verdict.noun} {interval}, tolerated {format_number(test.margin)}, {test.n} seeds"


def _baseline_loss_words(verdict: PrecisionVerdict) -> str:
    group = verdict.group
    # Any other metric than the loss is the quality of the trials.
    spread = group.loss if verdict.metric == VAL_LOSS else group.quality
    if spread is None:
        return ""
    mean = f"{verdict.noun} {format_number(spread.mean)}"
    if spread.sd is None:
        return f"{mean}, one seed"
    return f"{mean}, seeds differ by {format_number(spread.sd)}"


def _loss_scale_remedy(verdict: PrecisionVerdict) -> str:
    """Return the remedy if the loss scale began too high, else an empty text."""
    scale = verdict.group.loss_scale
    skipped = verdict.group.skipped
    if verdict.rating is not Verdict.WORSE or scale is None:
        return ""
    # Without a skipped step the scale did not begin too high.
    if skipped is None or not skipped.high:
        return ""
    return (
        "steps were skipped until the loss scale had fallen; try "
        f"precision.loss_scale.init_scale={scale.low:g}"
    )


def _attempts_words(verdict: PrecisionVerdict) -> str:
    """Return the remedies that were tried, each with its loss minus the baseline's."""
    attempts = []
    for overrides, gap in verdict.attempted_remedies:
        if math.isnan(gap):
            attempts.append(f"{overrides} did not finish")
        else:
            attempts.append(f"{overrides} {verdict.noun} {verdict.sign * gap:+.2g}")
    if not attempts:
        return ""
    return f"tried on one seed: {', '.join(attempts)}"


def health_words(verdict: PrecisionVerdict) -> str:
    """Return what happened to the numbers: skipped steps, final scale, weights that stagnated."""
    group = verdict.group
    parts = []
    steps = sum(job.steps for job in group.jobs)
    skipped = sum(job.skipped_steps or 0 for job in group.jobs)
    if skipped:
        parts.append(f"{skipped / max(steps, 1):.1%} of steps overflowed")
    if group.loss_scale:
        parts.append(f"loss scale {format_number(group.loss_scale.low)} at the end")
    stagnant = max((job.stagnant_share or 0.0 for job in group.jobs), default=0.0)
    if stagnant >= MIN_STAGNANT_SHARE:
        parts.append(f"{stagnant:.0%} of the weights did not move")
    return "; ".join(parts)
