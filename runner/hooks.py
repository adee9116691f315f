"""The Hydra callback that opens a sweep's parent run."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf


class SweepCallback(Callback):
    """The command line ends the sweep when Hydra returns, however the jobs ended: Hydra itself
    skips on_multirun_end after a failure."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        from runner.sweep import Sweep

        tracking = OmegaConf.to_container(config.tracking, resolve=True)
        assert isinstance(tracking, dict)
        if config.mode == "plan":
            tracking = {"_target_": "runner.tracking.none.NoTracker"}
        overrides = [str(text) for text in config.hydra.overrides.task]
        Sweep.begin(Path(config.hydra.sweep.dir).absolute(), overrides, tracking)  # type: ignore[arg-type]
