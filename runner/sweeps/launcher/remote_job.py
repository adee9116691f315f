"""Run one job in a process that a launcher of Hydra's plugins has started, on some machine."""

import copy
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict, read_write

from runner.sweeps.launcher.isolated import JobRunner
from runner.utils.errors import ConfigError
from runner.utils.layout import MANIFEST, RESULT

STOP_FILE_NAME = "stop"
"""Name of the file in a sweep's folder that requests a stop of its jobs; it holds the number of a
signal."""

_PARENT_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class RemoteJob:
    """Hydra's task function for jobs that a plugin's launcher runs.

    The job runs in a process of its own there, too, so that the plugin's process survives its
    death.

    Attributes:
        folder: the working directory of the command.
        path: sys.path of the command.
        environ: variables that the plugin's processes may lack.
        existing_jobs: numbers of the jobs whose folders existed before the sweep began. Any other
            job that finds files in its folder was started before by this sweep, and resumes.
        jobs_at_once: jobs that share the machine's processors.
        is_child: the plugin's process is a child of the sweep's, and has to stop when that is gone.
    """

    folder: str
    path: Sequence[str]
    environ: Mapping[str, str]
    existing_jobs: frozenset[int]
    jobs_at_once: int
    is_child: bool

    def __call__(self, config: DictConfig) -> object:
        """Run the job that HydraConfig describes.

        Args:
            config: the job's, composed by the plugin.

        Returns:
            What the task function returns; None for a job that was stopped.

        Raises:
            ConfigError: this machine does not see the sweep's folder.
            SystemExit: the job was stopped by its batch system, which decides about a restart.
        """
        self._enter_environment()
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        # The sweep's process may be on another machine, and cannot send signals here.
        stop_file = Path(hydra.sweep.dir, STOP_FILE_NAME)
        runner = JobRunner(self.jobs_at_once, stop_file)
        job = self._job_config(config)
        try:
            with _stop_with_parent() if self.is_child else nullcontext():
                (job_return,) = runner.run(iter([job]))
            return job_return.return_value
        except SystemExit as stop:
            status = int(str(stop.code))
        if not (folder / RESULT).exists():
            from runner.sweeps.job_result import record_result

            name = signal.Signals(status - 128).name
            record_result(config, folder, "stopped", f"Stopped by {name} before it began.")
        # Without a stop file it was not the sweep that stopped the job.
        if not stop_file.exists():
            _return_to_batch_system(status)
        return None

    def _job_config(self, config: DictConfig) -> DictConfig:
        """Return the job's config with Hydra's; a job that has begun before resumes."""
        hydra = HydraConfig.get()
        # Hydra has written its config there before it calls this function.
        files = {path.name for path in Path(hydra.runtime.output_dir).iterdir()}
        has_begun = bool(files - {str(hydra.output_subdir)})
        job = copy.deepcopy(config)
        with read_write(job), open_dict(job):
            job["hydra"] = copy.deepcopy(hydra)
        if has_begun and int(hydra.job.num) not in self.existing_jobs:
            with read_write(job.hydra), open_dict(job.hydra):
                job.hydra.callbacks.sweep.resume = True
                job.hydra.overrides.hydra.append("hydra.callbacks.sweep.resume=true")
        return job

    def _enter_environment(self) -> None:
        """Take over the command's working directory, import path and missing variables."""
        sweep = Path(HydraConfig.get().sweep.dir)
        unseen = [] if (sweep / MANIFEST).is_file() else [str(sweep)]
        if not Path(self.folder).is_dir():
            unseen = [self.folder]
        if unseen:
            raise ConfigError(
                f"{socket.gethostname()} does not see {unseen[0]}. The machines of a launcher must "
                "share the folder that the command is typed in and hydra.sweep.dir=<folder>."
            )
        sys.path += [path for path in self.path if path not in sys.path]
        os.chdir(self.folder)
        for key, value in self.environ.items():
            os.environ.setdefault(key, value)
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        # A node has more processors than Slurm gives the job.
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        if cpus:
            os.environ.setdefault("OMP_NUM_THREADS", cpus)


@contextmanager
def _stop_with_parent() -> Iterator[None]:
    """Context that stops the job once this process's parent has ended, and then exits."""
    parent = os.getppid()
    ended = threading.Event()

    def watch_parent() -> None:
        while not ended.wait(_PARENT_POLL_SECONDS):
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=watch_parent, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if os.getppid() != parent:
            os._exit(1)


def _return_to_batch_system(status: int) -> None:
    """Leave a stopped job to its batch system, which may start it again.

    submitit asks Slurm to queue the job again after its own signal; Slurm itself decides about
    others.
    """
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return
    from submitit.core.job_environment import JobEnvironment

    if status - 128 == JobEnvironment._usr_sig():
        # The launcher's handlers are removed by now, so this reaches submitit's.
        signal.raise_signal(status - 128)
    raise SystemExit(status)
