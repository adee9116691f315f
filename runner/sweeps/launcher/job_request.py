"""What the sweep sends to a job's process, a command of a single run; and what the process does.

A job of a sweep is the single-run command in the sweep's folder. The job's process composes its own
config from the command's words, and a user can type the same command again. `run_job_process` is
called in it from the fork to the exit.
"""

import atexit
import ctypes
import faulthandler
import io
import os
import runpy
import signal
import struct
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from runner.config.overrides import override_texts
from runner.core import fmt, stop_signals
from runner.sweeps.manifest import typed_config_dir
from runner.tracking.writer_process import SweepWriter, use_writer

STATUS_STRUCT = struct.Struct("i")
"""Written twice to a job's status pipe: the process id, then the status of os.waitpid."""

_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): the signal that this process gets when its parent ends."""
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
        hydra = config.hydra
        overrides = override_texts(hydra.overrides.task) + override_texts(hydra.overrides.hydra)
        typed = [text for text in overrides if fmt.override_key(text) not in _JOB_KEYS]
        sweep_folder = fmt.quote_value(os.path.abspath(hydra.sweep.dir))  # noqa: PTH100
        number = hydra.job.num
        job = [f"hydra.sweep.dir={sweep_folder}", f"hydra.job.num={number}"]
        flags = ["--config-name", str(hydra.job.config_name)]
        config_dir = typed_config_dir(hydra)
        if config_dir:
            flags += ["--config-dir", str(config_dir)]
        threads = None
        if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, (os.cpu_count() or 1) // jobs)
        return cls(
            # A preset of the sweep may set hydra.mode.
            arguments=[*typed, *job, f"hydra.job.id={number}", "hydra.mode=RUN", *flags],
            job_folder=job_folder(config),
            folder=os.getcwd(),  # noqa: PTH109
            path=[*sys.path],
            environ={**os.environ},
            threads=threads,
        )

    def run(self) -> int:
        """Give this process the requested environment, run the command, return its exit status."""
        sys.path[:] = self.path
        sys.argv[:] = ["runner", *self.arguments]
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        use_writer(SweepWriter(self.job_folder))
        try:
            # What `python -m runner` does: the job is a command of a single run.
            runpy.run_module("runner", run_name="__main__")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        return 0


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
    # Unlike with resolve() a link in the path stays as it was typed.
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


def run_job_process(request: int, status_pipe: int, out: int, err: int) -> NoReturn:
    """Run the job that comes through the request pipe, and exit with its command's exit status.

    What came of the job is in the result.json of its folder.

    Args:
        request: file descriptor of the pipe that a JobRequest comes through.
        status_pipe: file descriptor that takes the process id once the process handles signals.
        out: file descriptor that becomes stdout.
        err: file descriptor that becomes stderr.
    """
    status = 1
    try:
        # Signals are handled from here on: only then may the sweep know the process id.
        with stop_signals.CommandSignals(lambda: True):
            _set_up_process(status_pipe, out, err)
            with Connection(request) as connection:
                received: JobRequest = connection.recv()
            status = received.run()
            # os._exit below does not call them.
            atexit._run_exitfuncs()
    except stop_signals.Interrupted as error:
        status = error.exit_status
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Python's own exit would take the imported modules down, which takes long.
        os._exit(status)


def _set_up_process(status_pipe: int, out: int, err: int) -> None:
    """Make this process a process group of its own that ends with its parent, with its output."""
    parent = os.getppid()
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The fork server may have died before prctl took effect.
    if os.getppid() != parent:
        os._exit(1)
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    # The fork server's stdout may have been buffered as for a file. Line buffering here, so that a
    # job that is killed loses no line.
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(open(1, "wb"), line_buffering=True)  # noqa: SIM115
    # A crash in a library prints where it happened, which exit_reason reports.
    faulthandler.enable(all_threads=False)
    # The exit functions of the fork server's imports are not this job's.
    atexit._clear()
    os.write(status_pipe, STATUS_STRUCT.pack(os.getpid()))
    os.close(status_pipe)
