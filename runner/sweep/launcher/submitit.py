"""Jobs of a sweep through submitit: all are waited for, whatever becomes of one."""

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn

from runner.sweep.launcher.job_output import last_lines
from runner.sweep.launcher.stop_requests import StopFile
from runner.utils.stop_signals import Interrupted

_POLL_SECONDS = 0.2
_ASK_SECONDS = 1.0
_OF_TERMINAL = (signal.SIGINT, signal.SIGHUP)
"""Which submitit's own processes here would pass on as a kill; jobs hear of them otherwise."""
_END_SECONDS = 20.0
"""For jobs that were cancelled to be gone."""


def run_jobs(
    launcher: Any, overrides: Sequence[Sequence[str]], first: int, stop: StopFile
) -> Sequence[JobReturn | str]:
    """Has a submitit launcher of Hydra's plugin run jobs: what each came to, or why to nothing.

    Raises:
        Exception: submitit or its batch system takes none of them.
    """
    jobs = _submit(launcher, overrides, first)
    asked = False  # Slurm, for what has become of jobs that leave no result
    try:
        while not all(job.done(force_check=asked) for job in jobs):
            if stop.came and not asked:
                asked = True
                _drop_waiting(jobs)
            time.sleep(_ASK_SECONDS if asked else _POLL_SECONDS)
        return [_outcome(job) for job in jobs]
    except Interrupted:
        _cancel(jobs)
        raise
    finally:
        for job in jobs:  # they hold the config, which may hold secrets
            job.paths.submitted_pickle.unlink(missing_ok=True)
            job.paths.result_pickle.unlink(missing_ok=True)


def _submit(launcher: Any, overrides: Sequence[Sequence[str]], first: int) -> Sequence[Any]:
    """As the plugin's own launch does it."""
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
    from submitit import AutoExecutor
    from submitit.core.utils import JobPaths

    kind, params = launcher._EXECUTOR, dict(launcher.params)
    folder = params.pop("submitit_folder")
    private = JobPaths.get_first_id_independent_folder(folder)
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)
    turns = {f"{kind}_{key}": params.pop(key) for key in ("max_num_timeout",) if key in params}
    executor = AutoExecutor(folder, kind, **turns)
    common = BaseQueueConf.__dataclass_fields__
    executor.update_parameters(
        **{key if key in common else f"{kind}_{key}": value for key, value in params.items()}
    )
    numbers = range(first, first + len(overrides))
    state = Singleton.get_state()
    rest = zip(*[("hydra.sweep.dir", n, f"job_id_for_{n}", state) for n in numbers], strict=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_TERMINAL if kind == "local" else [])
    try:
        return executor.map_array(launcher, [[*texts] for texts in overrides], *rest)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outcome(job: Any) -> JobReturn | str:
    try:
        return job.results()[0]
    except Exception as error:
        said = job.stderr() or job.stdout() or str(error)
        lines = " | ".join(last_lines(said))
        return f"Its {type(job).__name__} {job.job_id} ended as {job.state}. Last lines: {lines}"


def _drop_waiting(jobs: Sequence[Any]) -> None:
    """Takes those out of Slurm's queue that have not begun; the others stop by themselves."""
    if jobs[0]._cancel_command == "scancel":
        array = jobs[0].job_id.partition("_")[0]
        with suppress(OSError):
            subprocess.run(["scancel", "--state=PENDING", array], check=False)


def _cancel(jobs: Sequence[Any]) -> None:
    for job in jobs:
        if not job.done():
            with suppress(OSError):
                if process := getattr(job, "_process", None):
                    process.terminate()
                else:
                    job.cancel(check=False)
    end = time.monotonic() + _END_SECONDS
    while time.monotonic() < end and not all(job.done() for job in jobs):
        time.sleep(_POLL_SECONDS)
