"""Turn Hydra's composed config into a frozen RunSpec, and a RunSpec into plain containers."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.hydra_plugins import register_plugins
from runner.config.messages import explain
from runner.config.schema import RunSpec
from runner.utils.errors import ConfigError, refuse
from runner.utils.layout import MANIFEST, RESULT
from runner.utils.secrets import redact_values


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
    schema = OmegaConf.structured(RunSpec)
    _clear_readonly(schema)
    # Hydra takes any key there, also one that the precision lacks: config/precision_keys.py judges.
    OmegaConf.set_struct(schema.precision, False)
    return schema


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
    missing = sorted(key for key, value in leaves(values) if value == "???")
    if not allow_unresolved:
        refuse(f"{key} has no value. Type {key}=<value>." for key in missing)
    try:
        if allow_unresolved:
            assert isinstance(values, dict)
            whole = partial(OmegaConf.to_container, resolve=True, throw_on_missing=True)
            for key, value in values.items():
                if isinstance(value, Mapping):
                    values[key] = {}
                    with suppress(OmegaConfBaseException):
                        values[key] = whole(config[key])
        else:
            values = OmegaConf.to_container(config, resolve=True)
        spec = OmegaConf.to_object(OmegaConf.merge(_schema(), values))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, ())) from error
    assert isinstance(spec, RunSpec)
    return spec


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
        if any((place / MANIFEST).exists() for place in (folder, folder.parent)):
            yield f"hydra.run.dir={folder} is a folder of a sweep and its jobs. Type another one."
    else:
        is_used = any(path.name.isdecimal() or path.name == RESULT for path in folder.glob("*"))
        if is_used and not hydra.callbacks.sweep.resume:
            yield (
                f"hydra.sweep.dir={folder} holds another sweep, or a run. Type another folder, or "
                f"sweep.resume={folder} to continue that sweep."
            )


def flatten(spec: RunSpec) -> dict[str, str]:
    """Return the spec without secrets as dotted keys and strings, the form of MLflow's params."""
    return {key: str(value) for key, value in leaves(redacted_dict(spec))}


def leaves(value: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of a config; an empty mapping is one."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def redacted_dict(spec: RunSpec) -> dict[str, Any]:
    """Return the spec as plain containers without secrets, to store or show it."""
    return redact_values(asdict(spec))
