"""What is said of one precision: its verdict, the reason, its health."""

import math

from runner.sweep.report.compare import BASE
from runner.sweep.report.conclusion import format_interval, format_ratio
from runner.sweep.report.paired_test import LEAST
from runner.sweep.report.ranking import PrecisionVerdict
from runner.utils.formatting import format_number


def outcome_words(line: PrecisionVerdict) -> str:
    """The verdict in few words."""
    if line.outcome == "diverged":
        return f"diverged at step {line.step}"
    if line.outcome == "worse" and line.judged:
        return f"worse by {format_interval(line.judged.gap, line.judged.half)}"
    words = {
        "fit": "indistinguishable",
        "unclear": "not enough evidence",
        "slow": "too slow here",
        "failed": "cannot train this",
        "unavailable": "not on this machine",
        "baseline": "the yardstick",
    }
    if line.outcome == "recommended":
        return "recommended"
    if line.judged and line.judged.verdict == "better":
        return "better"
    return words[line.outcome]


def outcome_reason(line: PrecisionVerdict) -> str:
    """The reason, what float32's numbers say, and what was tried."""
    return "; ".join(filter(None, (reason_sentence(line), line.found, _skips(line), _tried(line))))


def _skips(line: PrecisionVerdict) -> str:
    """The remedy where a loss scale begins too high."""
    scale, skipped = line.group.loss_scale, line.group.skipped
    if line.outcome != "worse" or scale is None or skipped is None or not skipped.high:
        return ""
    return (
        "steps were skipped until the loss scale had fallen; try "
        f"precision.loss_scale.init_scale={scale.low:g}"
    )


def _loss(line: PrecisionVerdict) -> str:
    judged = line.judged
    if judged is None:
        return "the yardstick"
    if judged.verdict == "better":
        return f"lower by {format_interval(-judged.gap, judged.half)}"
    return f"indistinguishable from {BASE}'s"


def _tried(line: PrecisionVerdict) -> str:
    gaps = (
        f"{words} did not come to its end" if math.isnan(gap) else f"{words} loss {gap:+.2g}"
        for words, gap in line.tried
    )
    return f"tried on one seed: {', '.join(gaps)}" if line.tried else ""


def health_words(line: PrecisionVerdict) -> str:
    """What the numbers went through: skipped steps, the scale, weights that did not move."""
    group, parts = line.group, []
    steps = sum(job.steps for job in group.jobs)
    skipped = sum(job.skipped_steps or 0 for job in group.jobs)
    if skipped:
        parts.append(f"{skipped / max(steps, 1):.1%} of steps overflowed")
    if group.loss_scale:
        parts.append(f"loss scale {format_number(group.loss_scale.low)} at the end")
    stagnant = [job.stagnant_share for job in group.jobs if job.stagnant_share]
    if stagnant and max(stagnant) >= 0.01:
        parts.append(f"{max(stagnant):.0%} of the weights did not move")
    return "; ".join(parts)


def reason_sentence(line: PrecisionVerdict) -> str:
    """The numbers behind the verdict, or what kept the precision from one."""
    group, judged = line.group, line.judged
    if line.outcome in ("failed", "unavailable", "diverged") and group.reasons:
        return group.reasons[0].split("\n")[0]
    if line.outcome == "slow":
        least = min(job.steps for job in group.jobs)
        return f"a trial came to step {least} in more than four times what {BASE} takes"
    if judged is None:
        return _spread(line) if line.name == BASE else ""
    seeds = f"{judged.n} seeds"
    if judged.n < LEAST:
        return f"loss {judged.gap:+.2g} over {judged.n} of {LEAST} seeds that a verdict needs"
    tolerated = f"tolerated {format_number(judged.margin)}"
    return f"loss {format_interval(judged.gap, judged.half, '+')}, {tolerated}, {seeds}"


def _spread(line: PrecisionVerdict) -> str:
    loss = line.group.loss
    if loss is None:
        return ""
    if loss.sd is None:
        return f"loss {format_number(loss.mean)}, one seed"
    return f"loss {format_number(loss.mean)}, seeds differ by {format_number(loss.sd)}"


def gain_words(line: PrecisionVerdict) -> str:
    """What it costs and ends at, beside 32-true."""
    found = " and ".join(filter(None, [_speed_gain(line), _memory_gain(line)]))
    return f"{found or 'no costlier'}, and its loss is {_loss(line)}"


def _speed_gain(line: PrecisionVerdict) -> str:
    c = line.beside
    if c is None or c.speed is None or c.pace not in ("faster", "slower"):
        return ""
    return f"{format_ratio(c.speed)} × as fast as {BASE}"


def _memory_gain(line: PrecisionVerdict) -> str:
    c = line.beside
    if c is None or c.memory is None or f"{c.memory:.2f}" == "1.00":
        return ""
    what = "weights and optimizer state" if line.group.on_cpu else "peak memory"
    return f"{c.memory:.2f} × its {what}"
