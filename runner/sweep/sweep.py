"""A sweep: its parent run, and its jobs' results in one table and one report at the end."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from runner.config.overrides import without_program_options
from runner.config.targets import build_group
from runner.modes import notes
from runner.modes.result import RunResult
from runner.modes.tables import page_url, sweep_table, ui_command
from runner.sweep.manifest import Manifest
from runner.sweep.report import advice_page
from runner.sweep.report.compare import compare
from runner.sweep.report.conclusion import conclusion, join_names
from runner.sweep.report.jobs import SweepData
from runner.sweep.report.load import JOBS, load_from_folder, write_job_facts
from runner.sweep.report.pages import summary_markdown, write_report
from runner.sweep.report.rebuild import is_joined_by_others, store_report
from runner.sweep.sweep_resume import resume_command
from runner.tracking.journal import latest_journal
from runner.tracking.tracker import RunInfo, Status, Tracker
from runner.utils.console import plain_console
from runner.utils.errors import RunnerError
from runner.utils.folder_lock import folder_lock
from runner.utils.formatting import now_ms
from runner.utils.secrets import redact, redact_override
from runner.utils.terminal import print_error, quote_command


class Sweep:
    """The sweep that this process runs. Its manifest lies in its folder, where jobs in other
    processes find its id. With tracking.sweep it joins one that was begun elsewhere, whose parent
    run then gets its jobs and the report over all of them."""

    current: "Sweep | None" = None

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        tracking: Mapping[str, Any],
        resume: bool = False,
        left_out: Sequence[str] = (),
    ) -> None:
        self.folder, self._held = folder, ExitStack()
        folder.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(folder_lock(folder))
        self.manifest = Manifest.read(folder) if resume else _asked(overrides, tracking)
        self.manifest = replace(self.manifest, left_out=left_out)
        replace(self.manifest, finished=False).write(folder)
        self.tracker: Tracker = build_group("tracking", tracking)
        self.joins = tracking.get("sweep") is not None and self.tracker.takes_runs
        if self.joins:
            self.tracker.check_sweep()
        else:
            self._open(resume)

    @property
    def id(self) -> str:
        return self.manifest.id

    def _open(self, resume: bool) -> None:
        command = self.manifest.command
        words = (redact_override(word).removeprefix("++") for word in self.manifest.overrides)
        name = f"sweep {' '.join(words)}"[:250]
        tags = {
            "sweep_id": self.id,
            "output_dir": str(self.folder),
            "command": quote_command(command),
        }
        before = latest_journal(self.folder) if resume else None
        self.tracker.open(
            RunInfo(self.folder, {}, tags, name, sweep=self.id, role="sweep", continues=before)
        )
        self.tracker.note(notes.running_note(command))

    @classmethod
    def begin(
        cls,
        folder: Path,
        overrides: Sequence[str],
        tracking: Mapping[str, Any],
        resume: bool,
        left_out: Sequence[str] = (),
    ) -> None:
        """Open the parent run, so that the store exists before any job needs it.

        Args:
            resume: go on with the sweep that the folder holds.
            left_out: keys that some of its precisions do not take, see Manifest.
        """
        cls.current = cls(folder, overrides, tracking, resume, left_out)

    def set_job_count(self, jobs: int) -> None:
        """Write to the manifest how many jobs the sweep has."""
        self.manifest = replace(self.manifest, jobs=jobs)
        self.manifest.write(self.folder)

    def end(self, status: int) -> int:
        """Print the table, leave the report with the parent run, close it and print the verdict
        over the jobs of all machines.

        Returns:
            0 when every job finished; 1 when any failed; 2 when none failed and this machine lacks
            what some need; the status itself for a stop.
        """
        data = load_from_folder(self.folder, stopped=status > 128)
        self.manifest = replace(self.manifest, finished=not data.unfinished)
        results = [job.result for job in data.jobs]
        console = plain_console()
        bad = [r for r in results if r.status in ("failed", "stopped")]
        lacking = any(r.status == "unavailable" for r in results)
        if data.question and not data.stopped:  # what a precision cannot do is an answer
            answered = data.advice is not None and data.advice.pick is not None
            bad, lacking = [] if answered else bad, False
        if status == 2 and bad:  # a search gives up where no job came to a number
            status = 1
        word: Status = "KILLED" if status > 128 else "FAILED" if status or bad else "FINISHED"
        if results and not data.question:
            self._show(console, results)
        jobs = self._store(data)
        error = f"{len(bad)} of {len(results)} jobs did not finish." if bad else None
        self.tracker.close(word, error)
        reached = self.joins or self.tracker.complete
        whole = self._whole(console, data, jobs) if jobs and reached else data
        if whole.jobs and whole.stopped:
            console.print("Stopped. So far:")
        if whole.jobs:
            _conclude(console, whole)
        if results or status != 2:  # refused before its first job, it would be refused again
            self._say_where(console, results)
        self.manifest.write(self.folder)
        self._held.close()
        return status or (1 if bad or self._refused() else 2 if lacking else 0)

    def _refused(self) -> bool:
        """Whether the store does not take the sweep, which is then said."""
        try:
            self.tracker.check()
        except RunnerError as error:
            print_error(str(error))
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
            console.print(f"{join_names(labels)}: {error}", markup=False)

    def _store(self, data: SweepData) -> Path | None:
        """The report over the jobs that ran here, in the folder and, of a sweep that began here,
        with the parent run; the file of their results."""
        if not data.jobs:
            return None
        paths = write_report(data, self.folder)
        jobs = write_job_facts(self.folder, data, self.manifest.began_ms)
        if not self.joins:
            self.tracker.artifact(jobs, JOBS)
            for path in paths:
                self.tracker.artifact(path)
            again = notes.command_note(resume_command(self.folder)) if data.unfinished else ""
            self.tracker.note(summary_markdown(data) + (again and f"\nTo go on: {again}\n"))
        return jobs

    def _whole(self, console: Console, data: SweepData, jobs: Path) -> SweepData:
        """The sweep with the jobs of other machines, whose report then replaces that of ours."""
        uri, parent = getattr(self.tracker, "uri", ""), self.tracker.run_id
        try:
            if self.joins or (parent and is_joined_by_others(uri, parent, jobs.name)):
                return store_report(uri, parent or self.id, self.folder, jobs)[1]
        except RunnerError as error:
            console.print(f"warning: the report tells of the jobs that ran here only: {error}")
        return data

    def _say_where(self, console: Console, results: Sequence[RunResult]) -> None:
        uri = redact(getattr(self.tracker, "uri", ""))
        if self.tracker.run_id:
            command = ui_command(uri, getattr(self.tracker, "experiment", ""))
            console.print(f"MLflow: parent run {self.tracker.run_id}; to see it: {command}")
        told = [self.tracker.dashboard, *(result.dashboard for result in results)]
        if path := next(filter(None, told), None):
            console.print(f"dashboard: {page_url(uri, path)}", soft_wrap=True)
        console.print(f"report: {self.folder / 'report.html'}", soft_wrap=True)
        if not self.manifest.finished:
            console.print(f"to go on: {quote_command(resume_command(self.folder))}", soft_wrap=True)


def _conclude(console: Console, data: SweepData) -> None:
    if data.advice:
        advice_page.print_advice(console, data.advice)
    else:
        console.print(conclusion(compare([job.result for job in data.jobs]), data.missing))


def _asked(overrides: Sequence[str], tracking: Mapping[str, Any]) -> Manifest:
    words = ["python", "-m", "runner", *without_program_options(sys.argv[1:])]
    begun = str(tracking.get("sweep") or uuid4().hex[:12])
    return Manifest(begun, words, overrides, str(Path.cwd()), now_ms())


def finish_sweep(status: int) -> int:
    """End the sweep of this process, if there is one; the exit status of the command."""
    if Sweep.current is None:
        return status
    sweep, Sweep.current = Sweep.current, None
    return sweep.end(status)
