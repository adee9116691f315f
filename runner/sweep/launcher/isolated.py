"""The launcher that Hydra calls."""

import atexit
import os
import pickle
import signal
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from typing import final

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
from runner.tracking.journal_status import JournalStatus
from runner.tracking.writer_process import shared_writer
from runner.utils.errors import ConfigError
from runner.utils.terminal import print_error, sanitize

GRACE_SECONDS = 10.0
"""From the second signal until a job that does not end is killed."""
_STORE_SECONDS = 60.0

_nursery: ForkServerClient | None = None


def prepare_launcher() -> None:
    """Makes the launcher known to Hydra, and has the nursery import what jobs need while we import
    what we need."""
    register(IsolatedLauncher)
    fork_server()


def fork_server() -> ForkServerClient:
    """This process's, for all its sweeps; another one where it was killed."""
    global _nursery
    if _nursery is None:
        atexit.register(lambda: _nursery and _nursery.close())
        _nursery = ForkServerClient()
    if not _nursery.lives:
        _nursery.close()
        _nursery = ForkServerClient()
    return _nursery


@final
class IsolatedLauncher(Launcher):
    """Runs each job in a process of its own, whose death is that job's failure and nothing more.

    Args:
        n_jobs: how many run at once, 1 or more.
        asked: the file that asks for a stop, see StopRequests.
        sweep: the order for jobs of another process's sweep, see LateOrder.
    """

    def __init__(
        self, n_jobs: int = 1, asked: Path | None = None, sweep: bytes | None = None
    ) -> None:
        self._n_jobs, self._asked, self._sweep = n_jobs, asked, sweep
        self._running: dict[int, tuple[JobProcess, DictConfig]] = {}
        self._open_ends: list[JournalStatus] = []

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Raises ConfigError for an n_jobs below 1."""
        if self._n_jobs < 1:
            raise ConfigError(f"hydra.launcher.n_jobs={self._n_jobs}: type 1 or more.")
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Raises SystemExit where a signal has stopped the sweep."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(self._config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        announce_job(self._config, initial_job_idx + len(job_overrides))
        todo = deque(enumerate(job_overrides, initial_job_idx))
        done: dict[int, JobReturn] = {}
        with DefaultSelector() as selector, StopRequests(self._asked) as stop, self._none_left():
            selector.register(stop, EVENT_READ, lambda: self._forward(stop.new()))
            while self._running or (todo and not stop.came):
                self._forward(stop.new())
                while todo and len(self._running) < self._n_jobs and not stop.came:
                    self._start(*todo.popleft(), selector)
                for key, _ in selector.select(timeout=1.0):
                    key.data()
                if stop.waited() > GRACE_SECONDS:
                    self._forward([signal.SIGKILL])
                for number in [n for n, (job, _) in self._running.items() if job.ended]:
                    done[number] = self._end(number, stop)
            stop.new()
        for followed in self._open_ends:
            shared_writer().wait(followed, _STORE_SECONDS, lambda: bool(stop.came))
        if stop.came:
            raise SystemExit(128 + stop.came[0])
        return [done[number] for number in sorted(done)]

    @contextmanager
    def _none_left(self) -> Iterator[None]:
        """However it ends, no job outlives the launch."""
        try:
            yield
        finally:
            self._forward([signal.SIGKILL])
            for job, _ in self._running.values():
                job.close()
            self._running.clear()

    def _forward(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            for job, _ in self._running.values():
                job.send_signal(number)

    def _start(self, number: int, overrides: Sequence[str], selector: BaseSelector) -> None:
        config = compose_job_config(self._context, self._config, number, overrides)
        if not config.hydra.callbacks.sweep.resume:
            (job_folder(config) / "result.json").unlink(missing_ok=True)  # of another sweep
        if self._sweep is None:
            order = JobRequest.pickled(config, self._task, self._context)
        else:
            again = bool(config.hydra.callbacks.sweep.resume)
            order = pickle.dumps(RemoteJobRequest(self._sweep, number, overrides, again))
        mark = f"[job {number}] " if self._n_jobs > 1 else ""
        job = JobProcess(
            fork_server(), selector, ProcessEnvironment.ours(self._n_jobs), order, mark
        )
        self._running[number] = job, config

    def _end(self, number: int, stop: StopRequests) -> JobReturn:
        job, config = self._running.pop(number)
        job.close()
        if isinstance(job.answer, JobReturn):
            return job.answer
        told = job.answer is not None and (job_folder(config) / "result.json").exists()
        if not told:
            self._bury(number, job, config, stop.came)
        overrides = OmegaConf.to_container(config.hydra.overrides.task)
        assert isinstance(overrides, list)
        return JobReturn(overrides=overrides, cfg=config, status=JobStatus.COMPLETED)

    def _bury(
        self, number: int, job: JobProcess, config: DictConfig, asked: Collection[int]
    ) -> None:
        """Says, records and stores why a job died."""
        from runner.modes import notes
        from runner.sweep.job_result import job_origin, record_result

        reason, stopped = job.reason(asked), bool(asked)
        if stopped:
            print(sanitize(f"job {number}: {reason}"), flush=True)
        else:
            print_error(f"job {number}: {reason}")
        with job_hydra_config(config):
            record_result(config, job_folder(config), "stopped" if stopped else "failed", reason)
            command = job_origin(sweeping=True).command
        status = "KILLED" if stopped else "FAILED"
        note = notes.failed_note(command, status, reason)
        self._open_ends += job.lent.end_journals(status, reason, note)


def announce_job(config: DictConfig, jobs: int) -> None:
    """Tells this process's sweep how many jobs it has; a search may say so itself."""
    from runner.sweep.sweep import Sweep

    if Sweep.current:
        Sweep.current.asks_for(max(jobs, config.hydra.sweeper.get("n_trials", 0)))


def job_folder(config: DictConfig) -> Path:
    """A job's, absolute."""
    return Path(os.path.abspath(config.hydra.sweep.dir), config.hydra.sweep.subdir)  # noqa: PTH100


@contextmanager
def job_hydra_config(config: DictConfig) -> Iterator[None]:
    """Context with HydraConfig as it is in the job."""
    hydra = HydraConfig.instance()
    before = hydra.cfg
    hydra.set_config(config)
    try:
        yield
    finally:
        hydra.cfg = before
