"""Schedule the trials of mode=advise within its budget.

Measure the baseline's step time, run every precision for several seeds, then diagnose those that
fail and search for remedies. At last forecast the memory of the others. mode=gate takes the
measurement alone, and rounds of its own: seed after seed, until its precision is accepted or
rejected.

AdviseSweeper is what Hydra calls. Hydra's launcher runs the jobs, so that processes, signals,
resuming and the report are those of any sweep.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, final

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.config.hydra_plugins import register
from runner.core import ConfigError, RunnerError, RunResult, fmt, metric_names, tensor_facts
from runner.diagnostics.memory.forecast import largest_fitting_batch, peak_forecast
from runner.diagnostics.memory.limits import USABLE_MEMORY_SHARE, free_memory
from runner.diagnostics.numerics import read
from runner.output.console import plain_console
from runner.sweeps.advisor.advise_command import AdviseCommand
from runner.sweeps.advisor.remedies import FLOAT32, Diagnosis, RemedySearch, diagnose
from runner.sweeps.advisor.trials import Trials
from runner.sweeps.other_programs import OtherPrograms
from runner.sweeps.room import AdviseSpec
from runner.sweeps.verdict.advise_request import (
    EMULATED_STEP_TIME_RATIO,
    TIMEOUT_TIME_RATIO,
    AdviseRequest,
)
from runner.sweeps.verdict.gate import NOT_TRAINED, GateVerdict, gate_verdict
from runner.sweeps.verdict.statistics import MIN_SEEDS, Verdict

BASELINE_BUDGET_SHARE = 0.05
"""Share of the budget in which the baseline's step time is measured, for a second at least."""
JOB_OVERHEAD_SECONDS = 0.7
"""Time of a job before and after its run: process, imports, the end of its record."""
_UNREACHED_STEP = 10**9
"""Step of an evaluation that never comes."""
TRIALS_BUDGET_SHARE = 0.6
"""Share of the budget that the trials are planned for: precisions differ in speed, and those that
fail take further trials."""
EXPECTED_STEP_TIME_RATIO = 1.5
"""Expected step time of a precision over the baseline's, before it is measured."""
MIN_TRIAL_STEPS = 20
"""Fewest optimizer steps of a trial, unless the whole run has fewer."""
DIAGNOSIS_SNAPSHOTS = 4
"""Number of snapshots of float32's numbers in the trial that explains why a precision fails."""
MIN_TIMED_SECONDS = 0.6
"""Time of the baseline's steps in a trial from which on its speed is measured well."""
MAX_TIMEOUT_SLACK_SECONDS = 30.0
"""Longest time that is added to a trial's limit: a busy machine may stall for a while."""
TIMEOUT_SLACK_BUDGET_SHARE = 0.1
"""Share of the budget that the added time is at most."""


class TrialScheduler:
    """The trials of one command with mode=advise.

    Args:
        trials: of the command, which runs the jobs.
    """

    def __init__(self, trials: Trials) -> None:
        self.command = trials.command
        self.trials = trials
        self.console = plain_console()

    @property
    def request(self) -> AdviseRequest:
        """Return the request with what was measured so far."""
        return self.trials.request

    def run(self) -> None:
        """Run all trials.

        Raises:
            ConfigError: the baseline does not train, or measures no loss, or the one precision of
                mode=gate does not train.
            SystemExit: a signal has stopped the sweep.
        """
        self.trials.announce(0)
        others = OtherPrograms()
        # A resumed command keeps the length of its finished trials, to compare further ones.
        if not self.trials.is_resumed:
            self._set_budget(self._measure_baseline(), others)
        command = self.command
        pairs = product(command.precisions, command.trial_seeds(self.request.seeds))
        self.trials.announce(sum(not command.recorded_result(*pair) for pair in pairs))
        if self.request.mode == "gate":
            run_gate_rounds(self.trials)
            return
        self._run_rounds()
        # How many trials a search takes is not known before.
        self.trials.announce(0)
        self._diagnose_and_search()
        self._forecast_memory()

    def _diagnose_and_search(self) -> None:
        """Find what is wrong with the precisions that fail, and what heals them."""
        advice = self.trials.advice()
        failing = [verdict.group.precision for verdict in advice.verdicts if verdict.is_failing]
        # Nothing is recommended if not even the baseline trains.
        if not failing or not advice.recommendation:
            return
        diagnoses = self._diagnose(failing)
        # Without a spread of the baseline's loss between seeds there is no gap to accept by.
        if len(advice.baseline_losses) < 2:
            self.console.print("no time to search for what heals a precision that fails")
            return
        search = RemedySearch(self.trials, diagnoses)
        asked = self.command.spec.section(AdviseSpec)
        if asked.update_rules:
            search.search_update_rules()
        if asked.islands:
            search.search_fp32_modules()

    def _forecast_memory(self) -> None:
        """Write the forecast memory of the precisions that train as well as the baseline."""
        spec = self.command.spec
        device = self.command.device
        batch_size = spec.train.batch_size
        forecasts = {}
        for verdict in self.trials.advice().verdicts:
            name = verdict.group.precision
            # The forecast knows no remedies; an emulated precision takes other memory here than on
            # its hardware.
            if verdict.group.settings or verdict.is_emulated or not verdict.is_acceptable:
                continue
            # Precisions are judged without a forecast, too.
            with suppress(RunnerError):
                precision = self.command.load_precision(name)
                forecast = peak_forecast(spec, precision, device)
                peak = forecast.peak(batch_size).total / tensor_facts.MIB
                usable = free_memory(device) * USABLE_MEMORY_SHARE
                largest = largest_fitting_batch(forecast.peak, batch_size, usable)
                forecasts[name] = {"peak_mib": peak, "largest_batch": largest or 0}
        self.trials.update_request(memory=forecasts)

    def _diagnose(self, failing: Sequence[str]) -> dict[str, Diagnosis]:
        """Train float32 once more with snapshots of its numbers, and write what they say.

        Args:
            failing: names of precisions.

        Returns:
            The diagnosis of each; empty where the numbers are not known.
        """
        every = max(1, self.request.steps // DIAGNOSIS_SNAPSHOTS)
        # Numbers are read by hooks, which need eager modules: a config with train.compile is
        # refused together with numerics.every.
        eager = ("train.compile=false", "train.compile_rounding=fused")
        if self.trials.remaining_seconds <= 0:
            return {}
        words = (f"numerics.every={every}", *eager)
        result = self.trials.run(FLOAT32, self.command.spec.seed, *words)
        if not result or result.status != "finished":
            return {}
        try:
            numbers = read(self.trials.folder / Path(result.folder).name)
        except RunnerError:
            return {}
        diagnoses = {}
        # A precision may fail both by itself and with a set of modules.
        for name in failing:
            diagnoses[name] = diagnose(numbers, self.command.load_precision(name))
        findings = {name: diagnosis.finding for name, diagnosis in diagnoses.items()}
        self.trials.update_request(diagnoses=findings)
        return diagnoses

    def _measure_baseline(self) -> RunResult:
        """Measure the baseline's times in a short job that is then deleted, and return its result.

        Raises:
            ConfigError: the baseline does not train.
        """
        spec = self.command.spec
        baseline = self.request.baseline
        seconds = max(1.0, BASELINE_BUDGET_SHARE * self.trials.budget)
        words = [f"train.max_seconds={seconds:g}", f"train.eval_every={_UNREACHED_STEP}"]
        # No longer than a trial, or the whole run, takes.
        limits = [n for n in (spec.train.max_steps, self.request.steps) if n]
        if limits:
            words.append(f"train.max_steps={min(limits)}")
        self.console.print(f"{baseline} for {seconds:.0f} s at most, to measure its step time")
        # The job is deleted below, and a store would keep its run.
        trial = self.command.trial_overrides(baseline, spec.seed, *words, is_tracked=False)
        self.trials.record_shared_overrides(trial)
        result = self.trials.launch(trial)
        self.trials.delete_jobs()
        if not result or result.status != "finished" or not result.step_ms:
            reason = f"{baseline} took no step: there is nothing to compare."
            raise ConfigError((result and result.error) or reason)
        return result

    def _affordable_steps(self, step_seconds: float, overhead_seconds: float) -> int:
        """Return the number of optimizer steps of a trial that the budget allows.

        Args:
            step_seconds: of the baseline.
            overhead_seconds: time of a job besides its steps.
        """
        emulated = len(self.request.emulated)
        others = len(self.command.precisions) - 1 - emulated
        # A round of all precisions takes as long as this many trials of the baseline.
        round_cost = 1 + EXPECTED_STEP_TIME_RATIO * others + EMULATED_STEP_TIME_RATIO * emulated
        count = self.request.seeds * round_cost
        seconds = TRIALS_BUDGET_SHARE * self.trials.budget / count - overhead_seconds
        # Twice the time, because rounding down may take up to 60 % of it.
        least = _round_down(2 * MIN_TIMED_SECONDS / step_seconds)
        # A round number, so that the same machine gives the same one again although measured step
        # times differ a little.
        return max(MIN_TRIAL_STEPS, least, _round_down(seconds / step_seconds))

    def _set_budget(self, timed: RunResult, others: OtherPrograms) -> None:
        """Set the length of the trials, and write the request.

        Args:
            timed: result of the baseline.
            others: watched since before it was timed.

        Raises:
            ConfigError: the baseline does not measure what precisions are judged by.
        """
        command = self.command
        is_named = command.spec.task.get("quality") is not None
        metric = timed.quality if is_named else metric_names.VAL_LOSS
        if metric not in timed.metrics:
            raise ConfigError(
                f"mode={command.spec.mode} judges by {metric}, which task= does not measure."
            )
        step_seconds = (timed.step_ms or 0.0) / 1e3
        # Besides its steps a run may compile, which the trials do as well.
        other_seconds = max(0.0, timed.seconds - timed.steps * step_seconds)
        overhead = other_seconds + JOB_OVERHEAD_SECONDS
        steps = self.request.steps or self._affordable_steps(step_seconds, overhead)
        steps = min(timed.planned_steps, steps)
        if command.recorded:
            # Losses after unequal numbers of steps could not be compared.
            steps = command.recorded[0].steps
        slack = min(MAX_TIMEOUT_SLACK_SECONDS, TIMEOUT_SLACK_BUDGET_SHARE * self.trials.budget)
        self.trials.update_request(
            steps=steps,
            seconds=math.ceil(TIMEOUT_TIME_RATIO * steps * step_seconds + slack),
            # The processors' load changes a CPU's step times only.
            busy=others.share() if command.device.type == "cpu" else 0.0,
            metric=metric,
            direction=timed.direction if is_named else "min",
        )
        # Typed keys under precision follow from a trial's precision: no job is named after them.
        shared = {word for words in self.request.overrides.values() for word in words}
        length = self.request.length_overrides(self.request.baseline)
        trial = command.trial_overrides(self.request.baseline, command.spec.seed, *length)
        self.trials.record_shared_overrides([*trial, *sorted(shared)])
        self._print_plan(steps * step_seconds + overhead)

    def _print_plan(self, trial_seconds: float) -> None:
        """Print what will run, with a warning if the budget is too small for verdicts.

        Args:
            trial_seconds: of the baseline, by its step time.
        """
        request = self.request
        names = self.command.precisions
        seconds = MIN_SEEDS * trial_seconds * len(names)
        if seconds > self.trials.remaining_seconds:
            text = f"{MIN_SEEDS} seeds of each precision take about {fmt.format_duration(seconds)}"
            self.console.print(f"warning: {text}, and advise.budget={request.budget}.")
        text = f"{request.steps} steps, {request.seeds} seeds, {len(names)} precisions"
        self.console.print(f"{text}: {', '.join(names)}")

    def _run_rounds(self) -> None:
        """Run one trial of each precision per seed.

        Precisions that failed are left out, and so are the least promising ones where the budget
        would give no verdict on all. A round that the budget has no time for is not begun.
        """
        running = [*self.command.precisions]
        seconds: dict[str, float] = {}
        has_diverged = False
        for number, seed in enumerate(self.command.trial_seeds(self.request.seeds)):
            if number and self.trials.remaining_seconds < sum(seconds[name] for name in running):
                self.console.print(f"the budget ends after {number} seeds")
                return
            # Each round begins with another precision, so that none always runs first.
            turn = number % len(running)
            results = self._run_round(running[turn:] + running[:turn], seed)
            # Another trial of a recorded baseline takes no time.
            finished = set()
            for r in results:
                is_recorded = r in self.command.recorded
                seconds[r.precision] = 0.0 if is_recorded else r.seconds + JOB_OVERHEAD_SECONDS
                if r.outcome == "finished" and r.steps >= self.request.steps:
                    finished.add(r.precision)
                has_diverged |= r.outcome == "diverged"
            # What failed or was too slow with one seed is not tried with another.
            running = [name for name in running if name in finished]
            # The baseline alone needs further seeds only to judge a diverged precision with a
            # remedy.
            if self.request.baseline not in running or (len(running) == 1 and not has_diverged):
                return
            running = self._affordable(running, results, seconds, MIN_SEEDS - number - 1)

    def _run_round(self, order: Sequence[str], seed: int) -> list[RunResult]:
        """Run a trial of each precision while the budget lasts, and return the results."""
        results: list[RunResult] = []
        for number, name in enumerate(order):
            known = self.command.recorded_result(name, seed)
            if known:
                results.append(known)
                continue
            if number and self.trials.remaining_seconds <= 0:
                self.console.print(f"the budget ends before {', '.join(order[number:])}")
                break
            result = self.trials.run(name, seed)
            if result:
                results.append(result)
        return results

    def _affordable(
        self,
        names: list[str],
        results: Sequence[RunResult],
        seconds: Mapping[str, float],
        rounds: int,
    ) -> list[str]:
        """Return the precisions that the budget has time for until there is a verdict on them.

        The least promising ones are left out first.

        Args:
            names: precisions that finished their last trial.
            results: of the last round.
            seconds: time of a trial by precision.
            rounds: rounds that a verdict still takes.
        """
        last = {result.precision: result for result in results}
        baseline = last[self.request.baseline]
        others = [name for name in names if name != self.request.baseline]
        others.sort(key=lambda name: self._merit(last[name], baseline), reverse=True)
        remaining = self.trials.remaining_seconds - rounds * seconds[self.request.baseline]
        dropped = []
        for place, name in enumerate(others):
            # Also for one that is dropped: a less promising precision does not take its place.
            remaining -= rounds * seconds[name]
            # One besides the baseline stays in any case, or there would be nothing to compare.
            if place and rounds > 0 and remaining < 0:
                dropped.append(name)
        if dropped:
            self.console.print(f"no time for more seeds of {', '.join(dropped)}")
        return [name for name in names if name not in dropped]

    def _merit(self, result: RunResult, baseline: RunResult) -> float:
        """Return how good one trial is by the objective; larger is better."""
        match self.request.objective:
            case "time":
                # An emulated precision has no step time of its own.
                return -(result.step_ms or baseline.step_ms or math.inf)
            case "memory":
                return -((result.weights_mib or 0.0) + (result.optimizer_mib or 0.0))
            case _:
                loss = self.request.judged_loss(result.metrics)
                return -math.inf if loss is None else -loss


def _round_down(number: float) -> int:
    """Return the next of 1, 2, 5, 10, 20, ... downwards; 0 below 1."""
    if number < 1:
        return 0
    power = 10 ** math.floor(math.log10(number))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= number)


def run_gate_rounds(trials: Trials) -> None:
    """Run a trial of the baseline and of mode=gate's precision for each seed, until it is decided.

    Args:
        trials: of the command, which runs the jobs.

    Raises:
        ConfigError: the precision does not train.
        SystemExit: a signal has stopped the sweep.
    """
    console = plain_console()
    command = trials.command
    longest_seconds = 0.0
    for number, seed in enumerate(command.trial_seeds(trials.request.seeds)):
        if trials.remaining_seconds < longest_seconds:
            console.print(f"the budget ends after {number} seeds")
            break
        before = trials.remaining_seconds
        # Each round begins with the other precision, so that none always runs first.
        order = command.precisions[:: -1 if number % 2 else 1]
        for precision in order:
            # The baseline's trials may be recorded.
            if not command.recorded_result(precision, seed):
                trials.run(precision, seed)
        longest_seconds = max(longest_seconds, before - trials.remaining_seconds)
        verdict = _checked_verdict(trials)
        if verdict.looks:
            look = verdict.looks[-1]
            console.print(f"{look.seeds} seeds: {verdict.decision}, {verdict.reason}")
        # More seeds do not help a precision that diverged or is too slow for a trial.
        is_hopeless = verdict.precision.rating in (Verdict.DIVERGED, Verdict.SLOW)
        if is_hopeless or verdict.decision != "undecided":
            break


def _checked_verdict(trials: Trials) -> GateVerdict:
    """Return the verdict of mode=gate so far.

    Raises:
        ConfigError: the precision or the baseline does not train.
    """
    advice = trials.advice()
    # Where the baseline does not train, a precision that does not either is no worse.
    for each in advice.verdicts:
        if each.name == trials.request.baseline and not each.is_acceptable:
            raise ConfigError(
                f"mode=gate has no answer: the baseline {each.name} itself does not train "
                f"({each.rating}). Type another advise.baseline, or settings that it trains with."
            )
    verdict = gate_verdict(advice)
    if not verdict or verdict.precision.rating in NOT_TRAINED:
        reason = verdict.reason if verdict else "no trial wrote a result"
        precision = trials.command.precisions[1]
        raise ConfigError(f"mode=gate has no answer for {precision}: {reason}.")
    return verdict


def prepare_sweeper(config: DictConfig) -> None:
    """Register the sweeper with Hydra, and check the command.

    Args:
        config: the sweep's.

    Raises:
        ConfigError: the command asks for what cannot be compared.
        Unavailable: the device is not there.
    """
    register(AdviseSweeper)
    # Here as well as in the sweep: an error now comes before a sweep's folder and its parent run.
    AdviseCommand.from_config(config)


@final
class AdviseSweeper(Sweeper):
    """A sweeper of Hydra that runs trials until the budget is used up."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives every sweeper."""
        self._config = config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: Sequence[str]) -> Any:
        """Run all trials. The sweep's report is made from the files that they leave.

        Args:
            arguments: overrides of the command, which are read from the config instead.
        """
        folder = Path(self._config.hydra.sweep.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        # Sweeps of Hydra's own sweepers have this file, too.
        OmegaConf.save(self._config, folder / "multirun.yaml")
        command = AdviseCommand.from_config(self._config)
        resumes = bool(self._config.hydra.callbacks.sweep.resume)
        TrialScheduler(Trials(command, self._launcher, folder, resumes)).run()
