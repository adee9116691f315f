"""Run trials as jobs of the sweep, and keep the budget of time."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from hydra.plugins.launcher import Launcher

from runner.core import RunResult, fmt
from runner.sweeps.sweep import Sweep
from runner.sweeps.sweep_resume import final_result, has_settings
from runner.tracking.result_table import read_results


class Trials:
    """The sweep's jobs as trials: launches them, reads their results, keeps the budget.

    Args:
        launcher: set up.
        folder: the sweep's.
        budget: seconds from now.
        resumes: continue with the jobs that the folder holds.
    """

    def __init__(self, launcher: Launcher, folder: Path, budget: float, resumes: bool) -> None:
        self.launcher = launcher
        self.folder = folder
        self.budget = budget
        # A resumed command has the whole budget again; jobs that finished before take none of it.
        self._began = perf_counter()
        self._earlier_results = self._results_by_number() if resumes else {}
        self._next_number = max(self._earlier_results, default=-1) + 1

    @property
    def remaining_seconds(self) -> float:
        """Seconds that remain of the budget; negative once it is used up."""
        return self.budget - (perf_counter() - self._began)

    def launch(self, words: Sequence[str]) -> RunResult | None:
        """Run a job and return its result, None if it wrote none.

        A job that finished in an earlier command is not run again.

        Args:
            words: overrides of the job.

        Raises:
            SystemExit: a signal has stopped the sweep.
        """
        # By its overrides, not by its place: how many trials come before it depends on the budget.
        earlier = self._earlier_results.items()
        numbers = [n for n, result in earlier if has_settings(result, words)]
        if numbers:
            number = numbers[0]
        else:
            number = self._next_number
            self._next_number += 1
        # One job per launch: jobs that run at once would disturb each other's timing.
        if not (numbers and final_result(self.folder / str(number), words)):
            self.launcher.launch([[*words]], initial_job_idx=number)
        return self._results_by_number().get(number)

    def record_shared_overrides(self, words: Sequence[str]) -> None:
        """Write the overrides that all jobs share to the manifest: no job is named after them.

        Args:
            words: overrides of a job; its precision and seed are not shared.
        """
        if Sweep.current is not None:
            shared = [word for word in words if not word.startswith(("precision=", "seed="))]
            Sweep.current.update_manifest(overrides=shared)

    def announce(self, most: int) -> None:
        """Write to the manifest what the trials that follow say of their number and the budget.

        Args:
            most: largest number of trials; 0 where it is not known.
        """
        if Sweep.current is not None:
            end_ms = fmt.now_ms() + round(1e3 * self.remaining_seconds)
            Sweep.current.update_manifest(max_trials=most, budget_end_ms=end_ms)

    def results(self) -> list[RunResult]:
        """Return the results of all jobs so far."""
        return read_results(self.folder)

    def _results_by_number(self) -> dict[int, RunResult]:
        # A job's folder is named by its number.
        return {int(Path(result.folder).name): result for result in self.results()}

    def delete_jobs(self) -> None:
        """Delete the jobs so far; their numbers are used again."""
        for number in range(self._next_number):
            shutil.rmtree(self.folder / str(number), ignore_errors=True)
        self._earlier_results = {}
        self._next_number = 0
