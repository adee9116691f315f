"""Open a sweep's parent run before its first job; print and store its report after the last one.

The jobs' results are read from their folders, so that the report does not depend on which process
ran them, nor on whether a job's process survived.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.errors import HydraException
from omegaconf import DictConfig
from rich.console import Console

from runner.config.overrides import override_texts, without_program_options
from runner.core import (
    RunInfo,
    RunnerError,
    RunResult,
    Tracker,
    files,
    fmt,
    journals,
    layout,
    secrets,
    targets,
    terminal,
)
from runner.output.console import plain_console, without_numbers
from runner.output.markup import markdown_code
from runner.sweeps.manifest import Manifest
from runner.sweeps.other_programs import OtherPrograms
from runner.sweeps.report.load import (
    JOB_RESULTS_FOLDER,
    is_joined_by_others,
    load_from_folder,
    store_report,
    write_job_facts,
)
from runner.sweeps.report.pages import print_answer, summary_markdown, write_report
from runner.sweeps.report.sweep_data import SweepData
from runner.sweeps.report.wording import join_names
from runner.sweeps.sweep_progress import common_reason
from runner.sweeps.sweep_resume import resume_command, with_longer_lists
from runner.tracking import notes
from runner.tracking.dashboard import REPORT_PAGE, sweep_links
from runner.tracking.result_table import page_lines

MAX_NAME_CHARACTERS = 250
"""Upper bound on the name of the parent run."""
MAX_WRITER_START_SECONDS = 8.0
"""Longest wait for the writer of records before the first job; a store may not answer."""
_PLURALS = {"precision": "precisions", "seed": "seeds", "model": "models", "data": "data sets"}


def sweep_name(config: DictConfig) -> str:
    """Return the name of a sweep's parent run: what it trains, and how many values each key has.

    Args:
        config: the sweep's.
    """
    presets = config.hydra.sweeper.get("params") or {}
    words = [f"{key}={values}" for key, values in presets.items()]
    counts = swept_counts([*words, *override_texts(config.hydra.overrides.task)])
    choices = config.hydra.runtime.choices
    # A checkpoint has its own model and data.
    groups = () if config.mode == "evaluate" else ("model", "data")
    names = [choices[group] for group in groups if group not in counts and choices.get(group)]
    mode = "" if config.mode == "train" else config.mode
    subject = " ".join(filter(None, [mode, " on ".join(names)]))
    values = [f"{count or ''} {_PLURALS.get(key, key)}".strip() for key, count in counts.items()]
    return ": ".join(filter(None, [subject, " × ".join(values)]))[:MAX_NAME_CHARACTERS]


def swept_counts(words: Sequence[str]) -> dict[str, int]:
    """Return how many values each swept key has; 0 where only Hydra's sweeper can count them."""
    counts = {}
    # Hydra itself reports what it cannot read.
    with suppress(HydraException):
        for override in OverridesParser.create().parse_overrides([*words]):
            if override.is_sweep_override():
                value = override.value()
                count = len(value.list) if isinstance(value, ChoiceSweep) else 0
                counts[override.key_or_group] = count
    return counts


class Sweep:
    """The sweep that this process runs: its manifest, its folder's lock and its parent run.

    The manifest is a file in the sweep's folder, where jobs in other processes find the sweep's id.
    With tracking.sweep the sweep joins one that began on another machine: that one's parent run
    then gets these jobs, and the report over the jobs of all machines.

    Args:
        folder: the sweep's; locked until the sweep ends.
        overrides: words of the command that Hydra composes the jobs from.
        tracking: the config group.
        resume: resume the sweep that the folder holds.
        left_out: keys that some of its precisions do not take, see Manifest.
        name: of the parent run.

    Attributes:
        current: the sweep of this process, if it runs one.
    """

    current: "Sweep | None" = None

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        tracking: Mapping[str, Any],
        resume: bool = False,
        left_out: Sequence[str] = (),
        name: str = "sweep",
    ) -> None:
        self.folder = folder
        self._accepts_untried = False
        self._early_end = ""
        self._has_begun = False
        self._has_new_folder = not folder.exists()
        files.check_links(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Released at once where the sweep is refused: a notebook keeps the error, and with it this
        # object.
        with ExitStack() as lock:
            lock.enter_context(files.folder_lock(folder))
            former = Manifest.read(folder) if resume else None
            if former:
                manifest = with_longer_lists(former, overrides)
            else:
                command = ["python", "-m", "runner", *without_program_options(sys.argv[1:])]
                sweep_id = str(tracking.get("sweep") or uuid4().hex[:12])
                cwd = str(Path.cwd())
                manifest = Manifest(sweep_id, command, overrides, cwd, fmt.now_ms()).signed()
            self.manifest = replace(manifest, left_out=left_out, finished=False)
            self.tracker: Tracker = targets.build_group("tracking", tracking)
            self.joins_other_sweep = tracking.get("sweep") is not None and self.tracker.takes_runs
            self.tracker.check_store()
            # A sweep that is killed from here on is found as unfinished by sweep.resume=last.
            self.manifest.write(folder)
            self._name = name
            self._former = former
            self._lock = lock.pop_all()

    def begin(self) -> None:
        """Open the parent run before the first job: a sweep that is refused leaves none."""
        if self._has_begun:
            return
        self._has_begun = True
        if self.manifest.jobs > 1:
            jobs = f"{self.manifest.jobs} jobs in {fmt.relative_path(self.folder)}"
            print(terminal.sanitize(f"{self._name}; {jobs}"), flush=True)
        if not self.joins_other_sweep:
            self._open_parent_run()
            # The writer of records imports mlflow, for seconds of a processor that the first job
            # would lack: it would seem slower than those that it is compared with.
            deadline = time.monotonic() + MAX_WRITER_START_SECONDS
            while self.tracker.takes_runs and not self.tracker.run_id:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        self._others = OtherPrograms()
        self._newest_result = self._time_of_newest_result()

    def _open_parent_run(self) -> None:
        """Open the parent run of a new sweep, or of a resumed one."""
        former = self._former
        overrides = self.manifest.overrides
        # The swept keys, without those of a preset, arrange the dashboard.
        swept = swept_counts(overrides)
        words = [secrets.redact_override(word).lstrip("+").partition("=") for word in overrides]
        # What all jobs share: MLflow's parameters cannot change, and a swept list may get longer.
        params = {key: text for key, equals, text in words if equals and key not in swept}
        sweep_id = self.manifest.id
        command = terminal.quote_command(self.manifest.command)
        tags = {
            "sweep_id": sweep_id,
            "output_dir": str(self.folder),
            "command": command,
            "swept": " ".join(swept),
        }
        if former and former.overrides != overrides:
            tags["mlflow.runName"] = self._name
        previous = journals.latest_journal(self.folder) if former else None
        info = RunInfo(self.folder, params, tags, self._name, sweep_id, "sweep", previous)
        self.tracker.open(info)
        self.tracker.note(notes.running_note(command))

    def accept_untried_jobs(self) -> None:
        """Let jobs that were not tried be no failure as long as another one finishes."""
        self._accepts_untried = True

    def end_early(self, reason: str) -> None:
        """Let the sweep end before its last job, for a reason that its end prints."""
        self._early_end = reason

    def update_manifest(self, **fields: Any) -> None:
        """Change fields of the manifest, and write it for the jobs."""
        self.manifest = replace(self.manifest, **fields)
        self.manifest.write(self.folder)

    def end(self, status: int) -> int:
        """Print the table, store the report, close the parent run and print the conclusion.

        The conclusion is over the jobs of all machines.

        Args:
            status: exit status of the jobs so far, as Hydra returned it.

        Returns:
            0 when every job finished, or in a preset's sweep was not tried; 1 when any failed; 2
            when none failed and this machine lacks what some need, or none was tried; the exit
            status of a gate; `status` itself after a stop.
        """
        is_stopped = status > 128 or bool(self._early_end)
        if self._has_begun:
            print("comparing the jobs ...", flush=True)
        data = load_from_folder(self.folder, is_stopped)
        if status and not (self._has_begun or data.jobs):
            # Refused before its first job: a folder that it made goes with it.
            if self._has_new_folder:
                rmtree(self.folder, ignore_errors=True)
            self._lock.close()
            return status
        self.begin()
        busy = self._busy_share()
        data = replace(data, busy=busy, accepts_untried=self._accepts_untried)
        answer = data.answer
        text = terminal.sanitize(answer.sentence)
        ended = {"finished": not data.is_unfinished, "busy": busy, "answer": text}
        self.manifest = replace(self.manifest, **ended)
        if status == 2 and answer.failed and not data.gate:
            # A search gives up with 2 where no job gave it a number.
            status = 1
        console = plain_console()
        if not data.request:
            _print_errors(console, data.results)
        if self._early_end:
            console.print(self._early_end, soft_wrap=not console.is_terminal)
        # Before the report: its charts and its upload take seconds.
        if not self.joins_other_sweep:
            print_answer(console, data)
            console.print("writing the report ...", style="dim")
        jobs_file = self._store_report(data)
        error = (
            f"{answer.failed} of {len(data.jobs)} jobs did not finish." if answer.failed else None
        )
        run_status: journals.Status = "FAILED" if status or error else "FINISHED"
        # 128 + the signal's number: a stop, by a shell's convention.
        self.tracker.close("KILLED" if status > 128 else run_status, error)
        of_all = self._add_jobs_of_other_machines(console, data, jobs_file)
        if of_all is not data or self.joins_other_sweep:
            print_answer(console, of_all)
        # A sweep that was refused before its first job would be refused again: no location.
        if data.jobs or status != 2:
            self._print_locations(console, data.results)
        self.manifest.write(self.folder)
        self._lock.close()
        # What Hydra returned stands, 128 + the signal's number after a stop.
        if status:
            return status
        if not answer.failed and self._is_rejected():
            return 2 if data.gate else 1
        return answer.exit_status

    def _busy_share(self) -> float:
        """Return the largest share of the processors that other programs kept busy while any of the
        sweep's processes ran jobs."""
        has_run = self._time_of_newest_result() > self._newest_result
        # Where other machines run the jobs, their number at once is not known.
        is_known = has_run and self.manifest.jobs_at_once
        return max(self.manifest.busy, self._others.share() if is_known else 0.0)

    def _time_of_newest_result(self) -> float:
        """Return when a job last wrote its result, in seconds by the clock of the file system."""
        written = (path.stat().st_mtime for path in self.folder.glob(f"*/{layout.RESULT}"))
        return max(written, default=0.0)

    def _is_rejected(self) -> bool:
        """Return whether the store rejected the sweep, after printing why."""
        try:
            self.tracker.check()
        except RunnerError as error:
            terminal.print_error(str(error))
            return True
        return False

    def _store_report(self, data: SweepData) -> Path | None:
        """Write the report over the jobs that ran here, and upload it to the parent run.

        Returns:
            The file of the jobs' results, which reports on other machines read; None without jobs.
        """
        if not data.jobs:
            return None
        paths = write_report(data, self.folder)
        jobs_file = write_job_facts(self.folder, data, self.manifest.began_ms)
        # A sweep that joins another one leaves the report to _add_jobs_of_other_machines.
        if not self.joins_other_sweep:
            self.tracker.artifact(jobs_file, JOB_RESULTS_FOLDER)
            for path in paths:
                self.tracker.artifact(path)
            record = data.answer.record
            self.tracker.log_metrics([(record.steps, fmt.now_ms(), record.metrics)])
            self.tracker.tags(record.tags)
            run = (self.tracker.experiment_id, self.tracker.run_id, self.manifest.id)
            note = summary_markdown(data, sweep_links(*run))
            if data.is_unfinished:
                command = markdown_code(str(resume_command(self.folder)))
                note = f"{note.rstrip()} · Resume with: {command}\n"
            self.tracker.note(note)
        return jobs_file

    def _add_jobs_of_other_machines(
        self, console: Console, data: SweepData, jobs_file: Path | None
    ) -> SweepData:
        """Return the sweep's data with the jobs of other machines, and store that report.

        It replaces the report over the jobs that ran here. Without other machines, or where the
        store does not answer, return the data as given.
        """
        parent = self.tracker.run_id
        may_have_others = self.joins_other_sweep or (parent and self.tracker.complete)
        if not (jobs_file and may_have_others):
            return data
        from runner.tracking.reader import Reader  # imports mlflow

        try:
            reader = Reader(getattr(self.tracker, "uri", ""))
            is_joined = parent and is_joined_by_others(reader, parent, jobs_file.name)
            if self.joins_other_sweep or is_joined:
                return store_report(reader, parent or self.manifest.id, self.folder, jobs_file)[1]
        except RunnerError as error:
            console.print(
                f"warning: the report covers only the jobs that ran on this machine: {error}"
            )
        return data

    def _print_locations(self, console: Console, results: Sequence[RunResult]) -> None:
        """Print where the parent run, the dashboard and the report are, and how to resume."""
        dashboards = [self.tracker.dashboard, *(result.dashboard for result in results)]
        parent = RunResult(
            precision="",
            label="sweep",
            folder=str(self.folder),
            run_id=self.tracker.run_id,
            experiment_id=self.tracker.experiment_id,
            tracking_uri=secrets.redact(getattr(self.tracker, "uri", "")),
            experiment=getattr(self.tracker, "experiment", ""),
            dashboard=next(filter(None, dashboards), None),
        )
        lines = page_lines(parent, "parent run", REPORT_PAGE)
        lines.append(("report", str(self.folder / "report.html")))
        verdict = self.folder / layout.VERDICT
        if verdict.is_file():
            lines.append(("verdict", str(verdict)))
        if not self.manifest.finished:
            lines.append(("Resume with", str(resume_command(self.folder))))
        for name, text in lines:
            console.print(f"{name}: {text}", soft_wrap=True)


def _print_errors(console: Console, results: Sequence[RunResult]) -> None:
    """Print each error with the jobs that failed by it."""
    first_errors: dict[tuple[str, str], str] = {}
    pairs = []
    for result in results:
        if result.error:
            error = common_reason(result.precision, result.error)
            # One text for the jobs of a precision whose errors differ in their numbers.
            first = first_errors.setdefault((result.precision, without_numbers(error)), error)
            pairs.append((first, result.label if first == error else f"{result.label} alike"))
    for error, labels in fmt.grouped(pairs).items():
        console.print(f"{join_names(labels)}: {error}", soft_wrap=not console.is_terminal)


def end_if_failed(folder: Path) -> bool:
    """Let this process's sweep end before its last job if the job of a folder has failed.

    This is what sweep.fail_fast=true asks for. A job that is not available here has not failed.

    Returns:
        Whether the job has failed.
    """
    result = RunResult.read(folder)
    has_failed = result.status == "failed"
    if has_failed and Sweep.current:
        Sweep.current.end_early(
            f"sweep.fail_fast=true: {result.label} has failed; no further job was started."
        )
    return has_failed


def finish_sweep(status: int) -> int:
    """End the sweep of this process, if it runs one.

    Args:
        status: exit status so far.

    Returns:
        The exit status of the command.
    """
    sweep = Sweep.current
    Sweep.current = None
    return sweep.end(status) if sweep else status
