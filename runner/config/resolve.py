"""Turn Hydra's composed config into a frozen RunSpec, and a RunSpec into plain containers.

Before it is resolved, the keys under `precision` that its precision lacks are refused or removed.
The schema takes every key there: jobs of a sweep run without those that their precision lacks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields, make_dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.config.hydra_plugins import REMOTE, register_plugins
from runner.config.messages import explain, has_key, precisions_with_key, unknown_key
from runner.config.overrides import override_texts
from runner.core import ConfigError, Room, RunSpec, fmt, layout, refuse


@cache
def register_schema() -> None:
    """Store RunSpec as Hydra's schema, and our plugins' configs, once in a process."""
    ConfigStore.instance().store(name="schema", node=_schema(), provider="runner")
    register_plugins()


@cache
def _schema() -> DictConfig:
    """Return RunSpec as a config that others can be merged into; a merge copies it."""
    # OmegaConf makes a frozen dataclass a read-only config. The spec that is made from the merged
    # config is frozen all the same.
    schema = OmegaConf.structured(_config_class())
    _clear_readonly(schema)
    # Hydra takes any key there, also one that the precision lacks: config/resolve.py judges.
    OmegaConf.set_struct(schema.precision, False)
    return schema


@cache
def _config_class() -> type:
    """Return the class of a config: the fields of RunSpec, and the sections of rooms in the place
    of its `sections`."""
    own = [(part.name, part.type, part) for part in fields(RunSpec) if part.name != "sections"]
    added = []
    for key, kind in Room.all_sections().items():
        default = None if isinstance(kind, str) else field(default_factory=kind)
        added.append((key, kind if default else str | None, default))
    return make_dataclass("Config", [*own, *added])


def _clear_readonly(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _clear_readonly(child)


def resolve_spec(config: DictConfig, allow_unresolved: bool = False) -> RunSpec:
    """Return the frozen spec of a composed config, with its interpolations resolved.

    Args:
        config: composed.
        allow_unresolved: leave a group empty if its interpolations do not resolve or a value is
            missing; values of a checkpoint will be merged into it.

    Raises:
        ConfigError: a value is missing (`???`) or does not fit its type.
    """
    # OmegaConf.missing_keys raises an error for an interpolation of a missing value.
    values = OmegaConf.to_container(config)
    missing = sorted(key for key, value in fmt.leaves(values) if value == "???")
    if not allow_unresolved:
        refuse(f"{key} has no value. Type {key}=<value>." for key in missing)
    # Without the schema's types: the merge below names a key whose value does not fit.
    untyped: Any = OmegaConf.create(values)
    OmegaConf.copy_cache(config, untyped)  # one time for each ${now:}
    try:
        if allow_unresolved:
            assert isinstance(values, dict)
            whole = partial(OmegaConf.to_container, resolve=True, throw_on_missing=True)
            for key, value in values.items():
                if isinstance(value, Mapping):
                    values[key] = {}
                    with suppress(OmegaConfBaseException):
                        values[key] = whole(untyped[key])
        else:
            values = OmegaConf.to_container(untyped, resolve=True)
        made = OmegaConf.to_object(OmegaConf.merge(_schema(), values))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, ())) from error
    parts = dict(vars(made))
    own = {key: parts.pop(key) for key in Room.all_sections()}
    return RunSpec(**parts, sections=own)


def folder_problems(hydra: DictConfig, kind: Literal["run", "sweep"]) -> Iterator[str]:
    """Yield why the folder that Hydra's own keys name is none for a run or a sweep.

    Args:
        hydra: Hydra's part of a composed config.
        kind: of the command; the other kind's folder, which a yaml may name, is not written to.
    """
    if hydra.job.chdir:
        # Relative paths, those of the data too, are read from the folder of the command.
        yield "hydra.job.chdir=true gives each run a store of its own. Leave hydra.job.chdir out."
    subfolder = OmegaConf.to_container(hydra.sweep)["subdir"]  # type: ignore[index]
    if subfolder != "${hydra.job.num}":
        # A sweep finds its jobs again by their numbers; its table names their settings.
        yield f"hydra.sweep.subdir={subfolder}: numbers name jobs. Leave hydra.sweep.subdir= out."
    folder = Path(hydra[kind].dir)
    if not hydra[kind].dir.strip():
        yield f"hydra.{kind}.dir= is empty. Type hydra.{kind}.dir=<folder>, or leave it out."
    elif kind == "run":
        if any((place / layout.MANIFEST).exists() for place in (folder, folder.parent)):
            yield f"hydra.run.dir={folder} is a folder of a sweep and its jobs. Type another one."
    else:
        is_used = any(
            path.name.isdecimal() or path.name == layout.RESULT for path in folder.glob("*")
        )
        if is_used and not hydra.callbacks.sweep.resume:
            yield (
                f"hydra.sweep.dir={folder} holds another sweep, or a run. Type another folder, or "
                f"sweep.resume={folder} to continue that sweep."
            )


KEY_PREFIX = "precision."
# Groups whose options replace each other.
_NODE_GROUPS = ("precision", "model", "data", "task", "optimizer", "scheduler", "accelerator")
_EMULATE = "precision.emulate"
_PRECISION_GROUPS = ("precision", "experiment")
"""Groups whose options decide a job's precision."""


def check_run_keys(config: DictConfig) -> None:
    """Check a single run's command, and that its precision has the keys typed without a plus.

    Args:
        config: the run's, with Hydra's own part.

    Raises:
        ConfigError: the precision lacks a key, or as check_command.
    """
    check_command(config, "run")
    overrides = _parse(override_texts(config.hydra.overrides.task))
    typed = [override for override in overrides if override.type is OverrideType.CHANGE]
    _lacking_keys(config, overrides, _by_key(typed))


def check_command(config: DictConfig, kind: Literal["run", "sweep"]) -> None:
    """Check the folder of a run or sweep, and that each value that is typed of a key has a run.

    Args:
        config: with Hydra's own part.
        kind: of the command.

    Raises:
        ConfigError: the folder is none for this kind, a key has several values in one run, or a
            list of values is empty or holds one of them twice.
    """
    refuse(folder_problems(config.hydra, kind))
    words = override_texts(config.hydra.overrides.task)
    former: dict[str, list[str]] = {}
    for override in _parse([*words, *override_texts(config.hydra.overrides.hydra)]):
        key = override.get_key_element().lstrip("+")
        values = [str(override.input_line).partition("=")[2]]
        if override.is_discrete_sweep():
            values = [*override.sweep_string_iterator()]
        if key in _NODE_GROUPS and any(text.startswith("[") for text in values):
            values = []  # Hydra would take the last one
        if values == ["null"]:
            continue  # null resets what is set anew, as for objects of the Python API
        if not 0 < len({*values}) == len(values) or former.setdefault(key, values) != values:
            raise ConfigError(
                f"{override.input_line}: type {key}= once, with one value, or after -m with "
                f"different ones: {key}=<value>,<value>."
            )


def omitted_key_pairs(config: DictConfig, runs_as_it_is: Callable[[DictConfig], bool]) -> list[str]:
    """Return `<precision> <key>` for each key that jobs of a precision of a sweep run without.

    Args:
        config: config of the sweep.
        runs_as_it_is: returns whether the precision of a job's config runs on this machine's device
            and cannot be emulated there.

    Raises:
        ConfigError: no precision of the sweep has a key.
    """
    params = config.hydra.sweeper.get("params") or {}
    # The command's overrides come after the preset's, and Hydra takes the last one of a key.
    words = [f"{key}={value}" for key, value in params.items()]
    overrides = _parse([*words, *override_texts(config.hydra.overrides.task)])
    jobs, lacking = _lacking_keys(config, overrides, _by_key(overrides))
    omitted = [f"{name} {key}" for key, names in lacking.items() for name in names]
    emulates = any(_key(override) == _EMULATE and _is_true(override) for override in overrides)
    # Another machine may lack the hardware, so that its jobs need the emulation.
    if emulates and config.hydra.launcher.get("_target_") != REMOTE:
        for name, job in jobs.items():
            if has_key(job, _EMULATE) and runs_as_it_is(job):
                omitted.append(f"{name} {_EMULATE}")
    return omitted


def omitted_key_messages(pairs: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each key that some precisions run without.

    Args:
        pairs: from omitted_key_pairs.
    """
    names_by_key: dict[str, list[str]] = {}
    for pair in pairs:
        name, _, key = pair.partition(" ")
        names_by_key.setdefault(key, []).append(name)
    for key, names in names_by_key.items():
        listed = ", ".join(names)
        yield f"{key} is left out for {listed}: it has no such key, or runs here without it."


def remove_keys(config: DictConfig, keys: Sequence[str]) -> None:
    """Remove keys that a job's precision does not have from the job's config."""
    with read_write(config), open_dict(config):
        for key in keys:
            _remove_key(config, key.split("."))


def _remove_key(node: DictConfig, path: Sequence[str]) -> None:
    """Remove a key, and each mapping that the removal empties: the precision would refuse it."""
    first, *rest = path
    if rest and isinstance(node[first], DictConfig):
        _remove_key(node[first], rest)
    if not rest or not node[first]:
        node.pop(first, None)


def _by_key(overrides: Sequence[Override]) -> dict[str, Override]:
    """Return the overrides of keys under precision by their keys."""
    by_key = {_key(override): override for override in overrides}
    return {key: override for key, override in by_key.items() if key.startswith(KEY_PREFIX)}


def _lacking_keys(
    config: DictConfig, overrides: Sequence[Override], by_key: Mapping[str, Override]
) -> tuple[Mapping[str, DictConfig], Mapping[str, list[str]]]:
    """Return which precisions of a command lack which keys.

    Args:
        config: of the command, with Hydra's own part.
        overrides: of the command.
        by_key: the overrides of the keys that are looked for.

    Returns:
        The config of a job of each precision, without these keys; and the names of the precisions
        that lack a key, by the key.

    Raises:
        ConfigError: all precisions lack a key.
    """
    jobs: dict[str, DictConfig] = {}
    if not by_key:
        return jobs, {}
    for words in _combinations(overrides):
        # A job that does not compose reports its own error when it runs.
        with suppress(HydraException, OmegaConfBaseException):
            words = [*override_texts(config.hydra.overrides.hydra), *words]
            name = config.hydra.job.config_name
            job = _loader().load_configuration(name, words, RunMode.RUN)
            jobs[str(job.hydra.runtime.choices.get("precision"))] = job
    lacking = {key: [name for name in jobs if not has_key(jobs[name], key)] for key in by_key}
    refuse(
        _unknown_key(by_key[key], jobs)
        for key, names in lacking.items()
        if jobs and len(names) == len(jobs)
    )
    return jobs, lacking


def _combinations(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Yield the overrides of one job for each choice of what decides a precision.

    They hold neither keys under precision nor other keys that the sweep varies.
    """
    fixed = []
    choices = []
    for key, override in {_key(override): override for override in overrides}.items():
        if key.startswith(KEY_PREFIX):
            continue
        if not override.is_sweep_override():
            fixed.append(str(override.input_line))
        elif override.is_discrete_sweep() and key in _PRECISION_GROUPS:
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    for choice in product(*choices):
        yield [*fixed, *choice]


def _unknown_key(override: Override, jobs: Mapping[str, DictConfig]) -> str:
    """Return the message for a key that the precisions of all jobs lack."""
    typed = str(override.input_line).lstrip("+")
    key = _key(override)
    if len(jobs) == 1:
        (job,) = jobs.values()
        # The first part of the key that is unknown: of loss_scale.fixed that may be loss_scale.
        parent = key.rpartition(".")[0]
        while not has_key(job, parent):
            key, parent = parent, parent.rpartition(".")[0]
        return unknown_key(key, OmegaConf.select(job, parent), [typed])
    others = precisions_with_key(key.removeprefix(KEY_PREFIX))
    hint = f" Of the built-in ones, {', '.join(others)} have it." if others else ""
    names = ", ".join(jobs)
    return f"{typed}: no precision of this sweep ({names}) takes {key}.{hint} Leave it out."


def _is_true(override: Override) -> bool:
    """Return whether an override sets a key to true in any job."""
    if override.is_discrete_sweep():
        return any(value.lower() == "true" for value in override.sweep_string_iterator())
    return override.value() is True


def _key(override: Override) -> str:
    return override.get_key_element().lstrip("+~")


def _parse(words: Sequence[str]) -> list[Override]:
    return OverridesParser.create(config_loader=_loader()).parse_overrides([*words])


def _loader() -> ConfigLoader:
    return GlobalHydra.instance().config_loader()
