"""Schedule the trials of mode=advise within its budget.

Measure float32's step time, run every precision for several seeds, then diagnose those that fail
and search for modules to keep out of them; at last forecast the memory of the others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from runner.diagnostics.memory.forecast import largest_fitting_batch, peak_forecast
from runner.diagnostics.memory.limits import USABLE, free_memory
from runner.diagnostics.numerics import read
from runner.modes.result import RunResult
from runner.sweep.advisor.diagnosis import describe_shortage, suspect_modules
from runner.sweep.advisor.fp32_search import Float32ModuleSearch
from runner.sweep.advisor.request import AdviseRequest
from runner.sweep.advisor.settings import AdviseSettings
from runner.sweep.advisor.system_load import other_programs_load
from runner.sweep.advisor.trials import Trials
from runner.sweep.report.compare import BASELINE
from runner.sweep.report.paired_test import MIN_SEEDS
from runner.sweep.report.ranking import Advice, rank_precisions
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.accelerator import choose_accelerator
from runner.utils.console import plain_console
from runner.utils.errors import ConfigError, RunnerError
from runner.utils.tensors import MIB

BASELINE_SHARE = 0.05
"""Share of the budget in which float32's step time is measured."""
TRIALS_SHARE = 0.6
"""Share of the budget that the trials are planned for: precisions differ in speed, and those that
fail take further trials."""
EXPECTED_RATIO = 1.5
"""Expected step time of a precision over float32's, before it is measured."""
EMULATED_RATIO = 5.0
"""Expected step time of an emulated precision over float32's."""
MIN_STEPS = 20
SNAPSHOTS = 4
"""Snapshots of float32's numbers, in a trial of their own."""
MIN_SECONDS = 0.6
"""Shortest time of float32's steps in a trial that measures speed."""
START_SECONDS = 0.7
"""Time of a job before and after its run: its process, its imports, the end of its record."""
TIMEOUT_RATIO = 4.0
"""A trial is cut after this many times the time that float32 takes."""
TIMEOUT_SLACK_SECONDS = 30.0
TIMEOUT_SLACK_SHARE = 0.1
"""Share of the budget that the slack is at most: a machine may be held up for a while."""
_NEVER = 10**9


class TrialScheduler:
    """The trials of one command with mode=advise.

    Args:
        request: the command.
        trials: runs the jobs.
        resumed: settings of an earlier command, whose trials are continued with the same lengths.
    """

    def __init__(
        self, request: AdviseRequest, trials: Trials, resumed: AdviseSettings | None = None
    ) -> None:
        self.request = request
        self.trials = trials
        self.console = plain_console()
        self.options = request.spec.advise
        self._written = resumed

    def run(self) -> None:
        """Run all trials.

        Raises:
            ConfigError: float32 does not train, or measures no loss.
            SystemExit: a signal has stopped the sweep.
        """
        if self._written is None:
            self._set_budget(*self._measure_baseline())
        self._run_rounds()
        self._diagnose_and_search()
        self._forecast_memory()

    @property
    def settings(self) -> AdviseSettings:
        """Return the settings that the sweep's folder holds."""
        assert self._written is not None
        return self._written

    def _write(self, settings: AdviseSettings) -> None:
        """Write the settings to the sweep's folder, where the report finds them."""
        self._written = settings
        settings.write(self.trials.folder)

    def _diagnose_and_search(self) -> None:
        """Find what is wrong with the precisions that fail, and which modules to keep out."""
        advice = self._advice()
        failing = [line.group.precision for line in advice.verdicts if line.is_failing]
        if not failing or advice.recommendation is None:
            return
        suspects = self._diagnose(failing)
        if self.options.islands:
            search = Float32ModuleSearch(
                self.request, self.trials, self._length_overrides, self._advice
            )
            search.run(suspects)

    def _forecast_memory(self) -> None:
        """Write the forecast memory of the precisions that train as well as float32."""
        texts = []
        for line in self._advice().verdicts:
            if line.is_acceptable and not (line.group.settings or line.is_emulated):
                texts.append(self._memory_text(line.group.precision))
        self._write(replace(self.settings, memory=[text for text in texts if text]))

    def _memory_text(self, name: str) -> str:
        """Return a precision's entry of AdviseSettings.memory, empty without a forecast."""
        spec = self.request.spec
        device = choose_accelerator(spec.accelerator.name, spec.accelerator.index).device
        precision = self.request.load_precision(name)
        batch_size = spec.train.batch_size
        try:
            forecast = peak_forecast(spec, precision, device)
            peak = forecast(batch_size).total / MIB
            largest = largest_fitting_batch(forecast, batch_size, free_memory(device) * USABLE)
        except RunnerError:
            return ""
        return f"{name}: {peak:.4g} {largest or 0}"

    def _diagnose(self, failing: Sequence[str]) -> dict[str, list[str]]:
        """Train float32 once more with snapshots of its numbers, and write what they say.

        Args:
            failing: names of precisions.

        Returns:
            The modules that each precision harms most; nothing if the trial was not possible.
        """
        every = max(1, self.settings.steps // SNAPSHOTS)
        words = [*self._length_overrides(), f"numerics.every={every}", "train.compile=false"]
        if self.trials.left <= 0:
            return {}
        trial = self.request.trial(BASELINE, self.request.seed, *words)
        result = self.trials.launch([trial])[0]
        if result.status != "finished":
            return {}
        try:
            numbers = read(self.trials.folder / Path(result.folder).name)
        except RunnerError:
            return {}
        nothing = f"in every module {BASELINE}'s numbers fit its formats"
        precisions = {name: self.request.load_precision(name) for name in failing}
        shortages = {name: describe_shortage(numbers, p) for name, p in precisions.items()}
        found = [f"{name}: {text or nothing}" for name, text in shortages.items()]
        self._write(replace(self.settings, found=found))
        return {name: suspect_modules(numbers, p) for name, p in precisions.items()}

    def _measure_baseline(self) -> tuple[float, float, int]:
        """Train float32 for a short while, in a job that is then discarded.

        Returns:
            Seconds of a step, seconds of a job besides its steps, and the steps of the whole run.

        Raises:
            ConfigError: float32 does not train, or measures no loss.
        """
        seconds = max(1.0, BASELINE_SHARE * self.trials.budget)
        words = [f"train.max_seconds={seconds:g}", f"train.eval_every={_NEVER}"]
        limits = [n for n in (self.request.spec.train.max_steps, self.options.steps) if n]
        if limits:
            words.append(f"train.max_steps={min(limits)}")
        self.console.print(f"{BASELINE} for {seconds:.0f} s at most, to measure its step time")
        trial = self.request.untracked_trial(BASELINE, self.request.seed, *words)
        self._share_overrides(trial)
        result = self.trials.launch([trial])[0]
        self.trials.discard()
        if result.status != "finished" or not result.step_ms:
            raise ConfigError(
                result.error or f"{BASELINE} took no step: there is nothing to compare."
            )
        if VAL_LOSS not in result.metrics:
            raise ConfigError(f"mode=advise judges by {VAL_LOSS}, which task= does not measure.")
        step = result.step_ms / 1e3
        # Besides its steps a run may compile, which the trials do as well.
        start = max(0.0, result.seconds - result.steps * step) + START_SECONDS
        return step, start, result.planned_steps

    def _choose_steps(self, step: float, start: float, most: int) -> int:
        """Return the steps of a trial, a round number so that a machine gives the same one again.

        Args:
            step: seconds of float32's step.
            start: seconds of a job besides its steps.
            most: steps of the whole run.
        """
        emulated = len(self.request.emulated)
        others = len(self.request.precisions) - 1 - emulated
        count = self.options.seeds * (1 + EXPECTED_RATIO * others + EMULATED_RATIO * emulated)
        seconds = TRIALS_SHARE * self.trials.budget / count - start
        least = max(MIN_STEPS, _round_down(2 * MIN_SECONDS / step))
        return min(most, max(least, _round_down(seconds / step)))

    def _set_budget(self, step: float, start: float, most: int) -> None:
        """Set the length of the trials, and write the settings.

        Args:
            step: seconds of float32's step.
            start: seconds of a job besides its steps.
            most: steps of the whole run.
        """
        request = self.request
        options = self.options
        steps = min(most, options.steps or self._choose_steps(step, start, most))
        slack = min(TIMEOUT_SLACK_SECONDS, TIMEOUT_SLACK_SHARE * self.trials.budget)
        accelerator = request.spec.accelerator
        own = [
            f"{name} {word}"
            for name, words in request.precision_overrides.items()
            for word in words
        ]
        self._written = AdviseSettings(
            objective=options.objective,
            tolerance=options.tolerance,
            steps=steps,
            seconds=math.ceil(TIMEOUT_RATIO * steps * step + slack),
            seeds=options.seeds,
            budget=options.budget,
            command=[*request.command, *request.overrides, *request.seed_override],
            emulated=request.emulated,
            own=own,
            absent=request.absent,
            busy=other_programs_load(
                choose_accelerator(accelerator.name, accelerator.index).device
            ),
        )
        shared = {word for words in request.precision_overrides.values() for word in words}
        trial = request.trial(BASELINE, request.seed, *self._length_overrides())
        self._share_overrides([*trial, *sorted(shared)])
        self._write(self._written)
        self._warn_of_small_budget(steps * step + start)
        text = f"{steps} steps, {options.seeds} seeds, {len(request.precisions)} precisions"
        self.console.print(f"{text}: {', '.join(request.precisions)}")

    def _share_overrides(self, words: Sequence[str]) -> None:
        """Name trials by what differs: their precision, their seed, and modules kept out."""
        shared = [word for word in words if not word.startswith(("precision=", "seed="))]
        self.trials.share_overrides(shared)

    def _warn_of_small_budget(self, trial_seconds: float) -> None:
        """Print a warning if the budget is too small for verdicts, by float32's step time."""
        seconds = MIN_SEEDS * trial_seconds * len(self.request.precisions)
        if seconds > self.trials.left:
            time = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
            text = f"warning: {MIN_SEEDS} seeds of each precision take about {time}"
            self.console.print(f"{text}, and advise.budget={self.options.budget}.")

    def _length_overrides(self, precision: str = BASELINE) -> list[str]:
        """Return the overrides that set the length of a precision's trial."""
        steps = self.settings.steps
        seconds = self.settings.seconds
        if precision in self.request.emulated:
            seconds = math.ceil(EMULATED_RATIO * seconds)
        return [
            f"train.max_steps={steps}",
            f"train.eval_every={steps}",
            f"train.max_seconds={seconds}",
            "train.early_stop=null",
        ]

    def _run_rounds(self) -> None:
        """Run one trial of each precision per seed.

        Precisions that failed are left out, and so are the least promising ones where the budget
        would give no verdict on all. A round that the budget has no time for is not begun.
        """
        running = list(self.request.precisions)
        seconds: dict[str, float] = {}
        has_diverged = False
        for number in range(self.options.seeds):
            if number and self.trials.left < sum(seconds[name] for name in running):
                self.console.print(f"the budget ends after {number} seeds")
                return
            # Each round begins with another precision, so that none always runs first.
            turn = number % len(running)
            results = self._run_round(running[turn:] + running[:turn], self.request.seed + number)
            seconds = {r.precision: r.seconds + START_SECONDS for r in results}
            finished = self._finished(results)
            running = [name for name in running if name in finished]
            has_diverged |= any(r.outcome == "diverged" for r in results)
            # Float32 alone needs further seeds only to judge a diverged precision once modules
            # are kept out of it.
            if BASELINE not in running or (len(running) == 1 and not has_diverged):
                return
            running = self._affordable(running, results, seconds, MIN_SEEDS - number - 1)

    def _run_round(self, order: Sequence[str], seed: int) -> list[RunResult]:
        """Run a trial of each precision while the budget lasts, and return the results."""
        results: list[RunResult] = []
        for number, name in enumerate(order):
            if number and self.trials.left <= 0:
                self.console.print(f"the budget ends before {', '.join(order[number:])}")
                break
            trial = self.request.trial(name, seed, *self._length_overrides(name))
            results += self.trials.launch([trial])
        return results

    def _affordable(
        self,
        names: list[str],
        results: Sequence[RunResult],
        seconds: Mapping[str, float],
        rounds: int,
    ) -> list[str]:
        """Return the precisions that the budget has time for until there is a verdict on them.

        The least promising ones are left out first; one stays besides the baseline in any case.

        Args:
            names: precisions that finished their last trial.
            results: of the last round.
            seconds: time of a trial by precision.
            rounds: rounds that a verdict still takes.
        """
        baseline = next(r for r in results if r.precision == BASELINE)
        merits = {r.precision: self._merit(r, baseline) for r in results if r.precision in names}
        others = [name for name in names if name != BASELINE]
        others.sort(key=lambda name: merits[name], reverse=True)
        left = self.trials.left - rounds * seconds[BASELINE]
        chosen = {BASELINE}
        for name in others:
            left -= rounds * seconds[name]
            if rounds <= 0 or left >= 0 or chosen == {BASELINE}:
                chosen.add(name)
        dropped = [name for name in others if name not in chosen]
        if dropped:
            self.console.print(f"no time for more seeds of {', '.join(dropped)}")
        return [name for name in names if name in chosen]

    def _merit(self, result: RunResult, baseline: RunResult) -> float:
        """Return how good one trial is by the objective; larger is better.

        An emulated precision has no step time of its own, and takes the baseline's.
        """
        match self.options.objective:
            case "time":
                return -(result.step_ms or baseline.step_ms or math.inf)
            case "memory":
                return -((result.weights_mib or 0.0) + (result.optimizer_mib or 0.0))
            case _:
                return -result.metrics[VAL_LOSS]

    def _finished(self, results: Sequence[RunResult]) -> set[str]:
        """Return the precisions whose trial took all its steps."""
        steps = self.settings.steps
        return {r.precision for r in results if r.outcome == "finished" and r.steps >= steps}

    def _advice(self) -> Advice:
        """Return what the trials so far say."""
        return rank_precisions(self.trials.results(), self.settings)


def _round_down(number: float) -> int:
    """Return the next of 1, 2, 5, 10, 20, ... downwards; 0 below 1."""
    if number < 1:
        return 0
    power = 10 ** math.floor(math.log10(number))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= number)
