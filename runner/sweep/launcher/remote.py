"""The launchers of Hydra's plugins (submitit, Ray, joblib, any other): the sweep's side."""

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
from runner.sweep.launcher.isolated import announce_job, job_folder, job_hydra_config
from runner.sweep.launcher.job_output import last_lines
from runner.sweep.launcher.job_request import JobRequest, compose_job_config
from runner.sweep.launcher.remote_job import STOP, RemoteJob
from runner.sweep.launcher.stop_requests import StopFile
from runner.utils.errors import ConfigError
from runner.utils.layout import RESULT
from runner.utils.stop_signals import Interrupted
from runner.utils.terminal import print_error

_VISIBLE_SECONDS = 15.0
"""What a shared file system may take until it shows here what was written elsewhere."""
_POLL_SECONDS = 0.2
_STORE_BYTES = 2**27
"""Of Ray's store, which a sweep hardly uses; its own default is a third of the memory."""


def prepare_remote(config: DictConfig) -> None:
    """Puts RemoteLauncher before the plugin's launcher that a sweep names.

    Raises:
        ConfigError: it is Slurm's, and that is not here.
    """
    target = str(config.hydra.launcher._target_)
    if target.endswith(".SlurmLauncher") and not shutil.which("sbatch"):
        raise ConfigError(
            "hydra/launcher=submitit_slurm: there is no sbatch here. Type the command on a node of "
            "Slurm's, or launcher=submitit_local to try it on this machine."
        )
    register(RemoteLauncher)
    folder = os.path.abspath(config.hydra.sweep.dir)  # noqa: PTH100
    quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
    with read_write(config), open_dict(config):
        config.hydra.launcher = {
            "_target_": REMOTE,
            "_recursive_": False,
            "launcher": config.hydra.launcher,
        }
        config.hydra.sweep.dir = folder
        # Jobs are composed anew, in processes that may have been started in another folder.
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{quoted}'")


@final
class RemoteLauncher(Launcher):
    """Has another launcher run the jobs, wherever that does it, and sees to it that each comes to
    a result, however it ends.

    Args:
        launcher: the config of the other one.
    """

    def __init__(self, launcher: DictConfig) -> None:
        self._node = launcher

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """What Hydra tells every launcher."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Raises ConfigError where the other launcher takes none of the jobs, and SystemExit where
        a signal has stopped the sweep."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        announce_job(self._config, initial_job_idx + len(job_overrides))
        jobs = {
            number: compose_job_config(self._context, self._config, number, overrides)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        }
        before = {number for number, config in jobs.items() if job_folder(config).exists()}
        asked = Path(self._config.hydra.sweep.dir, STOP)
        asked.unlink(missing_ok=True)
        for number in before if not self._config.hydra.callbacks.sweep.resume else ():
            (job_folder(jobs[number]) / RESULT).unlink(missing_ok=True)  # of another sweep
        job = self._job(frozenset(before), len(jobs))
        if self._node.get("ray"):
            self._start_ray()  # which takes SIGTERM for itself
        with StopFile(asked) as stop:
            try:
                came = self._run(job, job_overrides, initial_job_idx, stop)
            except Interrupted:
                came = ["Stopped at once by a second signal."] * len(jobs)
            except Exception as error:
                if not stop.came and not any(
                    job_folder(jobs[n]).exists() for n in {*jobs} - before
                ):
                    raise self._refused(error) from error
                came = [explain_launcher_error(error)] * len(jobs)
        done = dict(zip(jobs, came, strict=True))
        _settle(jobs, done, bool(stop.came))
        asked.unlink(missing_ok=True)
        if stop.came:
            raise SystemExit(128 + stop.came)
        return [_returned(config, done[number]) for number, config in jobs.items()]

    def _job(self, before: frozenset[int], jobs: int) -> RemoteJob:
        # Ray's processes may have been started before the command. Others get its environment.
        passed = "MLFLOW_" if self._node.get("ray") else "HYDRA_"
        environ = {key: value for key, value in os.environ.items() if key.startswith(passed)}
        sweep = JobRequest.pickled(self._config, self._task, self._context)
        here = os.getcwd()  # noqa: PTH109
        at_once, child = _at_once(self._node, jobs), _name(self._node) == "JoblibLauncher"
        return RemoteJob(sweep, here, [*sys.path], environ, before, at_once, child)

    def _run(
        self, job: RemoteJob, overrides: Sequence[Sequence[str]], first: int, stop: StopFile
    ) -> Sequence[JobReturn | str]:
        """What each job came to; text says why one came to nothing."""
        config = copy.deepcopy(self._config)
        with read_write(config), open_dict(config):
            config.hydra.launcher = self._node
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self._context, task_function=job, config=config
        )
        if hasattr(launcher, "_EXECUTOR"):
            from runner.sweep.launcher.submitit import run_jobs

            return run_jobs(launcher, overrides, first, stop)
        return launcher.launch(overrides, first)

    def _start_ray(self) -> None:
        """Begins a Ray cluster of this machine, or joins the one that an address names."""
        import ray  # pyright: ignore[reportMissingImports]

        given = OmegaConf.to_container(self._node.ray.init, resolve=True)
        assert isinstance(given, dict)
        if not (given.get("address") or os.environ.get("RAY_ADDRESS")):
            given.setdefault("object_store_memory", _STORE_BYTES)
        if not ray.is_initialized():
            try:
                ray.init(**{str(key): value for key, value in given.items()})
            except Exception as error:
                raise self._refused(error) from error

    def _refused(self, error: Exception) -> ConfigError:
        choice = self._config.hydra.runtime.choices.get("hydra/launcher")
        return ConfigError(
            f"hydra/launcher={choice} takes no jobs: {explain_launcher_error(error)}"
        )


def explain_launcher_error(error: Exception) -> str:
    """What went wrong in a launcher, in a line."""
    lines = last_lines(str(error))
    return f"{type(error).__name__}: {' | '.join(lines)}" if lines else type(error).__name__


def _at_once(node: DictConfig, jobs: int) -> int:
    """How many jobs this machine runs at the same time."""
    if _name(node) == "JoblibLauncher":
        asked = int(node.n_jobs)
        return min(jobs, asked if asked > 0 else max(1, (os.cpu_count() or 1) + 1 + asked))
    return jobs if _name(node) == "LocalLauncher" else 1


def _name(node: DictConfig) -> str:
    return str(node._target_).rpartition(".")[2]


def _settle(
    jobs: Mapping[int, DictConfig], done: Mapping[int, JobReturn | str], stopped: bool
) -> None:
    """Waits for results to show here; says and records why there are none of some jobs."""
    from runner.sweep.job_result import record_result

    end = time.monotonic() + _VISIBLE_SECONDS
    reasons: dict[str, list[str]] = {}
    for number, config in jobs.items():
        came, folder = done[number], job_folder(config)
        ran = isinstance(came, JobReturn) and came.status == JobStatus.COMPLETED
        while ran and not (folder / RESULT).exists() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        if not (folder / RESULT).exists() and (folder.exists() or not stopped):
            reason = _reason(came, folder.parent)
            reasons.setdefault(reason, []).append(str(number))
            with job_hydra_config(config):
                record_result(config, folder, "stopped" if stopped else "failed", reason)
    for reason, numbers in reasons.items():
        print_error(f"job {', '.join(numbers)}: {reason}")


def _reason(came: JobReturn | str, sweep: Path) -> str:
    if isinstance(came, str):
        return came
    if came.status == JobStatus.FAILED:
        return str(came._return_value)
    return (
        f"It ran, but left no result in {sweep} as this machine sees it. The machines of a "
        "launcher must share that folder: type hydra.sweep.dir=<folder that all of them see>."
    )


def _returned(config: DictConfig, came: JobReturn | str) -> JobReturn:
    """What Hydra takes; of a job without a result, no number."""
    if isinstance(came, JobReturn) and came.status == JobStatus.COMPLETED:
        return came
    overrides = OmegaConf.to_container(config.hydra.overrides.task)
    assert isinstance(overrides, list)
    return JobReturn(overrides=overrides, cfg=config, status=JobStatus.COMPLETED)
