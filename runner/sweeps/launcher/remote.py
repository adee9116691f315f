"""Run the jobs of a sweep through a launcher of Hydra's plugins: submitit, Ray, joblib, any other.

The sweep's side is RemoteLauncher: it hands a RemoteJob to the plugin's launcher, and records every
job that comes back without a result. Jobs of submitit's launchers are waited for one by one,
however each ends: the plugin's own launch raises at the first one that fails, and leaves the others
running. The job's side is RemoteJob, in a process that the plugin has started, on some machine.
"""

import copy
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from runner.config.hydra_plugins import REMOTE, register
from runner.core import ConfigError, files, fmt, layout, stop_signals, terminal
from runner.output.lasting_output import lasting_output
from runner.sweeps.launcher.isolated import JobRunner, begin_launch, job_return
from runner.sweeps.launcher.job_process import last_lines
from runner.sweeps.launcher.job_request import compose_job_config, job_folder, job_hydra_config
from runner.sweeps.manifest import record_result
from runner.sweeps.sweep_progress import print_job_line

STOP_FILE_NAME = "stop"
"""Name of the file in a sweep's folder that requests a stop of its jobs; it holds the number of a
signal."""
_PARENT_POLL_SECONDS = 1.0
_MAX_VISIBILITY_SECONDS = 15.0
"""Longest time that a shared file system takes to show here what another machine wrote."""
_POLL_SECONDS = 0.2
_RAY_STORE_BYTES = 2**27
"""Size of Ray's object store, which a sweep hardly uses; Ray's default is a third of the memory."""
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals that submitit's local processes would pass on as a kill; jobs get them through the stop
file instead."""
_CANCEL_SECONDS = 20.0
"""Time that cancelled jobs have to end."""
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
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.launcher = {
            "_target_": REMOTE,
            "_recursive_": False,
            "launcher": config.hydra.launcher,
        }
        config.hydra.sweep.dir = folder
        # Jobs compose their configs in processes that may have been started in another folder.
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={fmt.quote_value(folder)}")


@dataclass(frozen=True)
class RemoteJob:
    """Hydra's task function for jobs that a plugin's launcher runs.

    The job runs in a process of its own there, too, so that the plugin's process survives its
    death.

    Attributes:
        folder: the working directory of the command.
        path: sys.path of the command.
        environ: variables that the plugin's processes may lack.
        jobs_at_once: jobs that share the machine's processors.
        is_child: the plugin's process is a child of the sweep's, and has to stop when that is gone.
    """

    folder: str
    path: Sequence[str]
    environ: Mapping[str, str]
    jobs_at_once: int
    is_child: bool

    @lasting_output()
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
        if not (folder / layout.RESULT).exists():
            name = signal.Signals(status - 128).name
            record_result(config, folder, "stopped", f"Stopped by {name} before it began.")
        # Without a stop file it was not the sweep that stopped the job.
        if not stop_file.exists():
            _return_to_batch_system(status)
        return None

    def _job_config(self, config: DictConfig) -> DictConfig:
        """Return the job's config with Hydra's; a job that has begun before resumes."""
        hydra: Any = copy.deepcopy(HydraConfig.get())
        # Hydra has written its config there before it calls this function.
        names = {path.name for path in Path(hydra.runtime.output_dir).iterdir()}
        if names - {str(hydra.output_subdir)}:
            with read_write(hydra), open_dict(hydra):
                hydra.callbacks.sweep.resume = True
                hydra.overrides.hydra.append("hydra.callbacks.sweep.resume=true")
        job = copy.deepcopy(config)
        with read_write(job), open_dict(job):
            job["hydra"] = hydra
        return job

    def _enter_environment(self) -> None:
        """Take over the command's working directory, import path and missing variables."""
        sweep = HydraConfig.get().sweep.dir
        needed = {self.folder: Path(self.folder), sweep: Path(sweep, layout.MANIFEST)}
        unseen = [folder for folder, path in needed.items() if not path.exists()]
        if unseen:
            raise ConfigError(
                f"{socket.gethostname()} does not see {unseen[0]}. The machines of a launcher must "
                "share the folder that the command is typed in and hydra.sweep.dir=<folder>."
            )
        sys.path += [path for path in self.path if path not in sys.path]
        os.chdir(self.folder)
        for key, value in self.environ.items():
            os.environ.setdefault(key, value)
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


class StopFile(stop_signals.SignalHandler):
    """Context that writes the first signal to a file, for jobs that this process cannot signal.

    A second signal raises Interrupted.

    Args:
        path: the file, which jobs look for.

    Attributes:
        received_signal: number of the first signal; 0 before it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.received_signal = 0
        self._path = path
        self._first_at = 0.0

    def handle_signal(self, number: int) -> None:
        """Write the first signal's number to the file, or raise Interrupted for another one."""
        now = time.monotonic()
        if not self.received_signal:
            self.received_signal = number
            self._first_at = now
            files.write_text(self._path, str(number))
        elif now - self._first_at > stop_signals.COALESCE_SECONDS:
            raise stop_signals.Interrupted(number)


@final
class RemoteLauncher(Launcher):
    """A launcher of Hydra that runs jobs through another one, and records a result for each.

    Args:
        launcher: config of the other launcher.
    """

    def __init__(self, launcher: DictConfig) -> None:
        self._node = launcher
        self._name = str(launcher._target_).rpartition(".")[2]

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives every launcher. A job's process finds the task function itself."""
        self._context = hydra_context
        # A copy with the other launcher: the sweep's own config names this one.
        self._config = copy.deepcopy(config)
        with read_write(self._config.hydra), open_dict(self._config.hydra):
            self._config.hydra.launcher = self._node

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
        config = self._config
        at_once = self._jobs_at_once(len(job_overrides))
        # A batch system and a cluster say of no job when it begins.
        is_here = self._name in ("JoblibLauncher", "LocalLauncher")
        begin_launch(config, initial_job_idx + len(job_overrides), at_once if is_here else 0)
        jobs = {
            number: compose_job_config(self._context, config, number, overrides)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        }
        stop_file = Path(config.hydra.sweep.dir, STOP_FILE_NAME)
        # A resumed sweep may have been killed before it removed the file.
        stop_file.unlink(missing_ok=True)
        if self._node.get("ray"):
            # Before the signal handlers here: ray.init installs its own for SIGTERM.
            self._start_ray()
        # Ray's processes may have been started before the command, so that MLflow's variables are
        # missing there. Other launchers' processes get the command's environment.
        shared = ("MLFLOW_", "HYDRA_")
        remote_job = RemoteJob(
            folder=os.getcwd(),  # noqa: PTH109
            path=[*sys.path],
            environ={key: value for key, value in os.environ.items() if key.startswith(shared)},
            jobs_at_once=at_once,
            is_child=self._name == "JoblibLauncher",
        )
        with StopFile(stop_file) as stop:
            outcomes = self._run(remote_job, jobs, job_overrides, stop)
        returns = _record_missing_results(jobs, outcomes, bool(stop.received_signal))
        stop_file.unlink(missing_ok=True)
        if stop.received_signal:
            raise SystemExit(128 + stop.received_signal)
        return returns

    def _run(
        self,
        task: RemoteJob,
        jobs: Mapping[int, DictConfig],
        overrides: Sequence[Sequence[str]],
        stop: StopFile,
    ) -> Sequence[ReturnOrReason]:
        """Run jobs through the other launcher; return the outcome of each, in order.

        Args:
            task: what the other launcher runs for each job.
            jobs: config of each job by number.
            overrides: overrides of each job.
            stop: the context that signals go to.

        Raises:
            ConfigError: the other launcher accepts none of the jobs.
        """
        # A resumed sweep has the folders of its earlier jobs.
        new_folders = [folder for folder in map(job_folder, jobs.values()) if not folder.exists()]
        try:
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=self._context, task_function=task, config=self._config
            )
            # Submitit's launchers have it; their own launch gives up at the first job that fails.
            if hasattr(launcher, "_EXECUTOR"):
                return _run_submitit_jobs(launcher, overrides, jobs, stop)
            return launcher.launch(overrides, min(jobs))
        except stop_signals.Interrupted:
            return ["Stopped at once by a second signal."] * len(jobs)
        except Exception as error:
            # Plugins raise for a failed job as well as for jobs that they do not accept. Where
            # nothing started, the command is at fault, and is refused as a whole.
            started = any(folder.exists() for folder in new_folders)
            if not stop.received_signal and not started:
                raise self._launcher_error(error) from error
            return [_explain_error(error)] * len(jobs)

    def _jobs_at_once(self, jobs: int) -> int:
        """Return how many of so many jobs this machine runs at the same time."""
        if self._name == "JoblibLauncher":
            limit = int(self._node.n_jobs)
            # joblib's rule: -1 is all processors, -2 all but one.
            everything = (os.cpu_count() or 1) + 1 + limit
            return min(jobs, limit if limit > 0 else max(1, everything))
        # submitit's local executor starts all jobs at once; others give each its processors.
        return jobs if self._name == "LocalLauncher" else 1

    def _start_ray(self) -> None:
        """Start a Ray cluster of this machine, or join the one that an address names."""
        import ray  # pyright: ignore[reportMissingImports]

        settings: Any = OmegaConf.to_container(self._node.ray.init, resolve=True)
        # Ray refuses the size of a store for a cluster that runs already.
        if not (settings.get("address") or os.environ.get("RAY_ADDRESS")):
            settings.setdefault("object_store_memory", _RAY_STORE_BYTES)
        if not ray.is_initialized():
            try:
                ray.init(**settings)
            except Exception as error:
                raise self._launcher_error(error) from error

    def _launcher_error(self, error: Exception) -> ConfigError:
        choice = self._config.hydra.runtime.choices.get("hydra/launcher")
        return ConfigError(f"hydra/launcher={choice} takes no jobs: {_explain_error(error)}")


def _explain_error(error: Exception) -> str:
    """Return an error of a launcher as one line: its type, and the last lines of its message."""
    return ": ".join(filter(None, [type(error).__name__, last_lines(str(error))]))


def _record_missing_results(
    jobs: Mapping[int, DictConfig], outcomes: Sequence[ReturnOrReason], stopped: bool
) -> list[JobReturn]:
    """Wait until the jobs' results are visible here; print and record why some have none.

    Args:
        jobs: config of each job by number.
        outcomes: outcome of each job.
        stopped: a signal has stopped the sweep; jobs that had not begun then get no result.

    Returns:
        What Hydra expects of each job; for one without a result, a return without a value.
    """
    deadline = time.monotonic() + _MAX_VISIBILITY_SECONDS
    reasons: list[tuple[str, str]] = []
    returns = []
    for (number, config), outcome in zip(jobs.items(), outcomes, strict=True):
        folder = job_folder(config)
        completed = isinstance(outcome, JobReturn) and outcome.status == JobStatus.COMPLETED
        returns.append(outcome if completed else job_return(config))
        while completed and not (folder / layout.RESULT).exists() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        # A job that a stop kept from starting has no result, so that sweep.resume starts it.
        has_not_begun = stopped and not folder.exists()
        if (folder / layout.RESULT).exists() or has_not_begun:
            continue
        if isinstance(outcome, str):
            reason = outcome
        elif outcome.status == JobStatus.FAILED:
            reason = str(outcome._return_value)
        else:
            reason = (
                f"It ran, but left no result in {folder.parent} as this machine sees it. The "
                "machines of a launcher must share that folder: type hydra.sweep.dir=<folder that "
                "all of them see>."
            )
        reasons.append((reason, str(number)))
        with job_hydra_config(config):
            record_result(config, folder, "stopped" if stopped else "failed", reason)
        print_job_line(folder, is_elsewhere=True)
    for reason, numbers in fmt.grouped(reasons).items():
        terminal.print_error(f"job {', '.join(numbers)}: {reason}")
    return returns


def _run_submitit_jobs(
    launcher: Any,
    overrides: Sequence[Sequence[str]],
    configs: Mapping[int, DictConfig],
    stop: StopFile,
) -> Sequence[ReturnOrReason]:
    """Run jobs through a submitit launcher of Hydra's plugin.

    Args:
        launcher: of the plugin, set up.
        overrides: overrides of each job.
        configs: config of each job by number.
        stop: the context that signals go to.

    Returns:
        What Hydra expects of each job, or why there is none.

    Raises:
        Interrupted: a second signal has cancelled the jobs.
        Exception: submitit or its batch system accepts none of them.
    """
    jobs = _submit(launcher, overrides, min(configs))
    waiting = dict(zip(configs, jobs, strict=True))
    is_stopping = False
    try:
        while waiting:
            if launcher._EXECUTOR == "slurm" and stop.received_signal and not is_stopping:
                is_stopping = True
                # Jobs that have not begun leave Slurm's queue; the others stop by themselves. All
                # are one array, whose number is the part of a job's id before the underscore.
                array = jobs[0].job_id.partition("_")[0]
                subprocess.run(["scancel", "--state=PENDING", array], check=False)
                # They leave no result to find: submitit asks again at once, at first often.
                jobs[0].watcher.register_job(jobs[0].job_id)
            ended = [n for n, job in waiting.items() if job.done()]
            for number in ended:
                del waiting[number]
                place = min(configs) + len(configs) - len(waiting)
                print_job_line(job_folder(configs[number]), place, is_elsewhere=True)
            time.sleep(_POLL_SECONDS)
        return [_outcome(job, bool(stop.received_signal)) for job in jobs]
    except stop_signals.Interrupted:
        _cancel(jobs)
        raise
    finally:
        # These files hold the config, which may hold secrets.
        for job in jobs:
            job.paths.submitted_pickle.unlink(missing_ok=True)
            job.paths.result_pickle.unlink(missing_ok=True)


def _submit(launcher: Any, overrides: Sequence[Sequence[str]], first: int) -> Sequence[Any]:
    """Submit jobs as the plugin's own launch does; return submitit's jobs."""
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
    from submitit import AutoExecutor
    from submitit.core.utils import JobPaths

    kind = launcher._EXECUTOR
    params = dict(launcher.params)
    folder = params.pop("submitit_folder")
    private = JobPaths.get_first_id_independent_folder(folder)
    # The pickled jobs hold the config, which may hold secrets.
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    limits = {f"{kind}_{key}": params.pop(key) for key in ("max_num_timeout",) if key in params}
    executor = AutoExecutor(folder, kind, **limits)
    # submitit wants the name of the executor before the parameters that only this executor has.
    common = BaseQueueConf.__dataclass_fields__
    parameters = {key if key in common else f"{kind}_{key}": value for key, value in params.items()}
    executor.update_parameters(**parameters)
    numbers = range(first, first + len(overrides))
    state = Singleton.get_state()
    # The arguments of the plugin's launcher, one column each: overrides, key of the sweep's
    # folder, number, id, Hydra's global state.
    rest = zip(*[("hydra.sweep.dir", n, f"job_id_for_{n}", state) for n in numbers], strict=True)
    _ask_squeue()
    # Local processes inherit the blocked signals.
    blocked = _TERMINAL_SIGNALS if kind == "local" else []
    with stop_signals.signals_blocked(blocked):
        return executor.map_array(launcher, [[*texts] for texts in overrides], *rest)


def _ask_squeue() -> None:
    """Let submitit's jobs take their states from squeue.

    sacct, which submitit asks otherwise, needs accounting. On a Slurm without, it complains at each
    poll, and the end of a job that leaves no result is never noticed.
    """
    from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

    class QueueWatcher(SlurmInfoWatcher):
        def _make_command(self) -> list[str]:
            return ["squeue", "--me", "--array", "--noheader", "--format=%i"]

        def read_info(self, string: str | bytes) -> dict[str, dict[str, str]]:
            # squeue lists the jobs that have not ended, in whichever of Slurm's many states.
            listed = {job: {"State": "RUNNING"} for job in os.fsdecode(string).split()}
            return {job: {"State": "ENDED"} for job in self._info_dict} | listed

    SlurmJob.watcher = QueueWatcher()


def _outcome(job: Any, is_stopped: bool) -> ReturnOrReason:
    """Return what Hydra expects of a job that ended, or why there is none.

    Args:
        job: submitit's.
        is_stopped: a signal has stopped the sweep.
    """
    # submitit waits a quarter of a minute for the missing result of each job.
    if is_stopped and not job.paths.stdout.exists():
        return "Stopped before it began."
    try:
        return job.results()[0]
    except Exception as error:
        lines = last_lines(job.stderr() or job.stdout() or str(error))
        return f"Its {type(job).__name__} {job.job_id} ended without a result. Last lines: {lines}"


def _cancel(jobs: Sequence[Any]) -> None:
    """Cancel all jobs, and wait until they have ended, for _CANCEL_SECONDS at most."""
    for job in jobs:
        if not job.done():
            # Only jobs of the local executor have a process.
            process = getattr(job, "_process", None)
            if process:
                process.terminate()
            else:
                job.cancel(check=False)
    deadline = time.monotonic() + _CANCEL_SECONDS
    while time.monotonic() < deadline and not all(job.done() for job in jobs):
        time.sleep(_POLL_SECONDS)
