"""From Hydra's config to a RunSpec, and every problem of a config in one message."""

from collections.abc import Iterator, Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.hydra_plugins import register_plugins
from runner.config.messages import explain
from runner.config.renamed import with_current_targets
from runner.config.schema import RunSpec
from runner.utils.errors import ConfigError
from runner.utils.secrets import redact_values


def register_schema() -> None:
    """Store RunSpec as Hydra's schema, and our plugins' configs."""
    ConfigStore.instance().store(name="schema", node=_schema(), provider="runner")
    register_plugins()


def _schema() -> DictConfig:
    """RunSpec as a config. A frozen dataclass makes a read-only one, which nothing can be merged
    into, so the flag is cleared; the spec made from it is frozen all the same."""
    schema = OmegaConf.structured(RunSpec)
    _clear_readonly(schema)
    return schema


def _clear_readonly(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _clear_readonly(child)


def resolve(config: DictConfig, later: bool = False) -> RunSpec:
    """The frozen spec of a composed config; interpolations are resolved, `???` is refused.

    Args:
        config: composed.
        later: a group whose interpolations cannot be resolved yet is left empty, for a checkpoint's
            values are to be put under it.

    Raises:
        ConfigError: a value is missing or does not fit.
    """
    missing = sorted(_missing("", OmegaConf.to_container(config)))
    if missing:
        raise ConfigError(*(f"{key} has no value. Type {key}=<value>." for key in missing))
    try:
        values = _resolved_groups(config) if later else OmegaConf.to_container(config, resolve=True)
        values = with_current_targets(values)
        spec = OmegaConf.to_object(OmegaConf.merge(_schema(), values))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, ())) from error
    assert isinstance(spec, RunSpec)
    return spec


def _resolved_groups(config: DictConfig) -> dict[Any, Any]:
    """The config without the groups that cannot be resolved."""
    values = OmegaConf.to_container(config)
    assert isinstance(values, dict)
    for key, value in values.items():
        if isinstance(value, Mapping):
            try:
                values[key] = OmegaConf.to_container(config[key], resolve=True)
            except OmegaConfBaseException:
                values[key] = {}
    return values


def _missing(prefix: str, value: object) -> Iterator[str]:
    """Dotted keys of every `???`; OmegaConf's own search trips over interpolations of one."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _missing(f"{prefix}.{key}" if prefix else str(key), item)
    elif value == "???":
        yield prefix


def flatten(spec: RunSpec) -> dict[str, str]:
    """The whole spec as dotted keys and strings, as MLflow's params want them."""

    def walk(prefix: str, value: object) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else str(key), item)
        else:
            yield prefix, str(value)

    return dict(walk("", redacted_dict(spec)))


def to_dict(spec: RunSpec) -> dict[str, Any]:
    """The spec as plain containers."""
    container = OmegaConf.to_container(OmegaConf.structured(spec))
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def redacted_dict(spec: RunSpec) -> dict[str, Any]:
    """The same as it is kept anywhere: without secrets, see runner.utils.secrets."""
    return redact_values(to_dict(spec))
