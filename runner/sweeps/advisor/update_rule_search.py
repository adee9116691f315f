"""Search for the rule of precision.update that heals a precision whose weights lose updates."""

from collections.abc import Collection

from runner.sweeps.advisor.remedy_trials import RemedyTrials
from runner.sweeps.verdict.ranking import PrecisionVerdict

RULES_BY_BYTES = ("stochastic_rounding", "kahan", "remainders", "master_weights")
"""Rules that keep updates, the one of the fewest bytes per weight first; with AdamW 6, 8, 12 and 14
(bench/results/update_rules.md)."""


def search_update_rules(remedies: RemedyTrials, losing: Collection[str]) -> None:
    """Try the rules for each precision that fails and loses updates, until one of them helps.

    Args:
        remedies: runs the trials.
        losing: names of precisions whose updates float32's numbers say are swallowed.
    """
    for verdict in remedies.failing():
        name = verdict.group.precision
        if name in losing and remedies.request.takes_update_rule(name):
            _search(remedies, verdict)


def _search(remedies: RemedyTrials, verdict: PrecisionVerdict) -> None:
    """Try the rules for one precision, and verify the first one that helps."""
    name = verdict.group.precision
    remedies.console.print(f"{name} fails: searching for a rule that keeps its updates")
    max_gap = remedies.max_gap(verdict)
    for rule in RULES_BY_BYTES:
        override = f"precision.update={rule}"
        if remedies.is_enough(verdict, override, max_gap):
            remedies.verify(name, override)
            return
    limit = "" if remedies.has_time else " in the time that was left"
    remedies.console.print(f"{name}: no rule of precision.update helps{limit}")
