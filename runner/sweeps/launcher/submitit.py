"""Run jobs through submitit's executors, and wait for all of them, however each one ends.

The plugin's own launch raises at the first job that fails, and leaves the others running.
"""

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn

from runner.sweeps.launcher.job_output import last_lines
from runner.sweeps.launcher.stop_requests import StopFile
from runner.utils.stop_signals import Interrupted

_POLL_SECONDS = 0.2
_SLURM_POLL_SECONDS = 1.0
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals that submitit's local processes would pass on as a kill; jobs get them through the stop
file instead."""
_CANCEL_SECONDS = 20.0
"""Time that cancelled jobs have to end."""


def run_jobs(
    launcher: Any, overrides: Sequence[Sequence[str]], first: int, stop: StopFile
) -> Sequence[JobReturn | str]:
    """Run jobs through a submitit launcher of Hydra's plugin.

    Args:
        launcher: of the plugin, set up.
        overrides: overrides of each job.
        first: number of the first job.
        stop: the context that signals go to.

    Returns:
        What Hydra expects of each job, or why there is none.

    Raises:
        Interrupted: a second signal has cancelled the jobs.
        Exception: submitit or its batch system accepts none of them.
    """
    jobs = _submit(launcher, overrides, first)
    # After a stop, Slurm is asked about jobs: those that it has dropped leave no result to find.
    asks_slurm = False
    try:
        while not all(job.done(force_check=asks_slurm) for job in jobs):
            if stop.received_signal and not asks_slurm:
                asks_slurm = True
                _cancel_pending(jobs)
            time.sleep(_SLURM_POLL_SECONDS if asks_slurm else _POLL_SECONDS)
        return [_outcome(job) for job in jobs]
    except Interrupted:
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
    private.mkdir(parents=True, exist_ok=True)
    # The pickled jobs hold the config, which may hold secrets.
    private.chmod(0o700)
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
    # Local processes inherit the blocked signals.
    blocked = _TERMINAL_SIGNALS if kind == "local" else []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        return executor.map_array(launcher, [[*texts] for texts in overrides], *rest)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outcome(job: Any) -> JobReturn | str:
    """Return what Hydra expects of a job that ended, or why there is none."""
    try:
        return job.results()[0]
    except Exception as error:
        output = job.stderr() or job.stdout() or str(error)
        lines = " | ".join(last_lines(output))
        return f"Its {type(job).__name__} {job.job_id} ended as {job.state}. Last lines: {lines}"


def _cancel_pending(jobs: Sequence[Any]) -> None:
    """Remove jobs that have not begun from Slurm's queue; the others stop by themselves."""
    # All jobs are one array, whose number is the part of a job's id before the underscore.
    if jobs[0]._cancel_command == "scancel":
        array = jobs[0].job_id.partition("_")[0]
        with suppress(OSError):
            subprocess.run(["scancel", "--state=PENDING", array], check=False)


def _cancel(jobs: Sequence[Any]) -> None:
    """Cancel all jobs, and wait until they have ended, for _CANCEL_SECONDS at most."""
    for job in jobs:
        if not job.done():
            with suppress(OSError):
                # Only jobs of the local executor have a process.
                process = getattr(job, "_process", None)
                if process:
                    process.terminate()
                else:
                    job.cancel(check=False)
    deadline = time.monotonic() + _CANCEL_SECONDS
    while time.monotonic() < deadline and not all(job.done() for job in jobs):
        time.sleep(_POLL_SECONDS)
