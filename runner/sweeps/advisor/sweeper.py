"""The sweeper that Hydra calls for mode=advise, which chooses jobs as results come in.

Hydra's launcher runs the jobs, so that processes, signals, resuming and the report are those of any
sweep.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.config.hydra_plugins import register
from runner.sweeps.advisor.request import AdviseRequest
from runner.sweeps.advisor.schedule import TrialScheduler
from runner.sweeps.advisor.trials import Trials
from runner.sweeps.verdict.settings import AdviseSettings


def prepare_sweeper(config: DictConfig) -> None:
    """Register the sweeper with Hydra, and check the command.

    Args:
        config: the sweep's.

    Raises:
        ConfigError: the command asks for what cannot be compared.
        Unavailable: the device is not there.
    """
    register(AdviseSweeper)
    # Here as well as in the sweep: an error now comes before a sweep's folder and its parent run.
    AdviseRequest.from_config(config)


@final
class AdviseSweeper(Sweeper):
    """A sweeper of Hydra that runs trials until the budget is used up."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives every sweeper."""
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: Sequence[str]) -> Any:
        """Run all trials. The sweep's report is made from the files that they leave.

        Args:
            arguments: overrides of the command, which are read from the config instead.
        """
        # Set by setup, which Hydra calls first.
        assert self.config is not None
        assert self.launcher is not None
        folder = Path(self.config.hydra.sweep.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        # As Hydra's own sweepers do, whose sweeps have this file.
        OmegaConf.save(self.config, folder / "multirun.yaml")
        request = AdviseRequest.from_config(self.config)
        resumes = bool(self.config.hydra.callbacks.sweep.resume)
        resumed = AdviseSettings.read(folder) if resumes else None
        trials = Trials(self.launcher, folder, request.spec.advise.seconds or 0.0, resumes)
        TrialScheduler(request, trials, resumed).run()
        return None
