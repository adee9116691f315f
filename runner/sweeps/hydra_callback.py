"""Hydra's callback for sweeps: refuse what cannot work, open the sweep, keep secrets out of files.

Hydra calls it in the command's process before the first job, and in every job's process.
"""

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

import yaml
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from runner.config import resolve
from runner.config.hydra_plugins import ADVISE, ISOLATED
from runner.config.overrides import SWEEP_KEYS, YAML_LOADER, override_texts
from runner.core import (
    ConfigError,
    Mode,
    RunnerError,
    Unavailable,
    files,
    refuse,
    secrets,
    terminal,
)
from runner.sweeps.room import ADVISE_USAGE_MESSAGE

_OPTUNA = "hydra_plugins.hydra_optuna_sweeper."
_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
OWN_LAUNCHERS = (ISOLATED, _BASIC)
"""Launchers that run the jobs on this machine, started by the command itself."""
_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_DIRECTIONS = {"max": "maximize", "min": "minimize"}


class SweepCallback(Callback):
    """Hydra's callback that checks a sweep's config and opens the sweep before its first job.

    The command line ends the sweep when Hydra returns, however the jobs ended: Hydra skips
    on_multirun_end after a failure.

    Args:
        resume: resume the sweep that the folder holds.
        fail_fast: end the sweep at its first failed job; read by the launcher.
        skip_refused: a job whose config is refused, or that this machine lacks what it needs for,
            is no failure as long as another one finishes; of presets.
        least_eps: what an optimizer's eps is raised to in each precision; of presets, read by the
            job.
        verbose: each job prints what a single run does; read by the job.
    """

    def __init__(
        self,
        resume: bool = False,
        fail_fast: bool = False,
        skip_refused: bool = False,
        least_eps: Mapping[str, float] | None = None,
        verbose: bool = False,
    ) -> None:
        self._resume = resume
        self._is_set = {"sweep.fail_fast": fail_fast, "sweep.verbose": verbose}
        self._skip_refused = skip_refused

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a sweep's keys and a precision's unknown keys in a single run, and wrong folders.

        Args:
            config: the run's.

        Raises:
            SystemExit: the run is refused, by the error that is its cause.
        """
        # A job of a sweep is a single run with a number, and has the keys of its sweep.
        if not OmegaConf.is_missing(config.hydra.job, "num"):
            return
        try:
            for key in filter(self._is_set.get, self._is_set):
                raise ConfigError(f"{key} is for sweeps. Type -m, or leave it out.")
            resolve.check_run_keys(config)
            # Before Hydra writes its own files there.
            files.check_links(Path(config.hydra.run.dir))
        except ConfigError as error:
            raise SystemExit(error.exit_status) from error

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Open the sweep.

        Args:
            config: the sweep's; its launcher may be replaced in place.

        Raises:
            SystemExit: the sweep is refused, by the error that is its cause.
        """
        if config.hydra.launcher.get("_target_") == ISOLATED:
            from runner.sweeps.launcher.isolated import prepare_launcher

            # First of all: the fork server imports torch while this process does what follows.
            prepare_launcher()
        from runner.sweeps.sweep import Sweep, sweep_name, swept_counts

        tracking: Any = OmegaConf.to_container(config.tracking, resolve=True)
        if not Mode.named(config.mode).records_sweep(config):
            tracking = {"_target_": "runner.core.record.tracker.NoTracker"}
        overrides = override_texts(config.hydra.overrides.task)
        folder = Path(config.hydra.sweep.dir).absolute()
        try:
            _prepare(config)
            left_out = []
            # The advisor has its own rule for keys that only some precisions have.
            if config.hydra.sweeper.get("_target_") != ADVISE:
                left_out = resolve.omitted_key_pairs(config, _needs_no_emulation)
            # Now, so that the store exists before any job needs it.
            name = sweep_name(config)
            sweep = Sweep(folder, overrides, tracking, self._resume, left_out, name)
            if self._skip_refused:
                sweep.accept_untried_jobs()
            Sweep.current = sweep
            accepted = config.advise
            sweep.update_manifest(tolerance=accepted.tolerance, max_gap=accepted.max_gap)
            own = (config.hydra.launcher.get("_target_"), config.hydra.sweeper.get("_target_"))
            # Hydra's own launcher does not say how many jobs there are.
            if own == (_BASIC, _BASIC_SWEEPER) and not config.hydra.sweeper.params:
                sweep.update_manifest(jobs=prod(swept_counts(overrides).values()), jobs_at_once=1)
            for message in resolve.omitted_key_messages(left_out):
                print(terminal.sanitize(message), flush=True)
        except RunnerError as error:
            # Hydra would turn an Exception of a callback into a warning.
            raise SystemExit(error.exit_status) from error

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Redact secrets in the command and the config that Hydra has written to files.

        Args:
            config: the job's.
        """
        # Hydra's own launcher runs the jobs in the process of the sweep.
        module = sys.modules.get("runner.sweeps.sweep")
        if module and module.Sweep.current:
            module.Sweep.current.begin()
        folder = Path(config.hydra.runtime.output_dir, str(config.hydra.output_subdir))
        for path in [*folder.glob("*"), Path(config.hydra.sweep.dir, "multirun.yaml")]:
            # OmegaConf parses ten times as slowly as libyaml, and only few configs hold a secret.
            # With every value read as text, no secret can be missed.
            texts = yaml.load(path.read_text(), YAML_LOADER) if path.is_file() else None
            if secrets.redact_values(texts) != texts:
                content = OmegaConf.to_container(OmegaConf.load(path))
                redacted = secrets.redact_values(content)
                if redacted != content:
                    files.write_text(path, OmegaConf.to_yaml(OmegaConf.create(redacted)))


def _prepare(config: DictConfig) -> None:
    """Check a sweep's config, and prepare its sweeper and its launcher.

    Raises:
        ConfigError: the command combines what does not go together.
        Unavailable: mode=advise cannot run on this machine.
    """
    resolve.check_command(config, "sweep")
    if config.checkpoint.resume is not None:
        raise ConfigError(
            "checkpoint.resume resumes one run. Leave -m out, or type "
            "sweep.resume=<folder of a sweep>."
        )
    sweeper = str(config.hydra.sweeper.get("_target_"))
    _check_sweep_keys(config)
    if (sweeper == ADVISE) != Mode.named(config.mode).chooses_jobs:
        raise ConfigError(ADVISE_USAGE_MESSAGE)
    if sweeper == ADVISE:
        from runner.sweeps.advisor.schedule import prepare_sweeper

        prepare_sweeper(config)
    if sweeper.startswith(_OPTUNA):
        _prepare_search(config)
    if config.hydra.launcher.get("_target_") not in OWN_LAUNCHERS:
        from runner.sweeps.launcher.remote import prepare_remote

        prepare_remote(config)


def _check_sweep_keys(config: DictConfig) -> None:
    """Raise ConfigError for a key of SWEEP_KEYS that is no boolean, and for a sweep.fail_fast that
    cannot work in this sweep."""
    settings = config.hydra.callbacks.sweep
    for key in SWEEP_KEYS:
        value = settings[key.partition(".")[2]]
        if not isinstance(value, bool):
            raise ConfigError(f"{key}={value}: type true or false.")
    if not settings.fail_fast:
        return
    if Mode.named(config.mode).chooses_jobs:
        raise ConfigError(
            f"sweep.fail_fast=true: in mode={config.mode} a precision that fails is an answer. "
            "Leave it out."
        )
    if config.hydra.launcher.get("_target_") not in OWN_LAUNCHERS:
        choice = config.hydra.runtime.choices.get("hydra/launcher")
        raise ConfigError(
            f"sweep.fail_fast=true works where this command runs the jobs itself, and "
            f"hydra/launcher={choice} hands all of them over at once. Leave it out, or type "
            "launcher=isolated."
        )


def _needs_no_emulation(config: DictConfig) -> bool:
    """Return whether the precision of a job's config runs on this machine's device, which cannot
    emulate it."""
    from runner.config.resolve import resolve_spec
    from runner.core import accelerators, targets

    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    with suppress(ConfigError, Unavailable):
        spec = resolve_spec(own)
        chosen = accelerators.choose_accelerator(spec.accelerator.name, spec.accelerator.index)
        targets.instantiate(spec.precision).require(chosen.device)
        try:
            targets.instantiate({**spec.precision, "emulate": True}).require(chosen.device)
        except Unavailable:
            return True
    return False


def _prepare_search(config: DictConfig) -> None:
    """Set Optuna's direction to the task's, unless the user names one, and silence its warnings.

    Optuna minimises by default, whatever the number is: it would search for the lowest accuracy.

    Args:
        config: the sweep's; changed in place.

    Raises:
        ConfigError: the direction is unknown, or the mode measures nothing.
    """
    if not Mode.named(config.mode).is_recorded:
        raise ConfigError(
            f"hydra/sweeper=optuna has nothing to look for in mode={config.mode}. Leave one of "
            "them out."
        )
    if config.hydra.sweeper.storage is not None:
        raise ConfigError(
            "hydra.sweeper.storage: Optuna 2 cannot keep a study in a database with the SQLAlchemy "
            "that MLflow installs. Leave it out: every job is in MLflow and in the sweep's folder."
        )
    # The plugin's own default is an Enum; what a user gives, on the command line or in a yaml,
    # is text, or a list for several objectives.
    if isinstance(config.hydra.sweeper.direction, Enum):
        # The task of a checkpoint is not read here.
        direction = _task_direction(config) if Mode.named(config.mode).trains else ""
        if direction not in _DIRECTIONS:
            raise ConfigError(
                "Optuna cannot know here whether more or less is better "
                f"(mode={config.mode}, task._target_={config.task.get('_target_')}). Type "
                "hydra.sweeper.direction=maximize or hydra.sweeper.direction=minimize."
            )
        with read_write(config.hydra):
            config.hydra.sweeper.direction = _DIRECTIONS[direction]
    # Optuna would report each failed job as one without a number; the job itself has said why.
    logging.getLogger(_OPTUNA.rstrip(".")).setLevel(logging.CRITICAL)
    # Optuna 2 uses names that SQLAlchemy deprecates.
    with terminal.suppress_warnings():
        import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)


def _task_direction(config: DictConfig) -> str:
    """Return max or min, whichever is better of the quality of a config's task; else empty."""
    from runner.core import targets
    from runner.data.task_target import build_task, task_problems

    own = getattr(targets.locate(str(config.task.get("_target_"))), "direction", None)
    added = [key for key in targets.GROUPS["task"].own_keys if config.task.get(key) is not None]
    if own is not None and not added:
        return str(own)
    task: Any = OmegaConf.to_container(config.task, resolve=True)
    refuse(task_problems(task))
    # A function that returns the task shows its direction only by a call.
    return str(getattr(build_task(task), "direction", ""))
