"""From one look at the pace of float32 to trials of every precision, and what heals those that
fail."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from runner.diagnostics.memory.forecast import largest_fitting_batch, peak_forecast
from runner.diagnostics.memory.limits import USABLE, free_memory
from runner.diagnostics.numerics import read
from runner.modes.result import RunResult
from runner.precision.precision import Precision
from runner.precision.registry import load_precision
from runner.sweep.advisor.diagnosis import describe_shortage, suspect_modules
from runner.sweep.advisor.fp32_search import Float32ModuleSearch
from runner.sweep.advisor.request import AdviseRequest
from runner.sweep.advisor.settings import AdviseSettings
from runner.sweep.advisor.system_load import other_programs_load
from runner.sweep.advisor.trials import Trials
from runner.sweep.report.compare import BASE
from runner.sweep.report.paired_test import LEAST
from runner.sweep.report.ranking import Advice, rank_precisions
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.accelerator import choose_accelerator
from runner.utils.console import plain_console
from runner.utils.errors import ConfigError, RunnerError
from runner.utils.tensors import MIB

FIRST_LOOK = 0.05
"""Share of the budget in which float32 shows its pace."""
SHARE = 0.6
"""Share of it that the trials are laid out for: precisions differ in pace, and what fails is looked
into."""
PACE, EMULATED_PACE = 1.5, 5.0
"""Expected time of a precision's step over float32's, before it is known."""
LEAST_STEPS = 20
LOOKS = 4
"""At float32's numbers, in a trial of their own."""
LEAST_SECONDS = 0.6
"""Of float32's steps in a trial: less gives no speed."""
START = 0.7
"""Seconds of a job before and after its run: its process, its imports, its record's end."""
PATIENCE = 4.0
"""A trial is cut after so many times what float32 takes."""
SLACK, SLACK_SHARE = 30.0, 0.1
"""Seconds more, at most this share of the budget: a machine may be held up."""
_NEVER = 10**9


class TrialScheduler:
    """The trials of one command.

    Args:
        resumed: what an earlier command asked, whose trials these go on with.
    """

    def __init__(
        self, asked: AdviseRequest, trials: Trials, resumed: AdviseSettings | None = None
    ) -> None:
        self.asked, self.trials, self.console = asked, trials, plain_console()
        self.settings, self.question = asked.spec.advise, resumed

    def run(self) -> None:
        """Raises SystemExit where a signal has stopped it."""
        if self.question is None:
            self._ask(*self._pace())
        self._rounds()
        self._heal()
        self._predict()

    def _heal(self) -> None:
        """What is wrong with the precisions that fail, and what mends them."""
        advice = self._advice()
        failing = [line.group.precision for line in advice.lines if line.failing]
        if not failing or advice.pick is None:
            return
        suspects = self._look(failing)
        if self.settings.islands:
            Float32ModuleSearch(self.asked, self.trials, self._words, self._advice).run(suspects)

    def _predict(self) -> None:
        """The memory of those that train as well."""
        lines = self._advice().lines
        good = [line for line in lines if line.good and not (line.group.settings or line.emulated)]
        texts = [self._memory(line.group.precision) for line in good]
        assert self.question is not None
        self.question = replace(self.question, memory=[text for text in texts if text])
        self.question.write(self.trials.folder)

    def _memory(self, name: str) -> str:
        """As Question.memory has it; empty where it cannot be told."""
        spec, device = (
            self.asked.spec,
            choose_accelerator(
                self.asked.spec.accelerator.name, self.asked.spec.accelerator.index
            ).device,
        )
        precision: Precision = load_precision(name)
        try:
            need = peak_forecast(spec, precision, device)
            peak = need(spec.train.batch_size).total / MIB
            batch = (
                largest_fitting_batch(need, spec.train.batch_size, free_memory(device) * USABLE)
                or 0
            )
        except RunnerError:
            return ""
        return f"{name}: {peak:.4g} {batch}"

    def _look(self, failing: Sequence[str]) -> dict[str, list[str]]:
        """What one more training of float32 says of the precisions that fail; the modules that
        each of them harms most."""
        assert self.question is not None
        every = max(1, self.question.steps // LOOKS)
        words = [*self._words(), f"numerics.every={every}", "train.compile=false"]
        if self.trials.left <= 0:
            return {}
        result = self.trials.launch([self.asked.trial(BASE, self.asked.seed, *words)])[0]
        if result.status != "finished":
            return {}
        try:
            numbers = read(self.trials.folder / Path(result.folder).name)
        except RunnerError:
            return {}
        told = {name: describe_shortage(numbers, name) for name in failing}
        nothing = f"in every module {BASE}'s numbers fit its formats"
        found = [f"{name}: {text or nothing}" for name, text in told.items()]
        self.question = replace(self.question, found=found)
        self.question.write(self.trials.folder)
        return {name: suspect_modules(numbers, name) for name in failing}

    def _pace(self) -> tuple[float, float, int]:
        """Seconds of a step of float32 and of what a job needs beside them, and the steps of the
        whole run.

        Raises:
            ConfigError: it does not train, or measures no loss.
        """
        seconds = max(1.0, FIRST_LOOK * self.trials.budget)
        words = [f"train.max_seconds={seconds:g}", f"train.eval_every={_NEVER}"]
        limits = [n for n in (self.asked.spec.train.max_steps, self.settings.steps) if n]
        if limits:
            words.append(f"train.max_steps={min(limits)}")
        self.console.print(f"{BASE} for {seconds:.0f} s at most, to see its pace")
        look = self.asked.look(BASE, self.asked.seed, *words)
        self._settle(look)
        result = self.trials.launch([look])[0]
        if result.status != "finished" or not result.step_ms:
            self.trials.discard()
            raise ConfigError(result.error or f"{BASE} took no step: there is nothing to compare.")
        if VAL_LOSS not in result.metrics:
            self.trials.discard()
            raise ConfigError(f"mode=advise judges by {VAL_LOSS}, which task= does not measure.")
        step = result.step_ms / 1e3
        start = max(0.0, result.seconds - result.steps * step) + START  # it may compile
        self.trials.discard()
        return step, start, result.planned_steps

    def _steps(self, step: float, start: float, most: int) -> int:
        """A round number, so that the same machine gives the same one again."""
        slow = len(self.asked.emulated)
        others = len(self.asked.precisions) - 1 - slow
        count = self.settings.seeds * (1 + PACE * others + EMULATED_PACE * slow)
        each = SHARE * self.trials.budget / count - start
        least = max(LEAST_STEPS, _round(2 * LEAST_SECONDS / step))
        return min(most, max(least, _round(each / step)))

    def _ask(self, step: float, start: float, most: int) -> None:
        asked, settings = self.asked, self.settings
        steps = min(most, settings.steps or self._steps(step, start, most))
        slack = min(SLACK, SLACK_SHARE * self.trials.budget)
        seconds = math.ceil(PATIENCE * steps * step + slack)
        own = [f"{name} {word}" for name, words in asked.own.items() for word in words]
        self.question = AdviseSettings(
            settings.objective,
            settings.tolerance,
            steps,
            seconds,
            settings.seeds,
            settings.budget,
            [*asked.command, *asked.words, *asked.seeded],
            asked.emulated,
            own,
            asked.absent,
            busy=other_programs_load(
                choose_accelerator(asked.spec.accelerator.name, asked.spec.accelerator.index).device
            ),
        )
        shared = {word for words in asked.own.values() for word in words}
        self._settle([*asked.trial(BASE, asked.seed, *self._words()), *sorted(shared)])
        self.question.write(self.trials.folder)
        self._warn(steps * step + start)
        text = f"{steps} steps, {settings.seeds} seeds, {len(asked.precisions)} precisions"
        self.console.print(f"{text}: {', '.join(asked.precisions)}")

    def _settle(self, words: Sequence[str]) -> None:
        """Trials are named by what differs: their precision, their seed, and what heals."""
        self.trials.settle([word for word in words if not word.startswith(("precision=", "seed="))])

    def _warn(self, trial: float) -> None:
        """Of a budget that gives no verdict, as far as float32 tells."""
        needs = LEAST * trial * len(self.asked.precisions)
        if needs > self.trials.left:
            time = f"{needs / 60:.0f} minutes" if needs >= 120 else f"{needs:.0f} s"
            text = f"warning: {LEAST} seeds of each precision take about {time}"
            self.console.print(f"{text}, and advise.budget={self.settings.budget}.")

    def _words(self, precision: str = BASE) -> list[str]:
        """Overrides that set a trial's length."""
        assert self.question is not None
        steps, seconds = self.question.steps, self.question.seconds
        if precision in self.asked.emulated:
            seconds = math.ceil(EMULATED_PACE * seconds)
        return [
            f"train.max_steps={steps}",
            f"train.eval_every={steps}",
            f"train.max_seconds={seconds}",
            "train.early_stop=null",
        ]

    def _rounds(self) -> None:
        """Seed after seed, each precision in turn. Those that failed are left out, and so are the
        least promising ones where the budget would give no verdict on all; a round that it has no
        time for is not begun."""
        alive, costs, diverged = list(self.asked.precisions), dict[str, float](), False
        for number in range(self.settings.seeds):
            if number and self.trials.left < sum(costs[name] for name in alive):
                self.console.print(f"the budget ends after {number} seeds")
                return
            seed, turn = self.asked.seed + number, number % len(alive)
            order = alive[turn:] + alive[:turn]
            found = self._round(order, seed)
            costs = {r.precision: r.seconds + START for r in found}
            alive = [name for name in alive if name in self._sound(found)]
            diverged |= any(r.outcome == "diverged" for r in found)
            if BASE not in alive or (len(alive) == 1 and not diverged):
                return  # float32's other seeds are what a healed precision is judged by
            alive = self._affordable(alive, found, costs, LEAST - number - 1)

    def _round(self, order: Sequence[str], seed: int) -> list[RunResult]:
        """A trial of each, as far as the budget reaches."""
        found: list[RunResult] = []
        for number, name in enumerate(order):
            if number and self.trials.left <= 0:
                self.console.print(f"the budget ends before {', '.join(order[number:])}")
                break
            found += self.trials.launch([self.asked.trial(name, seed, *self._words(name))])
        return found

    def _affordable(
        self, alive: list[str], found: Sequence[RunResult], costs: Mapping[str, float], rounds: int
    ) -> list[str]:
        """Those on which the budget gives a verdict, which takes so many rounds more."""
        home = next(r for r in found if r.precision == BASE)
        merits = {r.precision: self._merit(r, home) for r in found if r.precision in alive}
        others = sorted((n for n in alive if n != BASE), key=lambda n: merits[n], reverse=True)
        left, kept = self.trials.left - rounds * costs[BASE], {BASE}
        for name in others:
            left -= rounds * costs[name]
            if rounds <= 0 or left >= 0 or kept == {BASE}:
                kept.add(name)
        if dropped := [name for name in others if name not in kept]:
            self.console.print(f"no time for more seeds of {', '.join(dropped)}")
        return [name for name in alive if name in kept]

    def _merit(self, result: RunResult, base: RunResult) -> float:
        """By the objective, of one trial; nobody knows whether what is emulated would be faster."""
        match self.settings.objective:
            case "time":
                return -(result.step_ms or base.step_ms or math.inf)
            case "memory":
                return -((result.weights_mib or 0.0) + (result.optimizer_mib or 0.0))
            case _:
                return -result.metrics[VAL_LOSS]

    def _sound(self, found: Sequence[RunResult]) -> set[str]:
        assert self.question is not None
        steps = self.question.steps
        return {r.precision for r in found if r.outcome == "finished" and r.steps >= steps}

    def _advice(self) -> Advice:
        assert self.question is not None
        return rank_precisions(self.trials.results(), self.question)


def _round(number: float) -> int:
    """The next of 1, 2, 5, 10, 20, ... downwards."""
    if number < 1:
        return 0
    power = 10 ** math.floor(math.log10(number))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= number)
