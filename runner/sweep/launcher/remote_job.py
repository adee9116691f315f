"""The launchers of Hydra's plugins: the job's side, in a process of theirs on some machine."""

import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from runner.sweep.launcher.isolated import IsolatedLauncher
from runner.sweep.launcher.job_request import JobRequest, with_resume
from runner.utils.errors import ConfigError
from runner.utils.layout import MANIFEST as SWEEP
from runner.utils.layout import RESULT

STOP = "stop"
"""The file in a sweep's folder that asks its jobs to stop: the number of a signal."""

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class RemoteJob:
    """Hydra's task function where a plugin runs the jobs. Each runs in a process of its own there,
    too, so that its death costs the plugin's process nothing.

    Attributes:
        sweep: a pickled order whose config is the sweep's.
        folder: that the command was typed in.
        path: sys.path there.
        environ: variables that processes may lack.
        before: numbers of the jobs whose folders were there before the sweep began. Another one
            that finds files in its folder has begun before, and goes on.
        at_once: jobs that share the machine's processors.
        child: runs in a child of the sweep's process, and stops when that is gone.
    """

    sweep: bytes
    folder: str
    path: Sequence[str]
    environ: Mapping[str, str]
    before: frozenset[int]
    at_once: int
    child: bool

    def __call__(self, config: DictConfig) -> object:
        """Returns what the task returns, None where it was stopped.

        Raises:
            ConfigError: the sweep's folder is not on this machine.
            SystemExit: the job was stopped, and its batch system decides what becomes of it.
        """
        self._enter()
        hydra = HydraConfig.get()
        number, folder = int(hydra.job.num), Path(hydra.runtime.output_dir)
        left = {path.name for path in folder.iterdir()} - {str(hydra.output_subdir)}
        again = bool(left) and number not in self.before
        asked = Path(hydra.sweep.dir, STOP)
        order: JobRequest = pickle.loads(self.sweep)
        launcher = IsolatedLauncher(self.at_once, asked, self.sweep)
        launcher.setup(
            hydra_context=order.context,
            task_function=order.task,
            config=with_resume(order.config) if again else order.config,
        )
        overrides = OmegaConf.to_container(hydra.overrides.task)
        assert isinstance(overrides, list)
        try:
            with _ending_with_parent() if self.child else nullcontext():
                (done,) = launcher.launch([overrides], number)
            return done.return_value
        except SystemExit as stop:
            status = int(str(stop.code))
        if not (folder / RESULT).exists():
            from runner.sweep.job_result import record_result

            name = signal.Signals(status - 128).name
            record_result(config, folder, "stopped", f"Stopped by {name} before it began.")
        if not asked.exists():
            _hand_over(status)
        return None

    def _enter(self) -> None:
        """Makes the command's surroundings this process's own, as far as they are here."""
        sweep = Path(HydraConfig.get().sweep.dir)
        if not (sweep / SWEEP).is_file() or not Path(self.folder).is_dir():
            missing = sweep if Path(self.folder).is_dir() else self.folder
            raise ConfigError(
                f"{socket.gethostname()} does not see {missing}. The machines of a launcher must "
                "share the folder that the command is typed in and hydra.sweep.dir=<folder>."
            )
        sys.path += [path for path in self.path if path not in sys.path]
        os.chdir(self.folder)
        for key, value in self.environ.items():
            os.environ.setdefault(key, value)
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
            os.environ.setdefault("OMP_NUM_THREADS", cpus)


@contextmanager
def _ending_with_parent() -> Iterator[None]:
    """Context of a job that stops when this process's parent is gone; the process ends with it."""
    parent, ended = os.getppid(), threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if os.getppid() != parent:
            os._exit(1)


def _hand_over(status: int) -> None:
    """Leaves a job that a batch system has stopped to that system: submitit has Slurm start it
    again for its own signal, Slurm itself does so for others."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return
    from submitit.core.job_environment import JobEnvironment

    if status - 128 == JobEnvironment._usr_sig():
        signal.raise_signal(status - 128)  # submitit's handler is back in its place
    raise SystemExit(status)
