"""Run each job of a sweep in a process of its own on this machine, at most so many at once.

Hydra calls IsolatedLauncher, which runs the jobs through a JobRunner.
"""

import atexit
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from select import select
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from typing import NamedTuple, final

from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from runner.config.hydra_plugins import register
from runner.config.overrides import override_texts
from runner.core import ConfigError, RunResult, fmt, layout, stop_signals, terminal
from runner.output.notebook_log import NotebookLog
from runner.sweeps.launcher.job_process import ForkServerClient, JobProcess
from runner.sweeps.launcher.job_request import (
    JobRequest,
    compose_job_config,
    job_folder,
    job_hydra_config,
)
from runner.sweeps.manifest import job_invocation, job_words, record_result
from runner.sweeps.sweep_progress import job_label, print_job_line
from runner.tracking.upload_state import JournalStatus
from runner.tracking.writer_process import JobJournal, shared_writer

GRACE_SECONDS = 10.0
"""Time that jobs have to end after the second signal, before they are killed."""
_MAX_UPLOAD_WAIT_SECONDS = 60.0
"""Longest wait for the journals of jobs that died while their upload makes no progress."""

_POLL_SECONDS = 0.25
"""Longest time until a new journal of a job, or the death of the writer, is noticed."""

_fork_server: ForkServerClient | None = None


def shared_fork_server() -> ForkServerClient:
    """Return this process's fork server, one for all its sweeps; a new one if it was killed."""
    global _fork_server
    if not _fork_server or not _fork_server.is_alive:
        _close_fork_server()
        _fork_server = ForkServerClient()
    return _fork_server


@atexit.register
def _close_fork_server() -> None:
    if _fork_server:
        _fork_server.close()


class StopRequests(stop_signals.SignalHandler):
    """Context that queues signals for a selector, so that none interrupts the launcher.

    The file descriptor of `fileno` becomes readable when a signal comes.

    Args:
        stop_file: a file that holds a signal's number once a stop is requested from a process that
            cannot send signals here.

    Attributes:
        received_signals: numbers of the signals that `read_new_signals` has returned, in order.
    """

    def __init__(self, stop_file: Path | None = None) -> None:
        super().__init__()
        self.received_signals: list[int] = []
        self._stop_file = stop_file
        self._read_end, self._write_end = os.pipe()
        self._times: list[float] = []
        """When each of received_signals was read."""

    def __exit__(self, *raised: object) -> None:
        super().__exit__()
        os.close(self._read_end)
        os.close(self._write_end)

    def handle_signal(self, number: int) -> None:
        """Queue a signal for `read_new_signals`."""
        # A selector that waits is woken by the byte; a handler must not do more than that.
        os.write(self._write_end, bytes([number]))

    def fileno(self) -> int:
        """Return the file descriptor that a selector waits on."""
        return self._read_end

    def read_new_signals(self) -> list[int]:
        """Return signals received since the last call; those within 0.5 s count as one."""
        # The signal that the stop file names, once, unless a signal came before.
        if not self._times and self._stop_file and self._stop_file.exists():
            self.handle_signal(int(self._stop_file.read_text()))
            self._stop_file = None
        new = [*os.read(self._read_end, 64)] if select([self], [], [], 0)[0] else []
        now = time.monotonic()
        if not self._times:
            # Signals that came together are one request.
            del new[1:]
        elif now - self._times[0] < stop_signals.COALESCE_SECONDS:
            # A batch system may signal every process, and a process may pass a signal on.
            return []
        self._times += [now] * len(new)
        self.received_signals += new
        return new

    def seconds_since_second_signal(self) -> float:
        """Return the seconds since the second signal, 0 before it."""
        return time.monotonic() - self._times[1] if len(self._times) > 1 else 0.0


class _RunningJob(NamedTuple):
    """A job's process, the journal that it writes, its config, and its result before it began."""

    process: JobProcess
    journal: JobJournal
    config: DictConfig
    earlier_result: int | None


class JobRunner:
    """Runs jobs as processes: one that dies is a failed job, nothing more.

    Args:
        jobs_at_once: how many run at once, 1 or more.
        stop_file: a file that requests a stop, see StopRequests.
        fail_fast: the first failed job ends the sweep: jobs that run are stopped, and no further
            one is started.
    """

    def __init__(
        self, jobs_at_once: int = 1, stop_file: Path | None = None, fail_fast: bool = False
    ) -> None:
        self._jobs_at_once = jobs_at_once
        self._stop_file = stop_file
        self._fail_fast = fail_fast
        self._has_failed_fast = False
        self._running: dict[int, _RunningJob] = {}
        self._unsaved_journals: list[JournalStatus] = []
        self._label: Callable[[], str] = str

    def run(self, jobs: Iterator[DictConfig]) -> Sequence[JobReturn]:
        """Run jobs, and return what Hydra expects of each, in order of their numbers.

        Args:
            jobs: config of each job, composed when the job is about to start.

        Raises:
            SystemExit: a signal has stopped the sweep, or with fail_fast a job has failed.
        """
        with DefaultSelector() as selector, StopRequests(self._stop_file) as stop:
            try:
                returns = self._run_all(jobs, selector, stop)
            finally:
                # No job outlives the launch.
                self._forward([signal.SIGKILL])
                for job in self._running.values():
                    job.process.close()
                self._running.clear()
        # After the jobs, not while they run: a store that does not answer delays no job.
        for journal in self._unsaved_journals:
            journal.wait(
                _MAX_UPLOAD_WAIT_SECONDS,
                lambda: bool(stop.received_signals),
                "the store",
                shared_writer().keep_alive,
            )
        if self._is_stopping(stop):
            # After a signal the exit status of a shell's command that a signal ended.
            raise SystemExit(128 + stop.received_signals[0] if stop.received_signals else 1)
        return [returns[number] for number in sorted(returns)]

    def _run_all(
        self, jobs: Iterator[DictConfig], selector: BaseSelector, stop: StopRequests
    ) -> dict[int, JobReturn]:
        """Run jobs, at most jobs_at_once; after a stop request start no further one."""
        returns: dict[int, JobReturn] = {}
        has_more_jobs = True
        selector.register(stop, EVENT_READ, lambda: self._forward(stop.read_new_signals()))
        while self._running or (has_more_jobs and not self._is_stopping(stop)):
            self._forward(stop.read_new_signals())
            while has_more_jobs and not self._is_stopping(stop):
                if len(self._running) == self._jobs_at_once:
                    break
                config = next(jobs, None)
                has_more_jobs = config is not None
                if config is not None:
                    self._start(config, selector)
            for key, _ in selector.select(timeout=_POLL_SECONDS):
                key.data()
            for running in self._running.values():
                running.journal.find()
            shared_writer().keep_alive()
            if isinstance(sys.stdout, NotebookLog):
                sys.stdout.show_bar(self._label())
            if stop.seconds_since_second_signal() > GRACE_SECONDS:
                self._forward([signal.SIGKILL])
            ended = [number for number, job in self._running.items() if job.process.has_ended]
            for number in ended:
                folder = job_folder(self._running[number].config)
                returns[number] = self._finish(number, stop)
                if self._fail_fast and not self._is_stopping(stop):
                    from runner.sweeps.sweep import end_if_failed

                    if end_if_failed(folder):
                        self._has_failed_fast = True
                        # Each ends after its current step with a checkpoint, as for a signal.
                        self._forward([signal.SIGTERM])
        # A signal may have come after the last look, and ends the sweep all the same.
        stop.read_new_signals()
        return returns

    def _is_stopping(self, stop: StopRequests) -> bool:
        return bool(stop.received_signals) or self._has_failed_fast

    def _forward(self, signals: Sequence[int]) -> None:
        """Send signals to every job that runs."""
        for number in signals:
            for job in self._running.values():
                job.process.send_signal(number)

    def _start(self, config: DictConfig, selector: BaseSelector) -> None:
        """Start a job's process.

        Args:
            config: the job's.
            selector: watches the pipes of the process.
        """
        number = int(config.hydra.job.num)
        folder = job_folder(config)
        with job_hydra_config(config):
            name = terminal.one_line(" ".join(job_words()))
        prefix = f"[{name}] " if self._jobs_at_once > 1 else ""
        request = JobRequest.from_config(config, self._jobs_at_once)
        journal = JobJournal(folder)
        earlier = _result_version(folder)
        process = JobProcess(shared_fork_server(), selector, request, prefix)
        self._running[number] = _RunningJob(process, journal, config, earlier)
        if isinstance(sys.stdout, NotebookLog):
            self._label = job_label(Path(config.hydra.sweep.dir), name)

    def _finish(self, number: int, stop: StopRequests) -> JobReturn:
        """Return what Hydra expects of an ended job, and record its death if it has no result."""
        job = self._running.pop(number)
        job.process.close()
        job.journal.find()
        config = job.config
        folder = job_folder(config)
        # A resumed job's folder may hold the result of an earlier command, which a job that is
        # finished already leaves as it is.
        version = _result_version(folder)
        is_own = version != job.earlier_result or job.process.exit_status == 0
        if version is not None and is_own:
            return job_return(config, RunResult.read(folder))
        sent = [signal.SIGTERM] if self._has_failed_fast else []
        self._record_dead_job(job, folder, [*stop.received_signals, *sent])
        return job_return(config)

    def _record_dead_job(self, job: _RunningJob, folder: Path, signals: Collection[int]) -> None:
        """Print why a job died, write it to the job's result, and end the job's MLflow run."""
        from runner.tracking import notes

        reason = job.process.death_reason(signals)
        with job_hydra_config(job.config):
            record_result(job.config, folder, "stopped" if signals else "failed", reason)
            print_job_line(folder, is_elsewhere=True)
            command = job_invocation(sweeping=True).command_text()
        status = "KILLED" if signals else "FAILED"
        journal = job.journal.end(status, reason, notes.failed_note(command, status, reason))
        if journal:
            self._unsaved_journals.append(journal)


def _result_version(folder: Path) -> int | None:
    """Return what tells one result.json of a job's folder from the next; None without one."""
    try:
        # The file is never rewritten, but replaced by a new one.
        return (folder / layout.RESULT).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def job_return(config: DictConfig, result: RunResult | None = None) -> JobReturn:
    """Return what Hydra expects of a job that ended, however it ended.

    The value that a sweeper optimises is None without a number: Optuna's sweeper then counts a
    failed trial and continues, while NaN would end its study.

    Args:
        config: the job's.
        result: the job's.
    """
    # Any other status would make Hydra's sweeper raise, and end the sweep; result.json has the
    # job's own status.
    overrides = override_texts(config.hydra.overrides.task)
    ended = JobReturn(overrides=overrides, cfg=config, status=JobStatus.COMPLETED)
    if result and result.status == "finished" and not math.isnan(result.objective):
        ended.return_value = result.objective
    return ended


def prepare_launcher() -> None:
    """Register the launcher with Hydra, and start the fork server."""
    register(IsolatedLauncher)
    # Now, not for the first job: the fork server imports what jobs need while this process imports
    # what the sweep needs.
    shared_fork_server()


@final
class IsolatedLauncher(Launcher):
    """A launcher of Hydra whose jobs are processes of this machine.

    Args:
        n_jobs: how many run at once, 1 or more.
    """

    def __init__(self, n_jobs: int = 1) -> None:
        self._n_jobs = n_jobs

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives every launcher. A job's process finds the task function itself.

        Raises:
            ConfigError: n_jobs is below 1.
        """
        if self._n_jobs < 1:
            raise ConfigError(f"hydra.launcher.n_jobs={self._n_jobs}: type 1 or more.")
        self._context = hydra_context
        self._config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs, and return what Hydra expects of each, in order.

        Args:
            job_overrides: overrides of each job.
            initial_job_idx: number of the first one.

        Raises:
            SystemExit: a signal has stopped the sweep, or with sweep.fail_fast a job has failed.
        """
        begin_launch(self._config, initial_job_idx + len(job_overrides), self._n_jobs)
        folder = Path(self._config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        numbers: Sequence[int] = range(initial_job_idx, initial_job_idx + len(job_overrides))
        settings = self._config.hydra.callbacks.sweep
        # Another sweeper expects the results of its jobs in their order.
        is_basic = str(self._config.hydra.sweeper.get("_target_")).endswith(".BasicSweeper")
        if is_basic and settings.resume:
            from runner.sweeps.sweep_resume import resumed_numbers

            numbers = resumed_numbers(folder, job_overrides, numbers)
        numbered = [*zip(numbers, job_overrides, strict=True)]
        if is_basic:
            # Precisions of one seed one after the other: what is compared ran at about one time.
            by_seed = fmt.grouped((_seed(job[1]), job) for job in numbered)
            numbered = [*chain.from_iterable(by_seed.values())]
        jobs = (
            compose_job_config(self._context, self._config, number, overrides)
            for number, overrides in numbered
        )
        return JobRunner(self._n_jobs, fail_fast=bool(settings.fail_fast)).run(jobs)


def _seed(overrides: Sequence[str]) -> str:
    """Return the override of a job's seed; empty where the sweep does not vary it."""
    return next((word for word in overrides if fmt.override_key(word) == "seed"), "")


def begin_launch(config: DictConfig, launched: int, at_once: int) -> None:
    """Do what Hydra expects of a launcher first, and set how many jobs this process's sweep has.

    Args:
        config: the sweep's.
        launched: number of jobs that are launched so far.
        at_once: how many of them run at the same time; 0 where that is not known.
    """
    from runner.sweeps.sweep import Sweep

    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    if Sweep.current:
        # A search launches its trials in several calls, and says in n_trials how many there are.
        planned = config.hydra.sweeper.get("n_trials", 0)
        Sweep.current.update_manifest(jobs=max(launched, planned), jobs_at_once=at_once)
        Sweep.current.begin()
