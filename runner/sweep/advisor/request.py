"""What a command with mode=advise asks for: its precisions, and the words of every trial."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig, OmegaConf

from runner.config.hydra_plugins import ISOLATED, REMOTE
from runner.config.overrides import PRECISION_ALIASES
from runner.config.resolve import resolve
from runner.config.schema import RunSpec
from runner.config.targets import check_targets
from runner.precision.precision import Precision
from runner.precision.registry import (
    CONF,
    PrecisionSupport,
    load_precision,
    precision_names,
    supported_precisions,
)
from runner.sweep.report.compare import BASE
from runner.utils.accelerator import choose_accelerator
from runner.utils.errors import ConfigError

_NOTHING_KEPT = (
    "checkpoint.final=false",
    "checkpoint.best=false",
    "checkpoint.every_steps=null",
    "checkpoint.safetensors=false",
)
_OURS = ("mode", "precision", "seed", "advise", "hydra")
_RIVALS = (
    "train.max_steps",
    "train.max_seconds",
    "train.eval_every",
    "train.early_stop",
    "checkpoint",
    "tracking.log_model",
    "numerics",
)
"""Keys that a trial sets itself; a command that recommends keeps the user's."""


@dataclass(frozen=True)
class AdviseRequest:
    """A command, taken apart.

    Attributes:
        spec: resolved, with the baseline's precision or the one that was typed.
        words: the user's, without precision, seed, mode and advise.
        seeded: the seed as it was typed, if it was.
        command: words of a command before them.
        precisions: to try, the baseline first.
        own: further words of a precision.
        emulated: precisions whose arithmetic is imitated.
        absent: precisions that this machine lacks, as `tf32: why`.
        seed: the first one.
    """

    spec: RunSpec
    words: Sequence[str]
    seeded: Sequence[str]
    command: Sequence[str]
    precisions: Sequence[str]
    own: Mapping[str, Sequence[str]]
    emulated: Sequence[str]
    absent: Sequence[str]
    seed: int

    @classmethod
    def of(cls, config: DictConfig) -> "AdviseRequest":
        """Raises ConfigError and Unavailable for what cannot be compared."""
        _refuse_elsewhere(config)
        typed = _parsed([str(text) for text in config.hydra.overrides.task])
        _refuse_sweeps(typed)
        keys = {o.get_key_element().lstrip("+~"): o for o in typed}
        extras = {k: o for k, o in keys.items() if k.startswith("precision.")}
        spec = _spec(config, extras)
        rows = supported_precisions(
            choose_accelerator(spec.accelerator.name, spec.accelerator.index).device
        )
        named = next((_names(o) for o in typed if o.get_key_element() == "precision"), None)
        if unknown := [name for name in named or () if name not in precision_names()]:
            raise ConfigError(
                f"precision={unknown[0]}: mode=advise does not know it. Allowed: "
                f"{', '.join(precision_names())}."
            )
        imitated = _imitated(extras)
        emulated = [s.name for s in rows if s.why and imitated and _takes(s.name, "emulate")]
        chosen = named or [*_here(spec, emulated, rows)]
        precisions = [BASE, *(name for name in chosen if name != BASE)]
        if len(precisions) == 1:
            raise ConfigError(
                f"mode=advise compares precisions with {BASE}, and was given no other. Leave "
                "precision= out to try all that this machine has, or name some: "
                "precision=bf16-mixed,16-mixed."
            )
        fitting = {name: [*_fitting(name, extras, name in emulated)] for name in precisions}
        _refuse_alien(extras, fitting)
        emulated = [name for name in precisions if name in emulated]
        absent = [
            f"{s.name}: {s.why}" for s in rows if s.why and not named and s.name not in chosen
        ]
        words = [o.input_line for o in typed if _head(o) not in _OURS and o.input_line]
        seeded = [o.input_line for o in typed if o.get_key_element() == "seed" and o.input_line]
        return cls(
            spec, words, seeded, _command(config), precisions, fitting, emulated, absent, spec.seed
        )

    def trial(self, precision: str, seed: int, *more: str) -> list[str]:
        """Overrides of one job."""
        return [*self._kept(_RIVALS), *self._one(precision, seed), *self._unkept(), *more]

    def look(self, precision: str, seed: int, *more: str) -> list[str]:
        """The same of a job that nothing records."""
        kept = self._kept((*_RIVALS, "tracking"))
        return [*kept, *self._one(precision, seed), "tracking=none", *more]

    def _kept(self, without: tuple[str, ...]) -> list[str]:
        return [word for word in self.words if not word.lstrip("+~").startswith(without)]

    def _one(self, precision: str, seed: int) -> list[str]:
        own = self.own.get(precision, ())
        return ["mode=train", f"precision={precision}", *own, f"seed={seed}", *_NOTHING_KEPT]

    def _unkept(self) -> list[str]:
        """No model is stored of a trial."""
        return ["tracking.log_model=false"] if "log_model" in self.spec.tracking else []


def _refuse_elsewhere(config: DictConfig) -> None:
    """Trials are timed against each other: one after another, on this machine."""
    hydra = config.hydra
    launcher, count = str(hydra.launcher.get("_target_")), hydra.launcher.get("n_jobs", 1)
    if launcher == REMOTE or "hydra_plugins." in launcher.replace(ISOLATED, "") or count != 1:
        raise ConfigError(
            "mode=advise times its trials on this machine, one after another. Leave launcher= and "
            "hydra.launcher.n_jobs= out; on a cluster, start the command in a job of its own."
        )
    if str(OmegaConf.to_container(hydra.sweep)["subdir"]) != "${hydra.job.num}":  # type: ignore[index]
        raise ConfigError(
            "mode=advise names its jobs' folders itself. Leave hydra.sweep.subdir= out."
        )


def _spec(config: DictConfig, extras: Collection[str]) -> RunSpec:
    """Of the baseline, which has no use for the keys of other precisions."""
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    spec = resolve(own)
    kept = {k: v for k, v in spec.precision.items() if f"precision.{k}" not in extras}
    spec = replace(spec, precision=kept)
    if problems := [*spec.problems(), *check_targets(spec)]:
        raise ConfigError(*problems)
    return spec


def _command(config: DictConfig) -> list[str]:
    sources = config.hydra.runtime.config_sources
    mine = [os.path.relpath(s.path) for s in sources if s.provider == "command-line"]
    named = [] if (name := config.hydra.job.config_name) == "config" else ["--config-name", name]
    return ["python", "-m", "runner", *(["--config-dir", *mine] if mine else []), *named]


def _parsed(words: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides([*words])


def _head(override: Override) -> str:
    return override.get_key_element().lstrip("+~").partition(".")[0].partition("/")[0]


def _names(override: Override) -> list[str]:
    listed = (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP)
    if override.is_sweep_override() and override.value_type not in listed:
        raise ConfigError(f"{override.input_line}: name the precisions, one after another.")
    found = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
    bare = (str(name).strip("'\"") for name in found)
    return list(dict.fromkeys(PRECISION_ALIASES.get(name, name) for name in bare))


def _refuse_sweeps(typed: Sequence[Override]) -> None:
    several = [o for o in typed if o.is_sweep_override() and o.get_key_element() != "precision"]
    if several:
        key = several[0].get_key_element()
        raise ConfigError(
            f"mode=advise answers for one config, and {several[0].input_line} names several. Type "
            f"one value of {key}; advise.seeds=5 repeats trials with other seeds."
        )


def _refuse_alien(extras: Mapping[str, Override], fitting: Mapping[str, Sequence[str]]) -> None:
    used = {word.partition("=")[0] for words in fitting.values() for word in words}
    if "precision.emulate" in {*extras} - used:
        raise ConfigError(
            "precision.emulate=true: this machine lacks none of "
            f"{', '.join(fitting)} that could be emulated. Leave it out."
        )
    if alien := [key for key in extras if key not in used]:
        raise ConfigError(
            f"{alien[0]}: none of {', '.join(fitting)} has such a key. Leave it out, or name the "
            "precisions that it is for."
        )


def _imitated(extras: dict[str, Override]) -> bool:
    """Whether what is missing is to be emulated; to say that it is not says nothing."""
    if "precision.emulate" not in extras:
        return False
    wanted = extras["precision.emulate"]
    if not isinstance(wanted.value(), bool):
        raise ConfigError(f"precision.emulate={wanted.value()} is not known. Allowed: true, false.")
    if not wanted.value():
        del extras["precision.emulate"]
    return bool(wanted.value())


def _here(
    spec: RunSpec, emulated: Collection[str], rows: Sequence[PrecisionSupport]
) -> Iterator[str]:
    """Precisions that this device has or that are emulated, and that train this config: float64
    only where the best quality is looked for, frozen 4-bit and 8-bit weights only beside an
    adapter."""
    adapts = bool(spec.adapter.get("_target_"))
    for row in rows:
        precision: Precision = load_precision(row.name)
        useless = (precision.freezes and not adapts) or (
            precision.storage is torch.float64 and spec.advise.objective != "quality"
        )
        if not useless and (row.runs or row.name in emulated):
            yield row.name


def _takes(name: str, key: str) -> bool:
    return key in OmegaConf.load(CONF / f"{name}.yaml")


def _fitting(name: str, extras: Mapping[str, Override], emulated: bool) -> Iterator[str]:
    """Of the keys under precision, those that this one has; what runs is not emulated."""
    for key, override in extras.items():
        if _takes(name, key.split(".")[1]) and (emulated or key != "precision.emulate"):
            assert override.input_line is not None
            yield override.input_line.lstrip("+")
