"""The sweeper that Hydra calls for mode=advise: it chooses the jobs as their results come in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.config.hydra_plugins import register
from runner.sweep.advisor.request import AdviseRequest
from runner.sweep.advisor.schedule import TrialScheduler
from runner.sweep.advisor.settings import AdviseSettings
from runner.sweep.advisor.trials import Trials


def prepare_sweeper(config: DictConfig) -> None:
    """Makes the sweeper known to Hydra, once what is asked for is known to be sound.

    Raises:
        ConfigError, Unavailable: it is not.
    """
    register(AdviseSweeper)
    AdviseRequest.of(config)


@final
class AdviseSweeper(Sweeper):
    """Runs trials until the budget is used; their report is the sweep's."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: Sequence[str]) -> Any:
        assert self.config is not None
        assert self.launcher is not None
        folder = Path(self.config.hydra.sweep.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        asked = AdviseRequest.of(self.config)
        resumes = bool(self.config.hydra.callbacks.sweep.resume)
        resumed = AdviseSettings.read(folder) if resumes else None
        trials = Trials(self.launcher, folder, asked.spec.advise.seconds or 0.0, resumes)
        TrialScheduler(asked, trials, resumed).run()
        return None
