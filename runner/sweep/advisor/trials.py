"""Trials as jobs of the sweep, and the time that they take."""

import io
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from hydra.plugins.launcher import Launcher
from rich.console import Console

from runner.modes.result import RunResult, read_results
from runner.sweep.sweep import Sweep
from runner.sweep.sweep_resume import finished_result, same_settings
from runner.utils.console import plain_console
from runner.utils.formatting import format_number


class Trials:
    """Launches jobs and reads what they left.

    Args:
        launcher: set up.
        folder: the sweep's.
        budget: seconds from now.
        resumes: goes on with the jobs that the folder holds.
    """

    def __init__(self, launcher: Launcher, folder: Path, budget: float, resumes: bool) -> None:
        self.launcher, self.folder, self.budget = launcher, folder, budget
        self._began = perf_counter()
        self._before = {int(Path(r.folder).name): r for r in self.results() if resumes}
        self._next = max(self._before, default=-1) + 1

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.budget - (perf_counter() - self._began)

    def launch(self, jobs: Sequence[Sequence[str]]) -> list[RunResult]:
        """Their results, in order; what an earlier command has done is not done again. Raises
        SystemExit where a signal has stopped the sweep."""
        numbers = [self._number(words) for words in jobs]
        for job, words in zip(numbers, jobs, strict=True):
            if job not in self._before or not finished_result(self.folder / str(job), words):
                self.launcher.launch([[*words]], initial_job_idx=job)
        found = {int(Path(r.folder).name): r for r in self.results()}
        return [found[job] for job in numbers if job in found]

    def _number(self, words: Sequence[str]) -> int:
        """That it had before; else the next."""
        for job, result in self._before.items():
            if same_settings(result.overrides, words):
                return job
        self._next += 1
        return self._next - 1

    def settle(self, words: Sequence[str]) -> None:
        """Overrides that all jobs share, so that none is named after them."""
        if sweep := Sweep.current:
            sweep.manifest = replace(sweep.manifest, overrides=[*words])
            sweep.manifest.write(self.folder)

    def results(self) -> list[RunResult]:
        """Of all jobs so far."""
        return read_results(self.folder)

    def discard(self) -> None:
        """Forget the jobs so far: their numbers are given again."""
        for job in range(self._next):
            shutil.rmtree(self.folder / str(job), ignore_errors=True)
        self._before, self._next = {}, 0


def print_one_line_result(work: Callable[[Console], RunResult]) -> RunResult:
    """What a run comes to in one line, instead of all that it says."""
    result = work(Console(file=io.StringIO()))
    numbers = [f"{name} {format_number(value)}" for name, value in result.metrics.items()]
    took = f"{result.steps} steps, {result.seconds:.1f} s"
    plain_console().print("  ".join([f"{result.label}:", *numbers, took]), soft_wrap=True)
    return result
