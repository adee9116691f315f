"""Read a command with mode=advise or mode=gate: its precisions, and the overrides of its trials.

Everything that cannot be compared is refused here, before the first trial.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from runner.config.hydra_plugins import ISOLATED, REMOTE
from runner.config.invocation import override_texts
from runner.config.resolve import resolve_spec
from runner.config.schema import RunSpec
from runner.config.targets import check_targets, loading_problems
from runner.data.task_target import task_problems
from runner.modes.result import RunResult
from runner.precision.contract import Precision
from runner.precision.registry import (
    load_precision,
    precision_names,
    supported_precisions,
)
from runner.sweeps.advisor.precision_choice import (
    check_extras,
    check_gate,
    emulatable,
    fitting_extras,
    has_key,
    missing_precisions,
    read_baseline,
    trainable_here,
    typed_precisions,
    with_baseline,
)
from runner.sweeps.advisor.recorded_baseline import RecordedBaseline
from runner.utils.accelerator import choose_accelerator
from runner.utils.errors import ConfigError

_NO_CHECKPOINTS = (
    "checkpoint.final=false",
    "checkpoint.best=false",
    "checkpoint.every_steps=null",
    "checkpoint.safetensors=false",
)
_SCHEDULED_GROUPS = ("mode", "precision", "seed", "advise", "hydra")
"""Keys and groups that the advisor sets for every trial."""
_TRIAL_KEYS = (
    "train.max_steps",
    "train.max_seconds",
    "train.eval_every",
    "train.early_stop",
    "checkpoint",
    "tracking.log_model",
    "numerics",
)
"""Keys that a trial sets itself; the recommended command keeps the user's values."""


@dataclass(frozen=True)
class AdviseRequest:
    """The parts of a command with mode=advise or mode=gate.

    Attributes:
        spec: resolved, with the baseline's precision or the one that was typed.
        device: that trials run on.
        overrides: the user's, without those of precision, seed, mode and advise.
        seed_override: the override of the seed, if one was typed.
        command: words of a command that come before its overrides.
        precisions: to try, the baseline first.
        recorded: the run or sweep that advise.baseline names; None for a precision.
        precision_overrides: further overrides of each precision.
        emulated_precisions: precisions that this machine emulates.
        missing_precisions: precisions that this machine lacks, with the reason.
        seed: the first one.
        config_dir: the user's configs, among them further precisions; None without --config-dir.
    """

    spec: RunSpec
    device: torch.device
    overrides: Sequence[str]
    seed_override: Sequence[str]
    command: Sequence[str]
    precisions: Sequence[str]
    precision_overrides: Mapping[str, Sequence[str]]
    emulated_precisions: Sequence[str]
    missing_precisions: Mapping[str, str]
    seed: int
    config_dir: Path | None = None
    recorded: RecordedBaseline | None = None

    @property
    def baseline(self) -> str:
        """Return the precision that others are compared with."""
        return self.precisions[0]

    @property
    def is_gate(self) -> bool:
        """Return whether the command asks about one precision."""
        return self.spec.mode == "gate"

    @classmethod
    def from_config(cls, config: DictConfig) -> "AdviseRequest":
        """Read the config of a sweep with mode=advise.

        Raises:
            ConfigError: the command asks for what cannot be compared.
            Unavailable: the device is not there.
        """
        _check_launcher(config)
        overrides = _parse(override_texts(config.hydra.overrides.task))
        _check_sweeps(overrides, f"mode={config.mode}")
        extras = _precision_extras(overrides)
        spec = _baseline_spec(config, extras)
        device = choose_accelerator(spec.accelerator.name, spec.accelerator.index).device
        config_dir = _config_dir(config)
        typed = typed_precisions(overrides, precision_names(config_dir))
        if spec.mode == "gate":
            check_gate(typed)
        # Only those that were typed: to ask the others would import their libraries, for seconds.
        supported = supported_precisions(device, config_dir, typed)
        emulated = emulatable(supported, extras, config_dir)
        chosen = typed or [*trainable_here(spec, emulated, supported, config_dir)]
        baseline, recorded = read_baseline(spec, chosen, config_dir)
        precisions = with_baseline(chosen, baseline, spec.mode)
        fitting = {}
        for name in precisions:
            fitting[name] = [*fitting_extras(name, extras, name in emulated, config_dir)]
        if spec.mode == "gate":
            # They belong to the precision that is asked about.
            fitting[baseline] = []
        check_extras(extras, fitting)
        return cls(
            spec=spec,
            device=device,
            overrides=_input_lines(overrides, lambda o: _group(o) not in _SCHEDULED_GROUPS),
            seed_override=_input_lines(overrides, lambda o: o.get_key_element() == "seed"),
            command=_command_words(config),
            precisions=precisions,
            precision_overrides=fitting,
            emulated_precisions=[name for name in precisions if name in emulated],
            missing_precisions={} if typed else missing_precisions(supported, chosen),
            seed=spec.seed,
            config_dir=config_dir,
            recorded=recorded,
        )

    def trial_seeds(self, count: int) -> list[int]:
        """Return the first seeds of trials: those of a recorded baseline, then further ones."""
        recorded = self.recorded.results if self.recorded else ()
        seeds = sorted(result.seed for result in recorded if result.seed is not None)
        following = max(seeds, default=self.seed - 1) + 1
        return [*seeds, *range(following, following + count)][:count]

    def recorded_result(self, precision: str, seed: int) -> RunResult | None:
        """Return the recorded result of a trial, None for one that has to run."""
        if self.recorded is None or precision != self.recorded.precision:
            return None
        return next((one for one in self.recorded.results if one.seed == seed), None)

    def takes_update_rule(self, name: str) -> bool:
        """Return whether a precision loses updates and has the key update, which was not typed."""
        precision = self.load_precision(name)
        is_typed = any("precision.update=" in word for word in self.precision_overrides[name])
        has_update = has_key(name, "update", self.config_dir)
        return precision.loses_updates and has_update and not is_typed

    def load_precision(self, name: str) -> Precision:
        """Return one of the precisions, built-in or the user's, as its yaml says."""
        return load_precision(name, self.config_dir)

    def trial_overrides(
        self, precision: str, seed: int, *more: str, is_tracked: bool = True
    ) -> list[str]:
        """Return the overrides of one trial.

        Args:
            precision: its name.
            seed: the trial's.
            more: further overrides.
            is_tracked: whether the sweep's store records the trial.
        """
        dropped = _TRIAL_KEYS if is_tracked else (*_TRIAL_KEYS, "tracking")
        user = [word for word in self.overrides if not word.lstrip("+~").startswith(dropped)]
        extra = self.precision_overrides.get(precision, ())
        advisor = ["mode=train", f"precision={precision}", *extra, f"seed={seed}", *_NO_CHECKPOINTS]
        tracking = []
        if not is_tracked:
            tracking = ["tracking=none"]
        elif "log_model" in self.spec.tracking:
            # No model is stored of a trial.
            tracking = ["tracking.log_model=false"]
        # `more` comes last: of two overrides of a key, Hydra takes the last one.
        return [*user, *advisor, *tracking, *more]


def _check_launcher(config: DictConfig) -> None:
    """Refuse launchers that run jobs elsewhere or at once: trials are timed against each other."""
    hydra = config.hydra
    launcher = str(hydra.launcher.get("_target_"))
    # The isolated launcher has a path in hydra_plugins, too.
    is_plugin = "hydra_plugins." in launcher.replace(ISOLATED, "")
    if launcher == REMOTE or is_plugin or hydra.launcher.get("n_jobs", 1) != 1:
        raise ConfigError(
            f"mode={config.mode} times its trials on this machine, one after another. Leave "
            "launcher= and hydra.launcher.n_jobs= out; on a cluster, start the command in a job of "
            "its own."
        )
    # Trials are found again by the numbers of their folders.
    if str(OmegaConf.to_container(hydra.sweep)["subdir"]) != "${hydra.job.num}":  # type: ignore[index]
        raise ConfigError(
            f"mode={config.mode} names its jobs' folders itself. Leave hydra.sweep.subdir= out."
        )


def _baseline_spec(config: DictConfig, extras: Collection[str]) -> RunSpec:
    """Return the resolved spec without the keys under precision that were typed.

    They may belong to another precision than the baseline.
    """
    run_config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    spec = resolve_spec(run_config)
    precision = {k: v for k, v in spec.precision.items() if f"precision.{k}" not in extras}
    spec = replace(spec, precision=precision)
    problems = [*spec.problems(), *check_targets(spec), *loading_problems(spec.data)]
    problems += task_problems(spec.task)
    if problems:
        raise ConfigError(*problems)
    return spec


def _command_words(config: DictConfig) -> list[str]:
    """Return the words of a command with the same config folder and config name."""
    words = ["python", "-m", "runner"]
    config_dir = _config_dir(config)
    if config_dir is not None:
        words += ["--config-dir", os.path.relpath(config_dir)]
    if config.hydra.job.config_name != "config":
        words += ["--config-name", config.hydra.job.config_name]
    return words


def _config_dir(config: DictConfig) -> Path | None:
    """Return the folder that --config-dir names; None without one."""
    sources = config.hydra.runtime.config_sources
    folders = [Path(s.path) for s in sources if s.provider == "command-line"]
    return folders[0] if folders else None


def _parse(words: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides([*words])


def _input_lines(overrides: Sequence[Override], is_wanted: Callable[[Override], bool]) -> list[str]:
    """Return overrides as they were typed."""
    return [o.input_line for o in overrides if is_wanted(o) and o.input_line]


def _group(override: Override) -> str:
    """Return the first part of an override's key."""
    return override.get_key_element().lstrip("+~").partition(".")[0].partition("/")[0]


def _precision_extras(overrides: Sequence[Override]) -> dict[str, Override]:
    """Return the overrides of keys under precision, by key."""
    by_key = {o.get_key_element().lstrip("+~"): o for o in overrides}
    return {key: o for key, o in by_key.items() if key.startswith("precision.")}


def _check_sweeps(overrides: Sequence[Override], mode: str) -> None:
    """Refuse several values of any key but precision."""
    swept = [o for o in overrides if o.is_sweep_override() and o.get_key_element() != "precision"]
    if swept:
        key = swept[0].get_key_element()
        raise ConfigError(
            f"{mode} answers for one config, and {swept[0].input_line} names several. Type "
            f"one value of {key}; advise.seeds=5 repeats trials with other seeds."
        )
