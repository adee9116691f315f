"""What a job's process is told to do."""

import os
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write


@dataclass(frozen=True)
class ProcessEnvironment:
    """What a job finds around it. Sent before its order, whose objects may be of modules that are
    found only then.

    Attributes:
        threads: of torch; None leaves what the environment says.
    """

    path: Sequence[str]
    argv: Sequence[str]
    folder: str
    environ: Mapping[str, str]
    threads: int | None

    @classmethod
    def ours(cls, jobs: int) -> "ProcessEnvironment":
        """This process's; `jobs` at once share the processors."""
        share = max(1, (os.cpu_count() or 1) // jobs)
        told = jobs == 1 or "OMP_NUM_THREADS" in os.environ
        return cls([*sys.path], [*sys.argv], os.getcwd(), {**os.environ}, None if told else share)  # noqa: PTH109

    def enter(self) -> None:
        """Make them this process's own."""
        sys.path[:], sys.argv[:] = self.path, self.argv
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)


@dataclass(frozen=True)
class JobRequest:
    """A job as Hydra sees it."""

    config: DictConfig
    task: TaskFunction
    context: HydraContext
    singletons: Mapping[Any, Any]

    @classmethod
    def pickled(cls, config: DictConfig, task: TaskFunction, context: HydraContext) -> bytes:
        """With what Hydra knows in this process."""
        # Plugins would go with their classes, of which each process finds its own.
        known = {kind: one for kind, one in Singleton._instances.items() if kind is not Plugins}
        return pickle.dumps(cls(config, task, context, known))

    def run(self) -> JobReturn:
        """Raises what the task raised."""
        Singleton._instances.update(self.singletons)  # set_state would look for plugins anew
        setup_globals()
        done = run_job(
            hydra_context=self.context,
            task_function=self.task,
            config=self.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if done.status != JobStatus.COMPLETED:
            raise done._return_value
        return done


@dataclass(frozen=True)
class RemoteJobRequest:
    """An order for one job of a sweep, composed by the job: what Hydra composes in a process that
    a plugin started holds classes of its own, which cannot be passed on.

    Attributes:
        sweep: a pickled order whose config is the sweep's.
        again: the job goes on with what it left.
    """

    sweep: bytes
    number: int
    overrides: Sequence[str]
    again: bool

    def run(self) -> JobReturn:
        """Raises what the task raised."""
        order: JobRequest = pickle.loads(self.sweep)
        Singleton._instances.update(order.singletons)
        setup_globals()
        config = with_resume(order.config) if self.again else order.config
        job = compose_job_config(order.context, config, self.number, self.overrides)
        return replace(order, config=job).run()


def compose_job_config(
    context: HydraContext, config: DictConfig, number: int, overrides: Sequence[str]
) -> DictConfig:
    """A job's config, from the sweep's."""
    job = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(job):
        job.hydra.job.id = job.hydra.job.num = number
    return job


def with_resume(config: DictConfig) -> DictConfig:
    """A sweep's config whose jobs go on with what they left."""
    config = config.copy()
    with read_write(config), open_dict(config):
        config.hydra.overrides.hydra.append("hydra.callbacks.sweep.resume=true")
    return config


STATUS_STRUCT = struct.Struct("i")
"""Written twice into a job's life: its process id, then what os.waitpid said of it."""
