"""Trials as jobs of the sweep, and the time that they take."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from hydra.plugins.launcher import Launcher

from runner.result import RunResult, read_results
from runner.sweep import Sweep


class Trials:
    """Launches jobs and reads what they left.

    Args:
        launcher: set up.
        folder: the sweep's.
        budget: seconds from now.
    """

    def __init__(self, launcher: Launcher, folder: Path, budget: float) -> None:
        self.launcher, self.folder, self.budget = launcher, folder, budget
        self._began, self._next = perf_counter(), 0

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.budget - (perf_counter() - self._began)

    def launch(self, jobs: Sequence[Sequence[str]]) -> list[RunResult]:
        """Their results, in order. Raises SystemExit where a signal has stopped the sweep."""
        first, self._next = self._next, self._next + len(jobs)
        self.launcher.launch([[*words] for words in jobs], initial_job_idx=first)
        return [r for r in self.results() if first <= int(Path(r.folder).name) < self._next]

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
        for number in range(self._next):
            shutil.rmtree(self.folder / str(number), ignore_errors=True)
        self._next = 0
