"""Try overrides that may heal a precision: one seed chooses one of them, other seeds verify it."""

from math import inf
from time import perf_counter

from runner.modes.result import RunResult
from runner.sweeps.advisor.request import AdviseRequest
from runner.sweeps.advisor.trials import Trials
from runner.sweeps.verdict.ranking import Advice, PrecisionVerdict, rank_precisions
from runner.sweeps.verdict.settings import AdviseSettings
from runner.sweeps.verdict.statistics import Verdict
from runner.utils.console import plain_console

ACCEPTED_GAP_SHARE = 0.25
"""A remedy is accepted if at most this share of the gap to the baseline's loss remains."""


class RemedyTrials:
    """Trials of remedies, which are overrides of a precision that fails.

    Args:
        request: the command.
        trials: runs the jobs.
        settings: set the length of a trial.
    """

    def __init__(self, request: AdviseRequest, trials: Trials, settings: AdviseSettings) -> None:
        self.request = request
        self.trials = trials
        self.settings = settings
        self.console = plain_console()
        self._longest_trial_seconds = 0.0

    @property
    def has_time(self) -> bool:
        """Return whether the budget has time for another trial."""
        # The longest trial so far, not the mean: a trial that starts is not stopped by the budget.
        return self.trials.remaining_seconds >= self._longest_trial_seconds

    def advice(self) -> Advice:
        """Return what the trials so far say."""
        return rank_precisions(self.trials.results(), self.settings)

    def failing(self) -> list[PrecisionVerdict]:
        """Return the verdicts on precisions that fail, and that no remedy has healed so far."""
        plain = []
        healed = set()
        for verdict in self.advice().verdicts:
            if not verdict.group.settings:
                plain.append(verdict)
            elif verdict.is_acceptable:
                healed.add(verdict.group.precision)
        return [one for one in plain if one.is_failing and one.group.precision not in healed]

    def is_enough(self, verdict: PrecisionVerdict, override: str, max_gap: float) -> bool:
        """Return whether the first seed's loss with an override is near enough to the baseline's.

        Args:
            verdict: on the precision without the override.
            override: the remedy.
            max_gap: see max_gap().
        """
        (seed,) = self.request.trial_seeds(1)
        result = self.run_trial(verdict.group.precision, override, seed)
        base_loss = self.advice().baseline_losses[seed]
        return _gap(result, base_loss, self.settings) <= max_gap

    def max_gap(self, verdict: PrecisionVerdict) -> float:
        """Return the largest gap to the baseline's loss with which a remedy is accepted.

        It is advise.max_gap, or two standard deviations of the baseline's loss between seeds, or a
        share of the gap that the precision has without a remedy, if that is larger.
        """
        margin = self.settings.max_gap
        if margin is None:
            # One trial decides, and seeds alone seldom put a loss further away than two deviations.
            margin = 2 * self.advice().baseline_spread
        if verdict.test is None or verdict.rating is not Verdict.WORSE:
            return margin
        return max(margin, ACCEPTED_GAP_SHARE * verdict.test.value)

    def run_trial(self, name: str, override: str, seed: int) -> RunResult | None:
        """Return the result of one trial with an override, None if the budget has no time for it.

        Args:
            name: of the precision.
            override: the remedy; empty for none.
            seed: the trial's.
        """
        if not self.has_time:
            return None
        began = perf_counter()
        words = [*self.settings.length_overrides(name), *filter(None, [override])]
        result = self.trials.launch(self.request.trial_overrides(name, seed, *words))
        self._longest_trial_seconds = max(self._longest_trial_seconds, perf_counter() - began)
        return result

    def verify(self, name: str, override: str) -> None:
        """Run trials of a remedy with other seeds than the one that chose it.

        Args:
            name: of the precision.
            override: the remedy.
        """
        self.console.print(f"{name}: {override} helps; verifying it with other seeds")
        # A remedy that was chosen by a seed's loss is biased towards that seed.
        for seed in self.request.trial_seeds(self.request.spec.advise.seeds + 1)[1:]:
            # The baseline has no loss for the last seed, which is one after those of the rounds.
            if seed not in self.advice().baseline_losses:
                self.run_trial(self.request.baseline, "", seed)
            if self.run_trial(name, override, seed) is None:
                break
        verified = f"{name} {override}"
        if any(one.name == verified and one.is_failing for one in self.advice().verdicts):
            self.console.print(f"{verified}: with other seeds it does not help")


def _gap(result: RunResult | None, base_loss: float, settings: AdviseSettings) -> float:
    """Return how far a trial's loss is above the baseline's, infinity if it did not finish."""
    loss = settings.judged_loss(result.metrics) if result else None
    if result is None or result.outcome != "finished" or loss is None:
        return inf
    return loss - base_loss
