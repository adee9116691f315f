"""What the sweep sends to a job's process: a command of a single run, and its environment.

A job of a sweep is the single-run command in the sweep's folder. The job's process composes its own
config from the command's words, and a user can type the same command again.
"""

import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from runner.config.overrides import override_texts
from runner.core import fmt

STATUS_STRUCT = struct.Struct("i")
"""Written twice to a job's status pipe: the process id, then the status of os.waitpid."""

_JOB_KEYS = ("hydra.mode", "hydra.sweep.dir")
"""Keys that are another thing in a job's command than in its sweep's."""


@dataclass(frozen=True)
class JobRequest:
    """A job's command, and what its process takes over from the process that asks for it.

    Attributes:
        arguments: words of the command after `python -m runner`.
        job_folder: the job's output folder.
        folder: the working directory.
        path: sys.path.
        environ: environment variables.
        threads: threads of torch; None keeps what the environment says.
    """

    arguments: Sequence[str]
    job_folder: Path
    folder: str
    path: Sequence[str]
    environ: Mapping[str, str]
    threads: int | None

    @classmethod
    def from_config(cls, config: DictConfig, jobs: int) -> "JobRequest":
        """Return the request for one of several jobs that share the processors.

        Args:
            config: the job's.
            jobs: jobs that run at once.
        """
        threads = None
        if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, (os.cpu_count() or 1) // jobs)
        return cls(
            arguments=_job_arguments(config),
            job_folder=job_folder(config),
            folder=os.getcwd(),  # noqa: PTH109
            path=[*sys.path],
            environ={**os.environ},
            threads=threads,
        )

    def set_up_process(self) -> None:
        """Give this process the requested environment and command line."""
        sys.path[:] = self.path
        sys.argv[:] = ["runner", *self.arguments]
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)


def _job_arguments(config: DictConfig) -> list[str]:
    """Return the words after `python -m runner` of the command that runs one job of a sweep.

    Args:
        config: the job's, composed; its sweep's folder is hydra.sweep.dir.
    """
    hydra = config.hydra
    overrides = override_texts(hydra.overrides.task) + override_texts(hydra.overrides.hydra)
    typed = [text for text in overrides if fmt.override_key(text) not in _JOB_KEYS]
    sweep_folder = fmt.quote_value(os.path.abspath(hydra.sweep.dir))  # noqa: PTH100
    job = [f"hydra.sweep.dir={sweep_folder}", f"hydra.job.num={hydra.job.num}"]
    flags = ["--config-name", str(hydra.job.config_name)]
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", str(source.path)]
    # A preset of the sweep may set hydra.mode.
    return [*typed, *job, f"hydra.job.id={hydra.job.num}", "hydra.mode=RUN", *flags]


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
        job_config.hydra.job.num = number
        job_config.hydra.job.id = str(number)
    return job_config


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
