"""The Hydra callback that opens a sweep's parent run."""

import logging
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from runner.config.hydra_plugins import ADVISE, ISOLATED
from runner.config.precision_keys import keys_left_out, left_out_messages
from runner.config.schema_advise import LONE_ADVICE
from runner.utils.errors import ConfigError, RunnerError, Unavailable
from runner.utils.quiet_import import quiet_imports
from runner.utils.secrets import redact_values
from runner.utils.terminal import print_error, sanitize

_OPTUNA = "hydra_plugins.hydra_optuna_sweeper."
_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_DIRECTIONS = {"max": "maximize", "min": "minimize"}


class SweepCallback(Callback):
    """The command line ends the sweep when Hydra returns, however the jobs ended: Hydra itself
    skips on_multirun_end after a failure.

    Args:
        resume: go on with the sweep whose folder this is.
    """

    def __init__(self, resume: bool = False) -> None:
        self._resume = resume

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        launcher = config.hydra.launcher.get("_target_")
        if launcher == ISOLATED:
            from runner.sweep.launcher.isolated import prepare_launcher

            prepare_launcher()
        from runner.sweep.sweep import Sweep

        tracking = OmegaConf.to_container(config.tracking, resolve=True)
        assert isinstance(tracking, dict)
        if config.mode == "plan":
            tracking = {"_target_": "runner.tracking.tracker.NoTracker"}
        overrides = [str(text) for text in config.hydra.overrides.task]
        folder = Path(config.hydra.sweep.dir).absolute()
        try:
            if config.checkpoint.resume is not None:
                raise ConfigError(
                    "checkpoint.resume goes on with one run. Leave -m out, or type "
                    "sweep.resume=<folder of a sweep>."
                )
            sweeper = str(config.hydra.sweeper.get("_target_"))
            if (sweeper == ADVISE) != (config.mode == "advise"):
                raise ConfigError(LONE_ADVICE)
            if sweeper == ADVISE:
                from runner.sweep.advisor import sweeper as advisor

                advisor.prepare_sweeper(config)
            if sweeper.startswith(_OPTUNA):
                prepare_search(config)
            if launcher not in (ISOLATED, _BASIC):
                from runner.sweep.launcher import remote

                remote.prepare_remote(config)
            pairs = [] if sweeper == ADVISE else keys_left_out(config, _runs_as_it_is)
            Sweep.begin(folder, overrides, tracking, self._resume, pairs)  # type: ignore[arg-type]
            for message in left_out_messages(pairs):
                print(sanitize(message), flush=True)
        except RunnerError as error:  # Hydra turns a callback's Exception into a warning
            print_error(str(error))
            raise SystemExit(error.exit_status) from error

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra has written the command and the config; secrets have no place there."""
        kept = [*Path(config.hydra.runtime.output_dir, str(config.hydra.output_subdir)).glob("*")]
        for path in [*kept, Path(config.hydra.sweep.dir, "multirun.yaml")]:
            if path.is_file():
                content = OmegaConf.to_container(OmegaConf.load(path))
                if (hidden := redact_values(content)) != content:
                    path.write_text(OmegaConf.to_yaml(OmegaConf.create(hidden)))


def _runs_as_it_is(config: DictConfig) -> bool:
    """Return whether the precision of a job's config runs on this machine's device, which cannot
    emulate it."""
    from runner.config.resolve import resolve
    from runner.config.targets import instantiate
    from runner.utils.accelerator import choose_accelerator

    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    with suppress(ConfigError, Unavailable):
        spec = resolve(own)
        device = choose_accelerator(spec.accelerator.name, spec.accelerator.index).device
        instantiate(spec.precision).require(device)
        try:
            instantiate({**spec.precision, "emulate": True}).require(device)
        except Unavailable:
            return True
    return False


def prepare_search(config: DictConfig) -> None:
    """Has Optuna look in the task's direction unless the user names one: it minimises by default,
    whatever the number is, and would look for the lowest accuracy.

    Raises:
        ConfigError: the direction cannot be known, or there is nothing to look for.
    """
    if config.mode == "plan":
        raise ConfigError(
            "hydra/sweeper=optuna has nothing to look for in mode=plan. Leave one of them out."
        )
    if config.hydra.sweeper.storage is not None:
        raise ConfigError(
            "hydra.sweeper.storage: Optuna 2 cannot keep a study in a database with the SQLAlchemy "
            "that MLflow installs. Leave it out: every job is in MLflow and in the sweep's folder."
        )
    # The plugin's own default is an Enum; what a user gives, on the command line or in a yaml,
    # is text, or a list for several objectives.
    if isinstance(config.hydra.sweeper.direction, Enum):
        with read_write(config):
            config.hydra.sweeper.direction = _direction(config)
    # It would say that each failed job gave no number; the job itself has said why.
    logging.getLogger(_OPTUNA.rstrip(".")).setLevel(logging.CRITICAL)
    with quiet_imports():  # it calls what SQLAlchemy has moved elsewhere
        import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)


def _direction(config: DictConfig) -> str:
    """The direction of the chosen task's quality; the task of a checkpoint is not known here."""
    from runner.config.targets import locate

    known = None
    if config.mode == "train":
        target = locate(str(config.task.get("_target_")))
        known = _DIRECTIONS.get(str(getattr(target, "direction", None)))
    if known is None:
        raise ConfigError(
            f"Optuna cannot tell here whether more or less is better (mode={config.mode}, "
            f"task._target_={config.task.get('_target_')}). Type hydra.sweeper.direction=maximize "
            "or hydra.sweeper.direction=minimize."
        )
    return known
