"""Say whether mode=gate accepts its precision: by a sequential test, as verdict.json has it.

The test decides on a difference from as few seeds as possible. After each seed from MIN_SEEDS on, a
confidence interval of the mean paired difference is looked at: below the bar it is accepted, above
the bar it is rejected, else another seed is trained. Looking several times raises the chance of an
error, so that each look uses a smaller error rate, the same one for all looks (Pocock, Biometrika
64, 1977, here for Student's t).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean
from typing import Any, Literal

from runner.core import fmt
from runner.sweeps.verdict.advise_request import TIMEOUT_WORDS
from runner.sweeps.verdict.ranking import Advice, PrecisionVerdict
from runner.sweeps.verdict.statistics import (
    ERROR_RATE,
    MIN_SEEDS,
    MeanDifference,
    Verdict,
    format_interval,
)

Decision = Literal["accepted", "rejected", "undecided"]
SIMULATED_SEQUENCES = 100_000
"""Sequences of seeds from which look_error_rate() is found; ERROR_RATE then holds within 0.001."""
SCHEMA_VERSION = 1
"""Of verdict.json; raised where a key changes its meaning or goes away."""
NOT_TRAINED = (Verdict.FAILED, Verdict.UNAVAILABLE)
"""Ratings of a precision that was refused or crashed: no answer about its numbers."""


@dataclass(frozen=True)
class InterimResult:
    """What a look at the seeds so far says.

    Attributes:
        seeds: how many there were.
        gap: mean difference.
        half_width: half the confidence interval of the gap.
        decision: by the interval and the bar.
    """

    seeds: int
    gap: float
    half_width: float
    decision: Decision


def look_until_decided(
    gaps: Sequence[float],
    bar: float,
    max_seeds: int,
    sure_bar: float | None = None,
    resolution: float = 0.0,
) -> list[InterimResult]:
    """Return the looks at a precision until one of them decides; empty below MIN_SEEDS seeds.

    The chance that a precision whose true gap is the bar or more is accepted is at most ERROR_RATE
    over all looks, where differences are normal; and so is the chance that one whose true gap is
    the bar or less is rejected, where the bar is not measured by the same seeds.

    Args:
        gaps: loss minus the baseline's, in the order in which the seeds were trained; finite.
        bar: largest accepted gap.
        max_seeds: seeds after which there is no further look.
        sure_bar: the bar's lower confidence bound, where it is measured by the same seeds.
        resolution: see MeanDifference.
    """
    if len(gaps) < MIN_SEEDS:
        return []
    sure_bar = bar if sure_bar is None else sure_bar
    error_rate = look_error_rate(max_seeds)
    looks: list[InterimResult] = []
    for count in range(MIN_SEEDS, min(len(gaps), max_seeds) + 1):
        gap = fmean(gaps[:count])
        half_width = MeanDifference.of_pairs(gaps[:count], resolution).half_width(error_rate)
        decision: Decision = "undecided"
        if gap + half_width <= sure_bar:
            decision = "accepted"
        elif gap - half_width > bar:
            decision = "rejected"
        looks.append(InterimResult(count, gap, half_width, decision))
        if decision != "undecided":
            break
    return looks


@cache
def look_error_rate(max_seeds: int) -> float:
    """Return the one-sided error rate of each look for ERROR_RATE over all looks.

    It depends on nothing but the number of looks: if the true gap is the bar, Student's t of the
    differences has the same distribution whatever their deviation is. Found by simulation with a
    fixed seed.

    Args:
        max_seeds: seeds at the last look; MIN_SEEDS or more.
    """
    import numpy as np
    from scipy.stats import t

    draws = np.random.default_rng(0).standard_normal((SIMULATED_SEQUENCES, max_seeds))
    counts = np.arange(1, max_seeds + 1)
    means = draws.cumsum(1) / counts
    squares = (draws**2).cumsum(1) - counts * means**2
    least = np.ones(SIMULATED_SEQUENCES)
    for count in range(MIN_SEEDS, max_seeds + 1):
        deviation = np.sqrt(squares[:, count - 1] / (count - 1))
        statistic = means[:, count - 1] / (deviation / np.sqrt(count))
        least = np.minimum(least, t.cdf(statistic, count - 1))
    # The least p value over the looks is below this one in ERROR_RATE of the sequences.
    return float(np.quantile(least, ERROR_RATE))


@dataclass(frozen=True)
class GateVerdict:
    """The answer of mode=gate.

    Attributes:
        decision: accepted, rejected or undecided.
        reason: why, as a clause.
        precision: verdict on the precision that was asked about.
        looks: what the test said after each seed from MIN_SEEDS on, until it decided.
        bar: largest accepted difference; NaN if the baseline's spread, which it follows, is
            unknown.
        sure_bar: its lower confidence bound, below which a difference is accepted.
        advice: what it was computed from.
    """

    decision: Decision
    reason: str
    precision: PrecisionVerdict
    looks: Sequence[InterimResult]
    bar: float
    sure_bar: float
    advice: Advice

    @property
    def exit_status(self) -> int:
        """Return the exit status: 0 accepted, 1 rejected, 3 undecided, 2 if it did not train."""
        status = {"accepted": 0, "rejected": 1, "undecided": 3}[self.decision]
        return 2 if self.precision.rating in NOT_TRAINED else status

    @property
    def overrides(self) -> Sequence[str]:
        """Return the keys that were typed for the precision."""
        return self.advice.request.overrides.get(self.precision.group.precision, ())

    @property
    def name(self) -> str:
        """Return the precision with the keys that were typed for it."""
        return " ".join([self.precision.name, *self.overrides])

    def to_json(self) -> dict[str, Any]:
        """Return the content of verdict.json; docs/gate.md describes the keys."""
        request = self.advice.request
        comparison = self.precision.comparison
        seeds = []
        for seed, gap in self.precision.gaps.items():
            loss = self.advice.baseline_losses[seed]
            values = {"value": request.sign * (loss + gap), "baseline_value": request.sign * loss}
            seeds.append({"seed": seed, **values, "gap": gap})
        last = self.looks[-1] if self.looks else None
        return {
            "schema": SCHEMA_VERSION,
            "verdict": self.decision,
            "exit_status": self.exit_status,
            "reason": self.reason,
            "precision": self.precision.name,
            "overrides": self.overrides,
            "baseline": request.baseline,
            "baseline_recorded_in": request.recorded_in or None,
            "metric": request.metric,
            "direction": request.direction,
            "gap": last and last.gap,
            "gap_half_width": last and last.half_width,
            "bar": None if math.isnan(self.bar) else self.bar,
            "bar_lower_bound": None if math.isnan(self.sure_bar) else self.sure_bar,
            "bar_from": "advise.tolerance" if request.max_gap is None else "advise.max_gap",
            "error_rate": ERROR_RATE,
            "error_rate_of_a_look": look_error_rate(request.seeds),
            "looks": [asdict(look) for look in self.looks],
            "seeds": seeds,
            "max_seeds": request.seeds,
            "steps": request.steps,
            "speed_ratio": comparison.speed_ratio and comparison.speed_ratio.value,
            "equal_loss_speed_ratio": comparison.equal_loss and comparison.equal_loss.value,
            "memory_ratio": comparison.memory_ratio,
            "device": self.precision.group.device,
            "emulated": self.precision.is_emulated,
            "command": self.precision.command,
        }


def gate_verdict(advice: Advice) -> GateVerdict | None:
    """Return the answer of mode=gate so far.

    Returns:
        None for mode=advise, and before the precision that was asked about has a trial.
    """
    request = advice.request
    if request.mode != "gate":
        return None
    precision = next((v for v in advice.verdicts if v.name != request.baseline), None)
    if not precision:
        return None
    bar = request.accepted.gap(advice.baseline_spread)
    sure_bar = request.accepted.certain_gap(advice.baseline_spread, len(advice.baseline_losses))
    # The spread of the baseline is unknown below two seeds, and with it a bar in its units.
    gaps = [] if math.isnan(bar) else [*precision.gaps.values()]
    resolution = precision.test.resolution if precision.test else 0.0
    looks = look_until_decided(gaps, bar, request.seeds, sure_bar, resolution)
    decision, reason = _decide(precision, looks, bar, sure_bar)
    return GateVerdict(decision, reason, precision, looks, bar, sure_bar, advice)


def _decide(
    precision: PrecisionVerdict, looks: Sequence[InterimResult], bar: float, sure_bar: float
) -> tuple[Decision, str]:
    """Return the decision, and the reason for it."""
    request = precision.request
    if precision.rating is Verdict.DIVERGED:
        return "rejected", f"it diverged at step {precision.diverged_step}"
    if precision.rating is Verdict.SLOW:
        return "undecided", f"it takes {TIMEOUT_WORDS} the time of {request.baseline}"
    if precision.rating in NOT_TRAINED:
        return "undecided", f"it did not train: {' '.join(precision.group.reasons)}".rstrip(". ")
    if not looks:
        have = len(precision.gaps)
        return "undecided", f"{have} of the {MIN_SEEDS} seeds that a decision needs were trained"
    last = looks[-1]
    if precision.rating is Verdict.STALLED and last.decision == "accepted":
        share = fmt.format_percent(precision.group.stagnant_share)
        return "undecided", f"the last step moved none of {share} of its weights"
    gap = format_interval(request.sign * last.gap, last.half_width, "+")
    where = {"accepted": "within", "rejected": "beyond", "undecided": "neither side of"}
    accepted = fmt.format_number(request.sign * (sure_bar if last.decision == "accepted" else bar))
    reason = (
        f"its {request.noun} differs by {gap} from that of {request.baseline} over "
        f"{last.seeds} seeds, {where[last.decision]} the bar of {accepted}"
    )
    return last.decision, reason
