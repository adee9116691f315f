"""What the sweep sends to a job's process: the environment to take over, then the job to run."""

import os
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

STATUS_STRUCT = struct.Struct("i")
"""Written twice to a job's status pipe: the process id, then the status of os.waitpid."""


@dataclass(frozen=True)
class ProcessEnvironment:
    """What a job's process takes over from the process that asks for it.

    Sent before the job request: unpickling the request may import modules that are found only with
    this sys.path.

    Attributes:
        path: sys.path.
        argv: sys.argv.
        folder: the working directory.
        job_folder: the job's output folder.
        environ: environment variables.
        threads: threads of torch; None keeps what the environment says.
    """

    path: Sequence[str]
    argv: Sequence[str]
    folder: str
    job_folder: Path
    environ: Mapping[str, str]
    threads: int | None

    @classmethod
    def current(cls, job_folder: Path, jobs: int) -> "ProcessEnvironment":
        """Return this process's environment for one of several jobs that share the processors.

        Args:
            job_folder: the job's output folder.
            jobs: jobs that run at once.
        """
        threads = None
        if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, (os.cpu_count() or 1) // jobs)
        folder = os.getcwd()  # noqa: PTH109
        return cls([*sys.path], [*sys.argv], folder, job_folder, {**os.environ}, threads)

    def apply(self) -> None:
        """Make this process's environment the stored one."""
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)


@dataclass(frozen=True)
class JobRequest:
    """One job as Hydra sees it: the composed config, and the function that runs it.

    Attributes:
        config: the job's, or the sweep's where a RemoteJobRequest composes the job's from it.
        task: Hydra's task function.
        context: Hydra's.
        singletons: Hydra's global state, by class.
    """

    config: DictConfig
    task: TaskFunction
    context: HydraContext
    singletons: Mapping[Any, Any]

    @classmethod
    def to_pickle(cls, config: DictConfig, task: TaskFunction, context: HydraContext) -> bytes:
        """Return a pickled request with this process's global state of Hydra."""
        # Plugins would be pickled with their classes, and each process has to find its own ones.
        state = {kind: one for kind, one in Singleton._instances.items() if kind is not Plugins}
        return pickle.dumps(cls(config, task, context, state))

    def run(self) -> JobReturn:
        """Run the job in this process, and return what Hydra's task function returned.

        Raises:
            Exception: what the task function raised.
        """
        Singleton._instances.update(self.singletons)  # set_state would search for plugins again
        setup_globals()
        job_return = run_job(
            hydra_context=self.context,
            task_function=self.task,
            config=self.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if job_return.status != JobStatus.COMPLETED:
            raise job_return._return_value
        return job_return


@dataclass(frozen=True)
class RemoteJobRequest:
    """A job request whose config is composed in the job's own process.

    Configs that are composed inside a plugin's worker hold classes that cannot be pickled.

    Attributes:
        sweep: a pickled JobRequest whose config is the sweep's.
        number: the job's, from 0.
        overrides: the job's.
        resumes: the job resumes from what its folder holds.
    """

    sweep: bytes
    number: int
    overrides: Sequence[str]
    resumes: bool

    def run(self) -> JobReturn:
        """Compose the job's config and run the job in this process.

        Raises:
            Exception: what the task function raised.
        """
        request: JobRequest = pickle.loads(self.sweep)
        Singleton._instances.update(request.singletons)
        setup_globals()
        config = with_resume(request.config) if self.resumes else request.config
        job_config = compose_job_config(request.context, config, self.number, self.overrides)
        return replace(request, config=job_config).run()


def compose_job_config(
    context: HydraContext, config: DictConfig, number: int, overrides: Sequence[str]
) -> DictConfig:
    """Return a job's config, composed from the sweep's config and the job's overrides.

    Args:
        context: Hydra's.
        config: the sweep's.
        number: the job's, from 0.
        overrides: the job's.
    """
    job_config = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(job_config):
        job_config.hydra.job.id = job_config.hydra.job.num = number
    return job_config


def with_resume(config: DictConfig) -> DictConfig:
    """Return a sweep's config whose jobs resume from what their folders hold."""
    config = config.copy()
    with read_write(config), open_dict(config):
        config.hydra.overrides.hydra.append("hydra.callbacks.sweep.resume=true")
    return config
