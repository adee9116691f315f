"""Word the cells of one precision in mode=advise: verdict, reason, numerical health."""

import math

from runner.sweep.report.compare import BASELINE
from runner.sweep.report.non_inferiority import MIN_SEEDS
from runner.sweep.report.number_text import format_interval
from runner.sweep.report.ranking import PrecisionVerdict
from runner.utils.formatting import format_number

RATING_WORDS = {
    "recommended": "recommended",
    "baseline": "baseline",
    "fit": "indistinguishable",
    "unclear": "not enough evidence",
    "slow": "too slow here",
    "failed": "cannot train this",
    "unavailable": "not on this machine",
}
MIN_STAGNANT_SHARE = 0.01
"""Share of the weights that did not move, from which the table mentions it."""


def rating_words(verdict: PrecisionVerdict) -> str:
    """Return the verdict in few words."""
    test = verdict.test
    if verdict.rating == "diverged":
        return f"diverged at step {verdict.diverged_step}"
    if verdict.rating == "worse" and test:
        return f"worse by {format_interval(test.mean_difference, test.ci_half_width)}"
    if verdict.rating != "recommended" and test and test.decision == "better":
        return "better"
    return RATING_WORDS[verdict.rating]


def rating_reason(verdict: PrecisionVerdict) -> str:
    """Return the reason of a verdict: numbers, float32's finding, remedies, attempted sets."""
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
    if verdict.rating in ("failed", "unavailable", "diverged") and group.reasons:
        return group.reasons[0].split("\n")[0]
    if verdict.rating == "slow":
        step = min(job.steps for job in group.jobs)
        return f"a trial reached step {step} in more than four times {BASELINE}'s time"
    if test is None:
        return _baseline_loss_words(verdict) if verdict.name == BASELINE else ""
    if test.n < MIN_SEEDS:
        gap = f"{test.mean_difference:+.2g}"
        return f"loss {gap} over {test.n} of {MIN_SEEDS} seeds that a verdict needs"
    interval = format_interval(test.mean_difference, test.ci_half_width, "+")
    return f"loss {interval}, tolerated {format_number(test.margin)}, {test.n} seeds"


def _baseline_loss_words(verdict: PrecisionVerdict) -> str:
    loss = verdict.group.loss
    if loss is None:
        return ""
    if loss.sd is None:
        return f"loss {format_number(loss.mean)}, one seed"
    return f"loss {format_number(loss.mean)}, seeds differ by {format_number(loss.sd)}"


def _loss_scale_remedy(verdict: PrecisionVerdict) -> str:
    """Return the remedy if the loss scale began too high, else an empty text."""
    scale = verdict.group.loss_scale
    skipped = verdict.group.skipped
    if verdict.rating != "worse" or scale is None:
        return ""
    # Without a skipped step the scale did not begin too high.
    if skipped is None or not skipped.high:
        return ""
    return (
        "steps were skipped until the loss scale had fallen; try "
        f"precision.loss_scale.init_scale={scale.low:g}"
    )


def _attempts_words(verdict: PrecisionVerdict) -> str:
    """Return the module sets that were tried, each with its loss minus 32-true's."""
    attempts = []
    for overrides, gap in verdict.attempted_module_sets:
        if math.isnan(gap):
            attempts.append(f"{overrides} did not finish")
        else:
            attempts.append(f"{overrides} loss {gap:+.2g}")
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
