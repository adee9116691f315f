"""Run trials as jobs of the sweep, and keep the budget of time."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from hydra.plugins.launcher import Launcher

from runner.core import RunResult, fmt
from runner.sweeps.advisor.advise_command import AdviseCommand
from runner.sweeps.room import AdviseSpec
from runner.sweeps.sweep import Sweep
from runner.sweeps.sweep_resume import final_result, has_settings
from runner.sweeps.verdict.advise_request import AdviseRequest
from runner.sweeps.verdict.ranking import Advice, rank_precisions
from runner.tracking.result_table import read_results


class Trials:
    """The sweep's jobs as trials: launches them, reads their results, keeps the budget.

    Args:
        command: the command.
        launcher: set up.
        folder: the sweep's.
        resumes: continue with the jobs that the folder holds.

    Attributes:
        request: of the command, with what its trials have measured so far.
        is_resumed: the request is that of an earlier command, whose trials are continued with the
            same lengths.
        budget: seconds from the construction on.
    """

    def __init__(
        self, command: AdviseCommand, launcher: Launcher, folder: Path, resumes: bool
    ) -> None:
        earlier = AdviseRequest.read(folder) if resumes else None
        self.command = command
        self.request = earlier or command.request
        self.is_resumed = earlier is not None
        self.folder = folder
        self.budget = command.spec.section(AdviseSpec).seconds or 0.0
        self._launcher = launcher
        # A resumed command has the whole budget again; jobs that finished before take none of it.
        self._began = perf_counter()
        self._earlier_results = self._results_by_number() if resumes else {}
        self._next_number = max(self._earlier_results, default=-1) + 1

    def update_request(self, **measured: Any) -> None:
        """Write the request with what was measured to the sweep's folder, for the report."""
        self.request = replace(self.request, **measured)
        self.request.write(self.folder)

    def advice(self) -> Advice:
        """Return what the trials so far say."""
        return rank_precisions(read_results(self.folder), self.request)

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
        # A trial is known by its overrides: how many trials come before it depends on the budget.
        earlier = self._earlier_results.items()
        known = (number for number, result in earlier if has_settings(result, words))
        number = next(known, self._next_number)
        self._next_number = max(self._next_number, number + 1)
        # One job per launch: jobs that run at once would disturb each other's timing.
        if number not in self._earlier_results or not final_result(
            self.folder / str(number), words
        ):
            self._launcher.launch([[*words]], initial_job_idx=number)
        return self._results_by_number().get(number)

    def run(self, precision: str, seed: int, *more: str) -> RunResult | None:
        """Launch a trial of the length that is set, with further overrides; see launch()."""
        words = [*self.request.length_overrides(precision), *more]
        return self.launch(self.command.trial_overrides(precision, seed, *words))

    def record_shared_overrides(self, words: Sequence[str]) -> None:
        """Write the overrides that all jobs share to the manifest: no job is named after them.

        Args:
            words: overrides of a job; its precision and seed are not shared.
        """
        if Sweep.current:
            shared = [word for word in words if not word.startswith(("precision=", "seed="))]
            Sweep.current.update_manifest(overrides=shared)

    def announce(self, most: int) -> None:
        """Write to the manifest what the trials that follow say of their number and the budget.

        Args:
            most: largest number of trials; 0 where it is not known.
        """
        if Sweep.current:
            end_ms = fmt.now_ms() + round(1e3 * self.remaining_seconds)
            Sweep.current.update_manifest(max_trials=most, budget_end_ms=end_ms)

    def _results_by_number(self) -> dict[int, RunResult]:
        # A job's folder is named by its number.
        return {int(Path(result.folder).name): result for result in read_results(self.folder)}

    def delete_jobs(self) -> None:
        """Delete the jobs so far; their numbers are used again."""
        for number in range(self._next_number):
            shutil.rmtree(self.folder / str(number), ignore_errors=True)
        self._earlier_results = {}
        self._next_number = 0
