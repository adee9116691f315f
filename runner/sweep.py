"""A sweep: its parent run, and its jobs' results in one table and one report at the end."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from runner import notes
from runner.artifacts import now_ms
from runner.build import build_group
from runner.console import plain_console
from runner.errors import RunnerError
from runner.report.command import joined, store_report
from runner.report.compare import compare
from runner.report.conclusion import conclusion, names
from runner.report.data import SweepData
from runner.report.gather import JOBS, MANIFEST, from_folder, write_jobs
from runner.report.pages import summary_markdown, write_report
from runner.result import RunResult, page, sweep_table, ui_command
from runner.secrets import hide, hide_override, masked
from runner.shown import complain, typed
from runner.tracking.base import RunInfo, Status, Tracker


class Sweep:
    """The sweep that this process runs. Its manifest lies in its folder, where jobs in other
    processes find its id. With tracking.sweep it joins one that was begun elsewhere, whose parent
    run then gets its jobs and the report over all of them."""

    current: "Sweep | None" = None

    def __init__(self, folder: Path, overrides: Sequence[str], tracking: Mapping[str, Any]) -> None:
        self.folder, self.began_ms = folder, now_ms()
        begun = tracking.get("sweep")
        self.id = str(begun or uuid4().hex[:12])
        folder.mkdir(parents=True, exist_ok=True)
        self.command = ["python", "-m", "runner", *map(hide_override, sys.argv[1:])]
        manifest = {"id": self.id, "overrides": list(overrides), "command": self.command}
        (folder / MANIFEST).write_text(json.dumps(masked(manifest), indent=2) + "\n")
        self.tracker: Tracker = build_group("tracking", tracking)
        self.joins = begun is not None and self.tracker.takes_runs
        if self.joins:
            self.tracker.check_sweep()
        else:
            self._open(overrides)

    def _open(self, overrides: Sequence[str]) -> None:
        name = f"sweep {' '.join(map(hide_override, overrides))}"[:250]
        command = typed(self.command)
        tags = {"sweep_id": self.id, "output_dir": str(self.folder), "command": command}
        self.tracker.open(RunInfo(self.folder, {}, tags, name=name, sweep=self.id, role="sweep"))
        self.tracker.note(notes.begun(self.command))

    @classmethod
    def begin(cls, folder: Path, overrides: Sequence[str], tracking: Mapping[str, Any]) -> None:
        """Open the parent run, so that the store exists before any job needs it."""
        cls.current = cls(folder, overrides, tracking)

    def end(self, status: int) -> int:
        """Print the table, leave the report with the parent run, close it and print the verdict
        over the jobs of all machines.

        Returns:
            0 when every job finished; 1 when any failed; 2 when none failed and this machine lacks
            what some need; the status itself for a stop.
        """
        data = from_folder(self.folder, stopped=status > 128)
        results = [job.result for job in data.jobs]
        console = plain_console()
        bad = [r for r in results if r.status in ("failed", "stopped")]
        lacking = any(r.status == "unavailable" for r in results)
        if status == 2 and bad:  # a search gives up where no job came to a number
            status = 1
        word: Status = "KILLED" if status > 128 else "FAILED" if status or bad else "FINISHED"
        if results:
            self._show(console, results)
        jobs = self._store(data)
        error = f"{len(bad)} of {len(results)} jobs did not finish." if bad else None
        self.tracker.close(word, error)
        reached = self.joins or self.tracker.complete
        whole = self._whole(console, data, jobs) if jobs and reached else data
        if whole.jobs:
            told = compare([job.result for job in whole.jobs])
            console.print(conclusion(told, whole.stopped))
        self._say_where(console, results)
        return status or (1 if bad or self._refused() else 2 if lacking else 0)

    def _refused(self) -> bool:
        """Whether the store does not take the sweep, which is then said."""
        try:
            self.tracker.check()
        except RunnerError as error:
            complain(str(error))
            return True
        return False

    def _show(self, console: Console, results: Sequence[RunResult]) -> None:
        console.print()
        console.print(sweep_table(results))
        errors: dict[str, list[str]] = {}
        for result in results:
            if result.error:
                errors.setdefault(result.error, []).append(result.label)
        for error, labels in errors.items():
            console.print(f"{names(labels)}: {error}", markup=False)

    def _store(self, data: SweepData) -> Path | None:
        """The report over the jobs that ran here, in the folder and, of a sweep that began here,
        with the parent run; the file of their results."""
        if not data.jobs:
            return None
        paths, jobs = write_report(data, self.folder), write_jobs(self.folder, data, self.began_ms)
        if not self.joins:
            self.tracker.artifact(jobs, JOBS)
            for path in paths:
                self.tracker.artifact(path)
            self.tracker.note(summary_markdown(data))
        return jobs

    def _whole(self, console: Console, data: SweepData, jobs: Path) -> SweepData:
        """The sweep with the jobs of other machines, whose report then replaces that of ours."""
        uri, parent = getattr(self.tracker, "uri", ""), self.tracker.run_id
        try:
            if self.joins or (parent and joined(uri, parent, jobs.name)):
                return store_report(uri, parent or self.id, self.folder, jobs)[1]
        except RunnerError as error:
            console.print(f"warning: the report tells of the jobs that ran here only: {error}")
        return data

    def _say_where(self, console: Console, results: Sequence[RunResult]) -> None:
        uri = hide(getattr(self.tracker, "uri", ""))
        if self.tracker.run_id:
            command = ui_command(uri, getattr(self.tracker, "experiment", ""))
            console.print(f"MLflow: parent run {self.tracker.run_id}; to see it: {command}")
        told = [self.tracker.dashboard, *(result.dashboard for result in results)]
        if path := next(filter(None, told), None):
            console.print(f"dashboard: {page(uri, path)}", soft_wrap=True)
        console.print(f"report: {self.folder / 'report.html'}", soft_wrap=True)


def finish(status: int) -> int:
    """End the sweep of this process, if there is one; the exit status of the command."""
    if Sweep.current is None:
        return status
    sweep, Sweep.current = Sweep.current, None
    return sweep.end(status)
