"""The launcher that Hydra calls: run each job of a sweep in a process of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from runner.config.hydra_plugins import register
from runner.sweeps.launcher.job_request import compose_job_config
from runner.sweeps.launcher.job_runner import JobRunner, shared_fork_server
from runner.utils.errors import ConfigError


def prepare_launcher() -> None:
    """Register the launcher with Hydra, and start the fork server."""
    register(IsolatedLauncher)
    # Now, not for the first job: the fork server imports what jobs need while this process imports
    # what the sweep needs.
    shared_fork_server()


@final
class IsolatedLauncher(Launcher):
    """A launcher of Hydra whose jobs are processes of this machine.

    Args:
        n_jobs: how many run at once, 1 or more.
    """

    def __init__(self, n_jobs: int = 1) -> None:
        self._n_jobs = n_jobs

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives every launcher. A job's process finds the task function itself.

        Raises:
            ConfigError: n_jobs is below 1.
        """
        if self._n_jobs < 1:
            raise ConfigError(f"hydra.launcher.n_jobs={self._n_jobs}: type 1 or more.")
        self._context = hydra_context
        self._config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs, and return what Hydra expects of each, in order.

        Args:
            job_overrides: overrides of each job.
            initial_job_idx: number of the first one.

        Raises:
            SystemExit: a signal has stopped the sweep, or with sweep.fail_fast a job has failed.
        """
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(self._config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        update_job_count(self._config, initial_job_idx + len(job_overrides))
        numbers: Sequence[int] = range(initial_job_idx, initial_job_idx + len(job_overrides))
        # Another sweeper expects the results of its jobs in their order.
        is_basic = str(self._config.hydra.sweeper.get("_target_")).endswith(".BasicSweeper")
        if is_basic and self._config.hydra.callbacks.sweep.resume:
            from runner.sweeps.sweep_resume import resumed_numbers

            numbers = resumed_numbers(Path(self._config.hydra.sweep.dir), job_overrides, numbers)
        jobs = (
            compose_job_config(self._context, self._config, number, overrides)
            for number, overrides in zip(numbers, job_overrides, strict=True)
        )
        fail_fast = bool(self._config.hydra.callbacks.sweep.fail_fast)
        return JobRunner(self._n_jobs, fail_fast=fail_fast).run(jobs)


def update_job_count(config: DictConfig, launched: int) -> None:
    """Set how many jobs this process's sweep has, if it runs one.

    Args:
        config: the sweep's.
        launched: number of jobs that are launched so far.
    """
    from runner.sweeps.sweep import Sweep

    if Sweep.current is not None:
        # A search launches its trials in several calls, and says in n_trials how many there are.
        planned = config.hydra.sweeper.get("n_trials", 0)
        Sweep.current.set_job_count(max(launched, planned))
