"""Read the settings of a saved run, merge them with what is typed now, and find the run's store.

A checkpoint holds the settings of its run, and a run's folder holds config.yaml. Anybody may have
written these files, so code that they name is called only as config/trusted_targets.py allows.
The run's journal names the store; whether the journal is believed is decided before anything is
trained, and the store is asked for the run.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.resolve import resolve_spec
from runner.config.trusted_targets import SavedConfig, check_trusted, masked_keys
from runner.core import ConfigError, Invocation, RunSpec, fmt

PRESET_GROUPS = ("experiment", "debug", "sweep")
"""Groups that set keys anywhere."""
TARGET_GROUPS = (
    *("precision", "model", "adapter", "data", "task", "optimizer", "scheduler", "callbacks"),
)
"""Groups whose targets a saved run names."""
GIVEN_DATA = "runner.api.objects.given_data"
RUN_KEYS = (*TARGET_GROUPS[:-1], "train", "init", "seed")
"""Top-level keys that a run's training is repeated with."""


def typed_overrides(invocation: Invocation, saved: Mapping[str, Any] = {}) -> dict[str, str]:
    """Return the overrides that were typed, by their keys without marks (`+`, `~`).

    Args:
        invocation: what was typed.
        saved: settings of a run. Where `data=` names the run's own target, as it must before any
            key of that target is typed, it stands for the secrets alone, which no file holds: the
            run's other keys stay as they were.
    """
    typed = {fmt.override_key(text): text for text in invocation.overrides}
    target = (invocation.composed_config or {}).get("data", {}).get("_target_")
    if target == saved.get("data", {}).get("_target_", "") != GIVEN_DATA:
        word = typed.pop("data", None)
        if word is not None:
            typed = dict.fromkeys(masked_keys("data", saved.get("data", {})), word) | typed
    return typed


def check_run(config: SavedConfig, spec: RunSpec, invocation: Invocation) -> RunSpec:
    """Return the spec of a saved run, to train it again as it was.

    Args:
        config: of the run.
        spec: of this command, as composed.
        invocation: what was typed.

    Raises:
        ConfigError: the config is no spec, or names code that is not trusted.
    """
    values = dict(config.values)
    composed = invocation.composed_config or spec.to_dict()
    typed = typed_overrides(invocation)
    # No file holds a secret, so that it is typed again.
    for key in masked_keys("", config.values):
        if key in typed:
            copy_key(composed, values, key.split("."))
    check_trusted(config._replace(values=values), TARGET_GROUPS, _typed_nodes(spec, invocation))
    return resolve_spec(OmegaConf.create(values))


def _typed_nodes(spec: RunSpec, invocation: Invocation) -> dict[str, Any]:
    """Return the nodes of this command's groups, as they were composed and as resolved."""
    composed = invocation.composed_config or {}
    return {group: [composed.get(group), getattr(spec, group)] for group in TARGET_GROUPS}


def merge(
    config: SavedConfig,
    spec: RunSpec,
    invocation: Invocation,
    keys: Collection[str],
    choices: Mapping[str, str] = {},
) -> tuple[RunSpec, Invocation]:
    """Return this command's spec with a saved run's values of some keys where none was typed.

    Args:
        config: of the saved run.
        spec: of this command, as composed.
        invocation: what was typed.
        keys: top-level keys that are taken from the run.
        choices: names of the run's options of these keys.

    Returns:
        The spec, and the invocation with the names of the run's options.

    Raises:
        ConfigError: the settings do not resolve, or name code that is not trusted.
    """
    composed = dict(invocation.composed_config or spec.to_dict())
    merged = composed | {key: config.values[key] for key in keys if key in config.values}
    # What is typed is copied before anything is resolved, so that its interpolations read the
    # run's values.
    typed = typed_overrides(invocation, config.values)
    for key in typed:
        copy_key(composed, merged, key.split("."))
    # Data that are given as objects replace the data, not what the run does with them.
    before = config.values.get("data", {})
    if merged["data"].get("_target_") == GIVEN_DATA:
        keys_of_run = [k for k in ("shuffle", "sampler", "collate") if f"data.{k}" not in typed]
        merged["data"] = merged["data"] | {k: before[k] for k in keys_of_run if k in before}
    try:
        resolved = resolve_spec(OmegaConf.create(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{config.key}={config.path}: {error}") from error
    groups = [group for group in TARGET_GROUPS if group in keys]
    check_trusted(
        config._replace(values=resolved.to_dict()), groups, _typed_nodes(spec, invocation)
    )
    return resolved, replace(
        invocation,
        choices={**invocation.choices, **choices},
        is_trusted=config.is_signed and invocation.is_trusted,
    )


def copy_key(source: Mapping[str, Any], target: dict[str, Any], path: Sequence[str]) -> None:
    """Copy one dotted key into the target, or remove it there where the source lacks it."""
    head, *rest = path
    if head not in source:
        target.pop(head, None)
    elif rest and isinstance(source[head], Mapping) and isinstance(target.get(head), Mapping):
        # The nested mapping is the saved run's own: it is copied before it is changed.
        target[head] = dict(target[head])
        copy_key(source[head], target[head], rest)
    else:
        target[head] = source[head]


def changes(
    saved: Mapping[str, Any] | RunSpec, spec: RunSpec
) -> dict[str, tuple[str | None, str | None]]:
    """Return the keys whose values differ between a saved run and a spec, without secrets.

    Args:
        saved: the run's settings.
        spec: of this command.

    Returns:
        The run's value and this command's by dotted key; None where there is no such key.
    """
    if not isinstance(saved, RunSpec):
        saved = resolve_spec(OmegaConf.create(dict(saved)))
    old, new = saved.flat(), spec.flat()
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
