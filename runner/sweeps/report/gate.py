"""Say whether mode=gate accepts its precision: by a sequential test, as verdict.json has it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.sweeps.report.ranking import Advice, PrecisionVerdict
from runner.sweeps.report.sequential_test import (
    Decision,
    Look,
    look_error_rate,
    look_until_decided,
)
from runner.sweeps.report.statistics import ERROR_RATE, MIN_SEEDS, Verdict
from runner.utils.files import write_json
from runner.utils.formatting import format_number
from runner.utils.layout import VERDICT

SCHEMA_VERSION = 1
"""Of verdict.json; raised where a key changes its meaning or goes away."""
EXIT_STATUS: Mapping[Decision, int] = {"accepted": 0, "rejected": 1, "undecided": 3}
NOT_TRAINED = (Verdict.FAILED, Verdict.UNAVAILABLE)
"""Ratings of a precision that was refused or crashed: no answer about its numbers."""


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
        advice: what it was computed from.
    """

    decision: Decision
    reason: str
    precision: PrecisionVerdict
    looks: Sequence[Look]
    bar: float
    advice: Advice

    @property
    def exit_status(self) -> int:
        """Return the exit status: 0 accepted, 1 rejected, 3 undecided, 2 if it did not train."""
        return 2 if self.precision.rating in NOT_TRAINED else EXIT_STATUS[self.decision]

    @property
    def name(self) -> str:
        """Return the precision with the keys that were typed for it."""
        overrides = self.advice.settings.overrides.get(self.precision.group.precision, ())
        return " ".join([self.precision.name, *overrides])

    def to_json(self) -> dict[str, Any]:
        """Return the content of verdict.json; docs/gate.md describes the keys."""
        settings = self.advice.settings
        sign = self.precision.sign
        comparison = self.precision.comparison
        base_losses = self.advice.baseline_losses
        seeds = [
            {
                "seed": seed,
                "value": sign * (base_losses[seed] + gap),
                "baseline_value": sign * base_losses[seed],
                "gap": gap,
            }
            for seed, gap in self.precision.gaps.items()
        ]
        last = self.looks[-1] if self.looks else None
        return {
            "schema": SCHEMA_VERSION,
            "verdict": self.decision,
            "exit_status": self.exit_status,
            "reason": self.reason,
            "precision": self.precision.name,
            "overrides": list(settings.overrides.get(self.precision.group.precision, ())),
            "baseline": settings.baseline,
            "baseline_recorded_in": settings.recorded_in or None,
            "metric": settings.metric,
            "direction": settings.direction,
            "gap": last.gap if last else None,
            "gap_half_width": last.half_width if last else None,
            "bar": None if self.bar != self.bar else self.bar,
            "bar_from": "advise.tolerance" if settings.max_gap is None else "advise.max_gap",
            "error_rate": ERROR_RATE,
            "error_rate_of_a_look": look_error_rate(settings.seeds),
            "looks": [asdict(look) for look in self.looks],
            "seeds": seeds,
            "max_seeds": settings.seeds,
            "steps": settings.steps,
            "speed_ratio": comparison.speed_ratio.value if comparison.speed_ratio else None,
            "memory_ratio": comparison.memory_ratio,
            "device": self.precision.group.device,
            "emulated": self.precision.is_emulated,
            "command": list(self.precision.command),
        }

    def write(self, folder: Path) -> Path:
        """Write verdict.json into a folder, atomically and without secrets; return its path.

        Raises:
            OSError: the file cannot be written.
        """
        return write_json(folder / VERDICT, self.to_json())


def gate_verdict(advice: Advice) -> GateVerdict | None:
    """Return the answer of mode=gate so far.

    Returns:
        None for mode=advise, and before the precision that was asked about has a trial.
    """
    settings = advice.settings
    if settings.mode != "gate":
        return None
    lines = [line for line in advice.verdicts if line.name != settings.baseline]
    if not lines:
        return None
    precision = lines[0]
    bar = settings.margin(advice.baseline_spread)
    looks: list[Look] = []
    # The spread of the baseline is unknown below two seeds, and with it a bar in its units.
    if bar == bar:
        looks = look_until_decided([*precision.gaps.values()], bar, settings.seeds)
    decision, reason = _decide(advice, precision, looks, bar)
    return GateVerdict(decision, reason, precision, looks, bar, advice)


def _decide(
    advice: Advice, precision: PrecisionVerdict, looks: Sequence[Look], bar: float
) -> tuple[Decision, str]:
    """Return the decision, and the reason for it."""
    if precision.rating is Verdict.DIVERGED:
        return "rejected", f"it diverged at step {precision.diverged_step}"
    if precision.rating is Verdict.SLOW:
        return "undecided", f"it takes more than four times the time of {precision.baseline}"
    if precision.rating in NOT_TRAINED:
        return "undecided", f"it did not train: {' '.join(precision.group.reasons)}".rstrip(". ")
    if not looks:
        have = len(precision.gaps)
        return "undecided", f"{have} of the {MIN_SEEDS} seeds that a decision needs were trained"
    last = looks[-1]
    sign = precision.sign
    gap = f"{sign * last.gap:+.3g} ± {last.half_width:.2g}"
    where = {"accepted": "within", "rejected": "beyond", "undecided": "neither side of"}
    reason = (
        f"its {precision.noun} differs by {gap} from that of {precision.baseline} over "
        f"{last.seeds} seeds, {where[last.decision]} the bar of {format_number(sign * bar)}"
    )
    return last.decision, reason
