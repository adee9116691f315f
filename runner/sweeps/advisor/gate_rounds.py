"""Run the trials of mode=gate: seed after seed, until its precision is accepted or rejected."""

from runner.sweeps.advisor.request import AdviseRequest
from runner.sweeps.advisor.trials import Trials
from runner.sweeps.verdict.gate import NOT_TRAINED, GateVerdict, gate_verdict
from runner.sweeps.verdict.ranking import rank_precisions
from runner.sweeps.verdict.settings import AdviseSettings
from runner.sweeps.verdict.statistics import Verdict
from runner.utils.console import plain_console
from runner.utils.errors import ConfigError

_TRAINED = (Verdict.BASELINE, Verdict.RECOMMENDED)
"""Ratings of a baseline that trained in every trial."""


class GateRounds:
    """The trials of one command with mode=gate.

    Args:
        request: the command.
        trials: runs the jobs.
        settings: set the length of a trial, the bar and the largest number of seeds.
    """

    def __init__(self, request: AdviseRequest, trials: Trials, settings: AdviseSettings) -> None:
        self.request = request
        self.trials = trials
        self.settings = settings
        self.console = plain_console()

    def run(self) -> None:
        """Run a trial of the baseline and of the precision for each seed, until it is decided.

        Raises:
            ConfigError: the precision does not train.
            SystemExit: a signal has stopped the sweep.
        """
        longest_seconds = 0.0
        for number, seed in enumerate(self.request.trial_seeds(self.settings.seeds)):
            if self.trials.remaining_seconds < longest_seconds:
                self.console.print(f"the budget ends after {number} seeds")
                break
            before = self.trials.remaining_seconds
            # Each round begins with the other precision, so that none always runs first.
            order = self.request.precisions[:: -1 if number % 2 else 1]
            for precision in order:
                self._run_trial(precision, seed)
            longest_seconds = max(longest_seconds, before - self.trials.remaining_seconds)
            if self._is_decided(self._verdict()):
                break

    def _run_trial(self, precision: str, seed: int) -> None:
        """Run one trial, unless the baseline's is recorded."""
        if self.request.recorded_result(precision, seed) is None:
            length = self.settings.length_overrides(precision)
            self.trials.launch(self.request.trial_overrides(precision, seed, *length))

    def _verdict(self) -> GateVerdict:
        """Return what the trials so far say.

        Raises:
            ConfigError: the precision or the baseline does not train.
        """
        advice = rank_precisions(self.trials.results(), self.settings)
        # Where the baseline does not train, a precision that does not either is no worse.
        for line in advice.verdicts:
            if line.name == self.settings.baseline and line.rating not in _TRAINED:
                raise ConfigError(
                    f"mode=gate has no answer: the baseline {line.name} itself does not train "
                    f"({line.rating}). Type another advise.baseline, or settings that it trains "
                    "with."
                )
        verdict = gate_verdict(advice)
        if verdict is None or verdict.precision.rating in NOT_TRAINED:
            reason = verdict.reason if verdict else "no trial wrote a result"
            raise ConfigError(
                f"mode=gate has no answer for {self.request.precisions[1]}: {reason}."
            )
        return verdict

    def _is_decided(self, verdict: GateVerdict) -> bool:
        """Print the last look, and return whether no further seed is needed."""
        if verdict.looks:
            look = verdict.looks[-1]
            self.console.print(f"{look.seeds} seeds: {verdict.decision}, {verdict.reason}")
        # More seeds do not help a precision that diverged or is too slow for a trial.
        hopeless = verdict.precision.rating in (Verdict.DIVERGED, Verdict.SLOW)
        return hopeless or verdict.decision != "undecided"
