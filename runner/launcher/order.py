"""What a job's process is told to do."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass(frozen=True)
class Surroundings:
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
    def ours(cls, jobs: int) -> "Surroundings":
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
class Order:
    """A job as Hydra sees it."""

    config: DictConfig
    task: TaskFunction
    context: HydraContext
    singletons: Mapping[Any, Any]

    def run(self) -> JobReturn:
        """Raises what the task raised."""
        Singleton._instances.update(self.singletons)  # set_state would look for plugins anew
        setup_globals()
        done = run_job(
            hydra_context=self.context, task_function=self.task, config=self.config,
            job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir",
        )  # fmt: skip
        if done.status != JobStatus.COMPLETED:
            raise done._return_value
        return done
