"""The launcher that Hydra calls: run each job of a sweep in a process of its own."""

import atexit
import os
import pickle
import signal
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from typing import NamedTuple, final

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.config.hydra_plugins import register
from runner.sweep.launcher.job_process import ForkServerClient, JobProcess
from runner.sweep.launcher.job_request import (
    JobRequest,
    ProcessEnvironment,
    RemoteJobRequest,
    compose_job_config,
)
from runner.sweep.launcher.stop_requests import StopRequests
from runner.tracking.job_journal import JobJournal
from runner.tracking.journal_status import JournalStatus
from runner.tracking.writer_process import shared_writer
from runner.utils.errors import ConfigError
from runner.utils.layout import RESULT
from runner.utils.terminal import print_error, sanitize

GRACE_SECONDS = 10.0
"""Time that jobs have to end after the second signal, before they are killed."""
_MAX_UPLOAD_WAIT_SECONDS = 60.0
"""Longest wait for the journals of jobs that died while their upload makes no progress."""

_POLL_SECONDS = 0.25
"""Longest time until a new journal of a job, or the death of the writer, is noticed."""

_fork_server: ForkServerClient | None = None


def prepare_launcher() -> None:
    """Register the launcher with Hydra, and start the fork server."""
    register(IsolatedLauncher)
    # Now, not for the first job: the fork server imports what jobs need while this process imports
    # what the sweep needs.
    shared_fork_server()


def shared_fork_server() -> ForkServerClient:
    """Return this process's fork server, one for all its sweeps; a new one if it was killed."""
    global _fork_server
    if _fork_server is None:
        atexit.register(_close_fork_server)
        _fork_server = ForkServerClient()
    if not _fork_server.is_alive:
        _fork_server.close()
        _fork_server = ForkServerClient()
    return _fork_server


class _RunningJob(NamedTuple):
    """A job's process, the journal that it writes, and its config."""

    process: JobProcess
    journal: JobJournal
    config: DictConfig


def _close_fork_server() -> None:
    if _fork_server is not None:
        _fork_server.close()


@final
class IsolatedLauncher(Launcher):
    """A launcher of Hydra whose jobs are processes: one that dies is a failed job, nothing more.

    Args:
        n_jobs: how many run at once, 1 or more.
        stop_file: a file that requests a stop, see StopRequests.
        sweep_request: a pickled JobRequest of the sweep, for jobs of another process's sweep, see
            RemoteJobRequest.
    """

    def __init__(
        self,
        n_jobs: int = 1,
        stop_file: Path | None = None,
        sweep_request: bytes | None = None,
    ) -> None:
        self._n_jobs = n_jobs
        self._stop_file = stop_file
        self._sweep_request = sweep_request
        self._running: dict[int, _RunningJob] = {}
        self._unsaved_journals: list[JournalStatus] = []

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives every launcher.

        Raises:
            ConfigError: n_jobs is below 1.
        """
        if self._n_jobs < 1:
            raise ConfigError(f"hydra.launcher.n_jobs={self._n_jobs}: type 1 or more.")
        self._context = hydra_context
        self._task = task_function
        self._config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs, and return what Hydra expects of each, in order.

        Args:
            job_overrides: overrides of each job.
            initial_job_idx: number of the first one.

        Raises:
            SystemExit: a signal has stopped the sweep.
        """
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(self._config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        update_job_count(self._config, initial_job_idx + len(job_overrides))
        waiting = deque(enumerate(job_overrides, initial_job_idx))
        with (
            DefaultSelector() as selector,
            StopRequests(self._stop_file) as stop,
            self._kill_at_exit(),
        ):
            returns = self._run_all(waiting, selector, stop)
        # After the jobs, not while they run: a store that does not answer delays no job.
        for journal in self._unsaved_journals:
            journal.wait(
                _MAX_UPLOAD_WAIT_SECONDS,
                lambda: bool(stop.received_signals),
                "the store",
                shared_writer().keep_alive,
            )
        if stop.received_signals:
            # The exit status of a shell's command that a signal ended.
            raise SystemExit(128 + stop.received_signals[0])
        return [returns[number] for number in sorted(returns)]

    def _run_all(
        self,
        waiting: deque[tuple[int, Sequence[str]]],
        selector: BaseSelector,
        stop: StopRequests,
    ) -> dict[int, JobReturn]:
        """Run jobs, at most n_jobs at once; after a stop request start no further one."""
        returns: dict[int, JobReturn] = {}
        selector.register(stop, EVENT_READ, lambda: self._forward(stop.read_new_signals()))
        while self._running or (waiting and not stop.received_signals):
            self._forward(stop.read_new_signals())
            while waiting and len(self._running) < self._n_jobs and not stop.received_signals:
                self._start(*waiting.popleft(), selector)
            # A second at most, to look for the stop file and at the time since the second signal.
            for key, _ in selector.select(timeout=_POLL_SECONDS):
                key.data()
            for running in self._running.values():
                running.journal.find()
            shared_writer().keep_alive()
            if stop.seconds_since_second_signal() > GRACE_SECONDS:
                self._forward([signal.SIGKILL])
            # A list of its own: _finish removes the job from those that run.
            for number in [n for n, job in self._running.items() if job.process.has_ended]:
                returns[number] = self._finish(number, stop)
        # A signal may have come after the last look, and ends the sweep all the same.
        stop.read_new_signals()
        return returns

    @contextmanager
    def _kill_at_exit(self) -> Iterator[None]:
        """Kill the jobs that run when the context ends: no job outlives the launch."""
        try:
            yield
        finally:
            self._forward([signal.SIGKILL])
            for job in self._running.values():
                job.process.close()
            self._running.clear()

    def _forward(self, signals: Sequence[int]) -> None:
        """Send signals to every job that runs."""
        for number in signals:
            for job in self._running.values():
                job.process.send_signal(number)

    def _start(self, number: int, overrides: Sequence[str], selector: BaseSelector) -> None:
        """Start a job's process.

        Args:
            number: the job's.
            overrides: the job's.
            selector: watches the pipes of the process.
        """
        config = compose_job_config(self._context, self._config, number, overrides)
        resumes = bool(config.hydra.callbacks.sweep.resume)
        if not resumes:
            # A result of another sweep in the same folder would be taken for this job's.
            (job_folder(config) / RESULT).unlink(missing_ok=True)
        if self._sweep_request is None:
            request = JobRequest.to_pickle(config, self._task, self._context)
        else:
            request = pickle.dumps(
                RemoteJobRequest(self._sweep_request, number, overrides, resumes)
            )
        prefix = f"[job {number}] " if self._n_jobs > 1 else ""
        folder = job_folder(config)
        environment = ProcessEnvironment.current(folder, self._n_jobs)
        journal = JobJournal(folder)
        process = JobProcess(shared_fork_server(), selector, environment, request, prefix)
        self._running[number] = _RunningJob(process, journal, config)

    def _finish(self, number: int, stop: StopRequests) -> JobReturn:
        """Return what Hydra expects of an ended job, and record its death if it has no result."""
        job = self._running.pop(number)
        job.process.close()
        job.journal.find()
        answer, config = job.process.answer, job.config
        if isinstance(answer, JobReturn):
            return answer
        # A resumed job's folder may hold the result of an earlier command.
        has_result = answer is not None and (job_folder(config) / RESULT).exists()
        if not has_result:
            self._record_dead_job(number, job, stop.received_signals)
        overrides = OmegaConf.to_container(config.hydra.overrides.task)
        assert isinstance(overrides, list)
        # Any other status would make Hydra's sweeper raise, and end the sweep; result.json has the
        # job's own status.
        return JobReturn(overrides=overrides, cfg=config, status=JobStatus.COMPLETED)

    def _record_dead_job(
        self, number: int, job: "_RunningJob", stop_signals: Collection[int]
    ) -> None:
        """Print why a job died, write it to the job's result, and end the job's MLflow run."""
        from runner.modes import notes
        from runner.sweep.job_result import job_origin, record_result

        config = job.config
        reason = job.process.death_reason(stop_signals)
        stopped = bool(stop_signals)
        if stopped:
            print(sanitize(f"job {number}: {reason}"), flush=True)
        else:
            print_error(f"job {number}: {reason}")
        with job_hydra_config(config):
            record_result(config, job_folder(config), "stopped" if stopped else "failed", reason)
            command = job_origin(sweeping=True).command
        status = "KILLED" if stopped else "FAILED"
        note = notes.failed_note(command, status, reason)
        journal = job.journal.end(status, reason, note)
        if journal is not None:
            self._unsaved_journals.append(journal)


def update_job_count(config: DictConfig, launched: int) -> None:
    """Set how many jobs this process's sweep has, if it runs one.

    Args:
        config: the sweep's.
        launched: number of jobs that are launched so far.
    """
    from runner.sweep.sweep import Sweep

    if Sweep.current is not None:
        # A search launches its trials in several calls, and says in n_trials how many there are.
        planned = config.hydra.sweeper.get("n_trials", 0)
        Sweep.current.set_job_count(max(launched, planned))


def job_folder(config: DictConfig) -> Path:
    """Return a job's folder as an absolute path."""
    # Not resolve(): a link in the path stays as it was typed.
    return Path(os.path.abspath(config.hydra.sweep.dir), config.hydra.sweep.subdir)  # noqa: PTH100


@contextmanager
def job_hydra_config(config: DictConfig) -> Iterator[None]:
    """Context in which HydraConfig is a job's, as it is in the job's process."""
    hydra = HydraConfig.instance()
    before = hydra.cfg
    hydra.set_config(config)
    try:
        yield
    finally:
        hydra.cfg = before
