"""Read a command with mode=advise or mode=gate: its precisions, and the overrides of its trials.

Everything that cannot be compared is refused here, before the first trial.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig, OmegaConf

from runner.config.messages import option_hint
from runner.config.overrides import as_typed, override_texts
from runner.config.resolve import resolve_spec
from runner.core import (
    ConfigError,
    Precision,
    RunResult,
    RunSpec,
    accelerators,
    files,
    fmt,
    layout,
    refuse,
)
from runner.precision.registry import (
    PrecisionSupport,
    load_precision,
    precision_config,
    precision_names,
    supported_precisions,
)
from runner.sweeps.hydra_callback import OWN_LAUNCHERS
from runner.sweeps.manifest import typed_config_dir
from runner.sweeps.report.load import (
    existing_store,
    find_parent_run,
    load_from_folder,
    load_from_store,
    read_settings,
    result_of_run,
    stored_settings,
)
from runner.sweeps.report.sweep_data import Job, JobSettings, flat_config
from runner.sweeps.report.wording import join_names
from runner.sweeps.room import AdviseSpec
from runner.sweeps.sweep_resume import RUNNER_COMMAND
from runner.sweeps.verdict.advise_request import AdviseRequest
from runner.sweeps.verdict.compare import BASELINE

_COMPARED_SECTIONS = ("model", "adapter", "data", "task", "optimizer", "scheduler", "train", "init")
"""Sections of a config that decide what a seed trains."""
_IGNORED_KEYS = (
    *("train.epochs", "train.max_steps", "train.max_seconds", "train.eval_every"),
    *("train.early_stop", "train.log_every", "train.num_workers", "train.data_on_device"),
    *("data.root", "data.path", "data.num_workers"),
)
"""Keys in these sections that change no step, or that the advisor sets."""
_ABSENT_VALUES = ("", "null", "None", "false", "False", "[]", "{}")
"""Values of a key that mean the same as its absence in a config of another version."""
MAX_DIFFERING_KEYS = 5
"""Config keys that the message of a baseline with other settings names."""


def read_recorded_baseline(name: str, spec: RunSpec, judged: Sequence[str]) -> list[RunResult]:
    """Read a run or a sweep as the baseline of a command.

    Args:
        name: folder or MLflow id.
        spec: of the command; the runs must have trained the same but for precision and seed.
        judged: the precisions that are compared with it, whose jobs in a sweep are left out.

    Returns:
        Results of finished runs of one precision and one length, a seed each, with the precision's
        name as their group; one or more.

    Raises:
        ConfigError: there is no such run or sweep, or it is no baseline of this command.
        TrackingError: the store does not answer.
    """
    by_precision = fmt.grouped(
        (job.result.precision, job)
        for job in _read_jobs(name, spec)
        if job.result.outcome == "finished"
    )
    precision = _chosen_precision(name, by_precision, judged)
    jobs = by_precision[precision]
    results = []
    for job in jobs:
        label = f"{precision} seed={job.result.seed}"
        results.append(replace(job.result, settings=[], group=precision, label=label))
    seeds = {result.seed for result in results} - {None}
    if len(seeds) < len(results):
        raise ConfigError(
            f"advise.baseline={name} has several runs of {precision} for one seed, and runs are "
            "compared seed by seed. Name a sweep over seeds alone."
        )
    if any(result.steps < result.planned_steps for result in results):
        raise ConfigError(
            f"advise.baseline={name} has a run that ended before its last step, as with "
            "train.early_stop or train.max_seconds. Name runs that took all their steps."
        )
    lengths = {result.steps for result in results}
    if len(lengths) > 1:
        raise ConfigError(
            f"advise.baseline={name}: its runs have {join_names(map(str, sorted(lengths)))} steps, "
            "and runs of unequal lengths are no baseline. Name a sweep over seeds alone."
        )
    _check_same_settings(name, [job.read_settings() for job in jobs], spec)
    return results


def _read_jobs(name: str, spec: RunSpec) -> Sequence[Job]:
    """Return the results in a folder or in the command's store, with what each ran with."""
    folder = Path(name)
    if files.path_exists(name) and folder.is_dir():
        if (folder / layout.MANIFEST).is_file():
            return load_from_folder(folder).jobs
        try:
            return [Job(RunResult.read(folder), read_settings=partial(read_settings, folder))]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"advise.baseline={name}: the folder holds no finished run and no sweep. Name a "
                "precision, or the folder or MLflow id of a run or a sweep."
            ) from error
    tracking = {f"tracking.{key}": value for key, value in spec.tracking.items() if value}
    try:
        reader = existing_store(name, tracking)
        run = reader.run(name) if name.isalnum() else None
        if run and run.tags.get("role") != "sweep":
            settings = partial(stored_settings, reader, run)
            return [Job(result_of_run(reader, run), read_settings=settings)]
        parent = find_parent_run(reader, name)
    except ConfigError as error:
        raise ConfigError(
            f"advise.baseline={name} is no precision, and neither a folder here nor a run or sweep "
            "of the store. Type python -m runner doctor for the precisions, or tracking.uri=... "
            "for another store."
        ) from error
    return load_from_store(reader, parent).jobs


def _chosen_precision(name: str, distinct: Collection[str], judged: Sequence[str]) -> str:
    """Return the precision of a baseline's runs; of several the one that reports compare with."""
    others = [precision for precision in distinct if precision not in judged]
    if len(others) == 1:
        return others[0]
    if BASELINE in others:
        return BASELINE
    if not distinct:
        raise ConfigError(f"advise.baseline={name}: none of its runs has finished.")
    if not others:
        raise ConfigError(
            f"advise.baseline={name} has runs of {join_names(distinct)} alone, which is what is to "
            "be judged. Name a run or sweep of another precision."
        )
    raise ConfigError(
        f"advise.baseline={name} has runs of {join_names(others)}. Name a run or sweep of one "
        "precision."
    )


def _check_same_settings(name: str, jobs: Sequence[JobSettings], spec: RunSpec) -> None:
    """Refuse runs that trained something else than the command would."""
    own = flat_config(spec.to_yaml())
    differing: dict[str, str] = {}
    for job in jobs:
        if not job.config:
            raise ConfigError(
                f"advise.baseline={name} has a run without its config.yaml: it cannot be known "
                "whether it trained the same. Name a run that has one."
            )
        for key in {**job.config, **own}:
            values = {job.config.get(key, ""), own.get(key, "")}
            is_compared = key.partition(".")[0] in _COMPARED_SECTIONS and key not in _IGNORED_KEYS
            if is_compared and len(values) > 1 and not values.issubset(_ABSENT_VALUES):
                there, here = job.config.get(key, "none"), own.get(key, "none")
                differing.setdefault(key, f"{key} ({there} there, {here} here)")
    if differing:
        texts = [*differing.values()]
        raise ConfigError(
            f"advise.baseline={name} trained with other settings than this command: "
            f"{fmt.first_names(texts, MAX_DIFFERING_KEYS)}. Type the same settings."
        )


_NO_CHECKPOINTS = (
    "checkpoint.final=false",
    "checkpoint.best=false",
    "checkpoint.every_steps=null",
    "checkpoint.safetensors=false",
)
_EMULATE = "precision.emulate"
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
class AdviseCommand:
    """A command with mode=advise or mode=gate: what it asks, and how its trials run.

    Attributes:
        request: without what the first trial measures.
        spec: resolved, with the baseline's precision or the one that was typed.
        device: that trials run on.
        overrides: the user's, without those of precision, seed, mode and advise.
        precisions: to try, the baseline first.
        recorded: results of the run or sweep that advise.baseline names; none for a precision.
        config_dir: the user's configs, among them further precisions; None without --config-dir.
    """

    request: AdviseRequest
    spec: RunSpec
    device: torch.device
    overrides: Sequence[str]
    precisions: Sequence[str]
    recorded: Sequence[RunResult] = ()
    config_dir: Path | None = None

    @classmethod
    def from_config(cls, config: DictConfig) -> "AdviseCommand":
        """Read the config of a sweep with mode=advise.

        Raises:
            ConfigError: the command asks for what cannot be compared.
            Unavailable: the device is not there.
        """
        words = override_texts(config.hydra.overrides.task)
        overrides = OverridesParser.create().parse_overrides([*words])
        _check_command(config, overrides)
        by_key = {o.get_key_element().lstrip("+~"): o for o in overrides}
        extras = {key: o for key, o in by_key.items() if key.startswith("precision.")}
        spec = _baseline_spec(config, extras)
        device = accelerators.choose_accelerator(
            spec.accelerator.name, spec.accelerator.index
        ).device
        config_dir = typed_config_dir(config.hydra)
        typed = _typed_precisions(overrides, precision_names(config_dir), spec.mode)
        # Only those that were typed: to ask the others would import their libraries, for seconds.
        supported = supported_precisions(device, config_dir, typed)
        emulated = _emulatable(supported, extras, config_dir)
        chosen = typed or [*trainable_here(spec, emulated, supported, config_dir)]
        missing = {row.name: row.why for row in supported if row.why and row.name not in chosen}
        # A precision, or else a run or sweep, whose precision it is then.
        asked = spec.section(AdviseSpec)
        baseline = RunSpec.PRECISION_ALIASES.get(asked.baseline, asked.baseline)
        recorded: Sequence[RunResult] = ()
        if baseline not in precision_names(config_dir):
            recorded = read_recorded_baseline(asked.baseline, spec, chosen)
            baseline = recorded[0].precision
        precisions = _with_baseline(chosen, baseline, spec.mode)
        # With mode=gate they belong to the precision that is asked about.
        asked_about = precisions if spec.mode != "gate" else precisions[1:]
        fitting = {}
        for name in asked_about:
            fitting[name] = [*_fitting_extras(name, extras, name in emulated, config_dir)]
        _check_extras(extras, fitting)
        lines = [(o, o.input_line) for o in overrides if o.input_line]
        user = [line for o, line in lines if _group(o) not in _SCHEDULED_GROUPS]
        seed = [line for o, line in lines if o.get_key_element() == "seed"]
        request = AdviseRequest(
            asked.objective,
            asked.tolerance,
            steps=asked.steps or 0,
            seconds=0,
            seeds=asked.seeds,
            budget=asked.budget,
            # Words are shown as typed: the mark of a new key is the program's own.
            command=[*_command_words(config, config_dir), *map(as_typed, user), *seed],
            emulated=[name for name in precisions if name in emulated],
            overrides={name: words for name, words in fitting.items() if words},
            unavailable={} if typed else missing,
            mode="gate" if spec.mode == "gate" else "advise",
            baseline=baseline,
            max_gap=asked.max_gap,
            recorded=[asdict(result) for result in recorded],
            recorded_in=asked.baseline if recorded else "",
        )
        return cls(request, spec, device, user, precisions, recorded, config_dir)

    def trial_seeds(self, count: int) -> list[int]:
        """Return the first seeds of trials: those of a recorded baseline, then further ones."""
        seeds = sorted(result.seed for result in self.recorded if result.seed is not None)
        following = max(seeds, default=self.spec.seed - 1) + 1
        return [*seeds, *range(following, following + count)][:count]

    def recorded_result(self, precision: str, seed: int) -> RunResult | None:
        """Return the recorded result of a trial, None for one that has to run."""
        wanted = (precision, seed)
        found = (each for each in self.recorded if (each.precision, each.seed) == wanted)
        return next(found, None)

    def takes_update_rule(self, name: str) -> bool:
        """Return whether a precision loses updates and has the key update, which was not typed."""
        precision = self.load_precision(name)
        own = self.request.overrides.get(name, ())
        is_typed = any(fmt.override_key(word) == "precision.update" for word in own)
        has_update = "update" in precision_config(name, self.config_dir)
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
        # No model is stored of a trial.
        tracking = ["tracking.log_model=false"] if "log_model" in self.spec.tracking else []
        dropped = _TRIAL_KEYS
        if not is_tracked:
            tracking = ["tracking=none"]
            dropped = (*_TRIAL_KEYS, "tracking")
        user = [word for word in self.overrides if not word.lstrip("+~").startswith(dropped)]
        extra = self.request.overrides.get(precision, ())
        advisor = ["mode=train", f"precision={precision}", *extra, f"seed={seed}", *_NO_CHECKPOINTS]
        # `more` comes last: of two overrides of a key, Hydra takes the last one.
        return [*user, *advisor, *tracking, *more]


def _check_command(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Refuse several values of any key but precision, and launchers that run jobs elsewhere or at
    once: trials are timed against each other."""
    hydra = config.hydra
    if hydra.launcher.get("_target_") not in OWN_LAUNCHERS or hydra.launcher.get("n_jobs", 1) != 1:
        raise ConfigError(
            f"mode={config.mode} times its trials on this machine, one after another. Leave "
            "launcher= and hydra.launcher.n_jobs= out; on a cluster, start the command in a job of "
            "its own."
        )
    for override in overrides:
        key = override.get_key_element()
        if override.is_sweep_override() and key != "precision":
            raise ConfigError(
                f"mode={config.mode} answers for one config, and {override.input_line} names "
                f"several. Type one value of {key}; advise.seeds=5 repeats trials with other seeds."
            )


def _baseline_spec(config: DictConfig, extras: Collection[str]) -> RunSpec:
    """Return the resolved spec without the keys under precision that were typed.

    They may belong to another precision than the baseline.
    """
    run_config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    spec = resolve_spec(run_config)
    precision = {k: v for k, v in spec.precision.items() if f"precision.{k}" not in extras}
    spec = replace(spec, precision=precision)
    refuse(spec.all_problems())
    return spec


def _command_words(config: DictConfig, config_dir: Path | None) -> list[str]:
    """Return the words of a command with the same config folder and config name."""
    words = [*RUNNER_COMMAND]
    if config_dir:
        words += ["--config-dir", os.path.relpath(config_dir)]
    if config.hydra.job.config_name != "config":
        words += ["--config-name", config.hydra.job.config_name]
    return words


def _group(override: Override) -> str:
    """Return the first part of an override's key."""
    return override.get_key_element().lstrip("+~").partition(".")[0].partition("/")[0]


def _typed_precisions(
    overrides: Sequence[Override], known: Sequence[str], mode: str
) -> list[str] | None:
    """Return the names after `precision=`, None where it was not typed.

    Raises:
        ConfigError: one of them is not the name of a precision, or mode=gate has not one of them.
    """
    override = next((o for o in overrides if o.get_key_element() == "precision"), None)
    if not override:
        if mode == "gate":
            raise ConfigError(
                "mode=gate asks about one precision. Type precision=<it>, as in "
                "precision=bf16-true."
            )
        return None
    values = [override.value()]
    if override.is_sweep_override():
        if override.value_type not in (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP):
            raise ConfigError(f"{override.input_line}: name the precisions, one after another.")
        values = [*override.sweep_string_iterator()]
    # Each precision once: an alias and its name may both have been typed.
    names: dict[str, None] = {}
    for value in values:
        # The strings of a sweep keep the quotes that were typed.
        plain = str(value).strip("'\"")
        name = RunSpec.PRECISION_ALIASES.get(plain, plain)
        if name not in known:
            hint = option_hint("precision", name, known)
            raise ConfigError(f"precision={name} is not known.{hint} Allowed: {', '.join(known)}.")
        names[name] = None
    if mode == "gate" and len(names) > 1:
        raise ConfigError(
            f"mode=gate asks about one precision, and precision={','.join(names)} names "
            f"{len(names)}. Type one of them, or mode=advise to compare all."
        )
    return [*names]


def _with_baseline(names: Sequence[str], baseline: str, mode: str) -> list[str]:
    """Return precisions with the baseline first.

    Raises:
        ConfigError: there is none to compare with the baseline.
    """
    precisions = [baseline, *(name for name in names if name != baseline)]
    if len(precisions) > 1:
        return precisions
    if mode == "gate":
        raise ConfigError(
            f"mode=gate compares a precision with the baseline, and precision={baseline} is it. "
            "Type another precision, or another advise.baseline."
        )
    raise ConfigError(
        f"mode=advise compares precisions with {baseline}, and was given no other. Leave "
        "precision= out to try all that this machine has, or name some: "
        "precision=bf16-mixed,16-mixed."
    )


def _check_extras(extras: Mapping[str, Override], fitting: Mapping[str, Sequence[str]]) -> None:
    """Refuse keys under precision that no precision takes."""
    used = {word.partition("=")[0] for words in fitting.values() for word in words}
    # Checked before other keys: precisions have it, and it is unused as long as none is emulated.
    if _EMULATE in {*extras} - used:
        raise ConfigError(
            "precision.emulate=true: this machine lacks none of "
            f"{', '.join(fitting)} that could be emulated. Leave it out."
        )
    unused = [key for key in extras if key not in used]
    if unused:
        raise ConfigError(
            f"{unused[0]}: none of {', '.join(fitting)} has such a key. Leave it out, or name the "
            "precisions that it is for."
        )


def _emulatable(
    supported: Sequence[PrecisionSupport], extras: dict[str, Override], config_dir: Path | None
) -> list[str]:
    """Return precisions that this machine lacks and emulates, if precision.emulate=true was typed.

    Args:
        supported: what this machine has and lacks.
        extras: overrides of keys under precision; precision.emulate=false, which is every
            precision's default, is removed.

    Raises:
        ConfigError: precision.emulate is neither true nor false.
    """
    if _EMULATE not in extras:
        return []
    value = extras[_EMULATE].value()
    if not isinstance(value, bool):
        raise ConfigError(f"precision.emulate={value} is not known. Allowed: true, false.")
    if not value:
        del extras[_EMULATE]
        return []
    # A reason (`why`) stands only in the rows of precisions that this machine lacks.
    lacking = [row.name for row in supported if row.why]
    return [name for name in lacking if "emulate" in precision_config(name, config_dir)]


def trainable_here(
    spec: RunSpec,
    emulated: Collection[str],
    supported: Sequence[PrecisionSupport],
    config_dir: Path | None,
) -> Iterator[str]:
    """Yield the precisions that this device has or emulates, and that are worth a trial."""
    has_adapter = bool(spec.adapter.get("_target_"))
    for row in supported:
        if not row.runs and row.name not in emulated:
            continue
        precision = load_precision(row.name, config_dir)
        # Frozen 4-bit and 8-bit weights train nothing without an adapter.
        trains_nothing = precision.freezes and not has_adapter
        # float64 costs time and memory, and can only win on quality.
        is_float64 = precision.storage is torch.float64
        cannot_win = is_float64 and spec.section(AdviseSpec).objective != "quality"
        # Weights for a later packing (trains_for) cost time and quality now.
        if not (trains_nothing or cannot_win or precision.trains_for):
            yield row.name


def _fitting_extras(
    name: str, extras: Mapping[str, Override], is_emulated: bool, config_dir: Path | None
) -> Iterator[str]:
    """Yield the overrides of keys that a precision has; what runs here is not emulated."""
    for key, override in extras.items():
        has_key = key.split(".")[1] in precision_config(name, config_dir)
        if has_key and (is_emulated or key != _EMULATE):
            assert override.input_line is not None
            # Once precision=<name> is chosen, the key exists: Hydra refuses `+` for it.
            yield override.input_line.lstrip("+")
