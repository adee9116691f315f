"""The Hydra callback that opens a sweep's parent run."""

import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from runner.errors import RunnerError


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
        folder = Path(config.hydra.sweep.dir).absolute()
        try:
            Sweep.begin(folder, overrides, tracking)  # type: ignore[arg-type]
        except RunnerError as error:  # Hydra turns a callback's Exception into a warning
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(error.exit_status) from error
