"""Run the jobs of a sweep through a launcher of Hydra's plugins: submitit, Ray, joblib, any other.

This is the sweep's side: it hands a RemoteJob to the plugin's launcher, and records every job that
comes back without a result. The job's side is remote_job.
"""

import copy
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from runner.config.hydra_plugins import REMOTE, register
from runner.config.overrides import quote_value
from runner.sweeps.launcher.isolated import update_job_count
from runner.sweeps.launcher.job_output import last_lines
from runner.sweeps.launcher.job_request import compose_job_config, job_folder, job_hydra_config
from runner.sweeps.launcher.job_runner import job_return
from runner.sweeps.launcher.remote_job import STOP_FILE_NAME, RemoteJob
from runner.sweeps.launcher.stop_requests import StopFile
from runner.utils.errors import ConfigError
from runner.utils.layout import RESULT
from runner.utils.stop_signals import Interrupted
from runner.utils.terminal import print_error

_MAX_VISIBILITY_SECONDS = 15.0
"""Longest time that a shared file system takes to show here what another machine wrote."""
_POLL_SECONDS = 0.2
_RAY_STORE_BYTES = 2**27
"""Size of Ray's object store, which a sweep hardly uses; Ray's default is a third of the memory."""

ReturnOrReason = JobReturn | str
"""What Hydra expects of a job, or the reason why there is none."""


def prepare_remote(config: DictConfig) -> None:
    """Put RemoteLauncher in the place of the plugin's launcher that a sweep names.

    Args:
        config: the sweep's; changed in place.

    Raises:
        ConfigError: the launcher is Slurm's, and this machine has no Slurm.
    """
    target = str(config.hydra.launcher._target_)
    if target.endswith(".SlurmLauncher") and not shutil.which("sbatch"):
        raise ConfigError(
            "hydra/launcher=submitit_slurm: there is no sbatch here. Type the command on a node of "
            "Slurm's, or launcher=submitit_local to try it on this machine."
        )
    register(RemoteLauncher)
    folder = os.path.abspath(config.hydra.sweep.dir)  # noqa: PTH100
    with read_write(config), open_dict(config):
        config.hydra.launcher = {
            "_target_": REMOTE,
            "_recursive_": False,
            "launcher": config.hydra.launcher,
        }
        config.hydra.sweep.dir = folder
        # Jobs compose their configs in processes that may have been started in another folder.
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quote_value(folder)}")


@final
class RemoteLauncher(Launcher):
    """A launcher of Hydra that runs jobs through another one, and records a result for each.

    Args:
        launcher: config of the other launcher.
    """

    def __init__(self, launcher: DictConfig) -> None:
        self._node = launcher

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives every launcher. A job's process finds the task function itself."""
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
            ConfigError: the other launcher accepts none of the jobs.
            SystemExit: a signal has stopped the sweep.
        """
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        update_job_count(self._config, initial_job_idx + len(job_overrides))
        jobs = {
            number: compose_job_config(self._context, self._config, number, overrides)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        }
        existing_jobs = {number for number, config in jobs.items() if job_folder(config).exists()}
        stop_file = Path(self._config.hydra.sweep.dir, STOP_FILE_NAME)
        # An earlier sweep in the same folder may have been stopped.
        stop_file.unlink(missing_ok=True)
        if not self._config.hydra.callbacks.sweep.resume:
            for number in existing_jobs:
                # A result of another sweep in the same folder would be taken for this job's.
                (job_folder(jobs[number]) / RESULT).unlink(missing_ok=True)
        remote_job = self._remote_job(frozenset(existing_jobs), len(jobs))
        if self._node.get("ray"):
            # Before the signal handlers here: ray.init installs its own for SIGTERM.
            self._start_ray()
        with StopFile(stop_file) as stop:
            try:
                outcomes = self._run(remote_job, job_overrides, initial_job_idx, stop)
            except Interrupted:
                outcomes = ["Stopped at once by a second signal."] * len(jobs)
            except Exception as error:
                # Plugins raise for a failed job as well as for jobs that they do not accept. Where
                # nothing started, the command is at fault, and is refused as a whole.
                started = any(job_folder(jobs[n]).exists() for n in {*jobs} - existing_jobs)
                if not stop.received_signal and not started:
                    raise self._launcher_error(error) from error
                outcomes = [explain_launcher_error(error)] * len(jobs)
        by_job = dict(zip(jobs, outcomes, strict=True))
        _record_missing_results(jobs, by_job, bool(stop.received_signal))
        stop_file.unlink(missing_ok=True)
        if stop.received_signal:
            raise SystemExit(128 + stop.received_signal)
        return [_job_return(config, by_job[number]) for number, config in jobs.items()]

    def _remote_job(self, existing_jobs: frozenset[int], jobs: int) -> RemoteJob:
        """Return Hydra's task function for the jobs of a launch.

        Args:
            existing_jobs: numbers of the jobs whose folders exist already.
            jobs: number of jobs in the launch.
        """
        # Ray's processes may have been started before the command, so that MLflow's variables are
        # missing there. Other launchers' processes get the command's environment.
        prefix = "MLFLOW_" if self._node.get("ray") else "HYDRA_"
        return RemoteJob(
            folder=os.getcwd(),  # noqa: PTH109
            path=[*sys.path],
            environ={key: value for key, value in os.environ.items() if key.startswith(prefix)},
            existing_jobs=existing_jobs,
            jobs_at_once=_jobs_at_once(self._node, jobs),
            is_child=_launcher_name(self._node) == "JoblibLauncher",
        )

    def _run(
        self, job: RemoteJob, overrides: Sequence[Sequence[str]], first: int, stop: StopFile
    ) -> Sequence[ReturnOrReason]:
        """Run jobs through the other launcher; return the outcome of each, in order.

        Args:
            job: what the other launcher runs for each job.
            overrides: overrides of each job.
            first: number of the first job.
            stop: the context that signals go to.
        """
        # A copy: the sweep's own config names this launcher.
        config = copy.deepcopy(self._config)
        with read_write(config), open_dict(config):
            config.hydra.launcher = self._node
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self._context, task_function=job, config=config
        )
        # Submitit's launchers have it; their own launch gives up at the first job that fails.
        if hasattr(launcher, "_EXECUTOR"):
            from runner.sweeps.launcher.submitit import run_jobs

            return run_jobs(launcher, overrides, first, stop)
        return launcher.launch(overrides, first)

    def _start_ray(self) -> None:
        """Start a Ray cluster of this machine, or join the one that an address names."""
        import ray  # pyright: ignore[reportMissingImports]

        settings = OmegaConf.to_container(self._node.ray.init, resolve=True)
        assert isinstance(settings, dict)
        # Ray refuses the size of a store for a cluster that runs already.
        if not (settings.get("address") or os.environ.get("RAY_ADDRESS")):
            settings.setdefault("object_store_memory", _RAY_STORE_BYTES)
        if not ray.is_initialized():
            try:
                ray.init(**{str(key): value for key, value in settings.items()})
            except Exception as error:
                raise self._launcher_error(error) from error

    def _launcher_error(self, error: Exception) -> ConfigError:
        choice = self._config.hydra.runtime.choices.get("hydra/launcher")
        return ConfigError(
            f"hydra/launcher={choice} takes no jobs: {explain_launcher_error(error)}"
        )


def explain_launcher_error(error: Exception) -> str:
    """Return an error of a launcher as one line: its type, and the last lines of its message."""
    lines = last_lines(str(error))
    return f"{type(error).__name__}: {' | '.join(lines)}" if lines else type(error).__name__


def _jobs_at_once(node: DictConfig, jobs: int) -> int:
    """Return how many jobs this machine runs at the same time."""
    if _launcher_name(node) == "JoblibLauncher":
        limit = int(node.n_jobs)
        if limit <= 0:
            # joblib's rule: -1 is all processors, -2 all but one.
            limit = max(1, (os.cpu_count() or 1) + 1 + limit)
        return min(jobs, limit)
    # submitit's local executor starts all jobs at once; other launchers give each its processors.
    return jobs if _launcher_name(node) == "LocalLauncher" else 1


def _launcher_name(node: DictConfig) -> str:
    return str(node._target_).rpartition(".")[2]


def _record_missing_results(
    jobs: Mapping[int, DictConfig], outcomes: Mapping[int, ReturnOrReason], stopped: bool
) -> None:
    """Wait until the jobs' results are visible here; print and record why some have none.

    Args:
        jobs: config of each job by number.
        outcomes: outcome of each job by number.
        stopped: a signal has stopped the sweep; jobs that had not begun then get no result.
    """
    from runner.sweeps.job_result import record_result

    deadline = time.monotonic() + _MAX_VISIBILITY_SECONDS
    reasons: dict[str, list[str]] = {}
    for number, config in jobs.items():
        outcome = outcomes[number]
        folder = job_folder(config)
        completed = isinstance(outcome, JobReturn) and outcome.status == JobStatus.COMPLETED
        while completed and not (folder / RESULT).exists() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        # A job that a stop kept from starting has no result, so that sweep.resume starts it.
        has_not_begun = stopped and not folder.exists()
        if (folder / RESULT).exists() or has_not_begun:
            continue
        reason = _missing_result_reason(outcome, folder.parent)
        reasons.setdefault(reason, []).append(str(number))
        with job_hydra_config(config):
            record_result(config, folder, "stopped" if stopped else "failed", reason)
    for reason, numbers in reasons.items():
        print_error(f"job {', '.join(numbers)}: {reason}")


def _missing_result_reason(outcome: ReturnOrReason, sweep_folder: Path) -> str:
    if isinstance(outcome, str):
        return outcome
    if outcome.status == JobStatus.FAILED:
        return str(outcome._return_value)
    return (
        f"It ran, but left no result in {sweep_folder} as this machine sees it. The machines of a "
        "launcher must share that folder: type hydra.sweep.dir=<folder that all of them see>."
    )


def _job_return(config: DictConfig, outcome: ReturnOrReason) -> JobReturn:
    """Return what Hydra expects of a job; for one without a result, a return without a value."""
    if isinstance(outcome, JobReturn) and outcome.status == JobStatus.COMPLETED:
        return outcome
    return job_return(config)
