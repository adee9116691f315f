"""Merge a checkpoint's settings with those typed now, and list what changed.

Which checkpoint a run continues from is chosen by resume.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.checkpoint import checkpoint_file
from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.config import trusted_targets
from runner.config.invocation import Invocation
from runner.config.overrides import override_key
from runner.config.resolve import flatten, resolve_spec, to_dict
from runner.config.schema import RunSpec
from runner.config.targets import GROUP_KEYS
from runner.utils.errors import ConfigError

PRESET_GROUPS = ("experiment", "debug", "sweep")
"""Groups that set keys anywhere."""
TARGET_GROUPS = (
    *("precision", "model", "adapter", "data", "task", "optimizer", "scheduler", "callbacks"),
)
"""Groups whose targets a checkpoint names."""
_KEYS_OF_THE_COMMAND = ("tracking", "mode", "strategy")
"""Top-level keys that are this command's and not the checkpoint's.

run_store.py chooses the store, and a run may be resumed with another number of processes.
"""


def typed_overrides(origin: Invocation) -> dict[str, str]:
    """Return the overrides that were typed, by their keys without marks (`+`, `~`)."""
    return {override_key(text): text for text in origin.overrides}


def merge_choices(saved: LoadedCheckpoint, origin: Invocation) -> dict[str, str]:
    """Return the options of all groups: the checkpoint's where none was typed now."""
    typed = typed_overrides(origin)
    choices = dict(origin.choices)
    for group, name in saved.content["choices"].items():
        if group not in typed:
            choices[group] = name
    return choices


def merge_spec(spec: RunSpec, saved: LoadedCheckpoint, origin: Invocation) -> tuple[RunSpec, bool]:
    """Return the checkpoint's spec with what was typed now over it.

    Args:
        spec: as composed.
        saved: the checkpoint.
        origin: what was typed.

    Returns:
        The spec, and whether this user composed all of it, so that it may be signed.

    Raises:
        ConfigError: the settings do not resolve, or name code that is not trusted.
    """
    typed = typed_overrides(origin)
    if _has_other_preset(typed, saved, origin):
        # A preset sets keys anywhere, so which of the checkpoint's keys would be meant to stay
        # cannot be known: the command's spec counts as a whole.
        return spec, origin.is_trusted
    ours = dict(origin.composed_config or to_dict(spec))
    theirs = dict(saved.content["spec"])
    merged = {**ours, **theirs}
    for key in _KEYS_OF_THE_COMMAND:
        merged[key] = ours[key]
    # What is typed is copied before anything is resolved, so that its interpolations read the
    # checkpoint's values.
    for key in typed:
        copy_key(ours, merged, key.split("."))
    # checkpoint.path belongs to mode=evaluate.
    merged["checkpoint"] = {**ours["checkpoint"], **theirs.get("checkpoint", {}), "path": None}
    for key in typed:
        if key.startswith("checkpoint."):
            copy_key(ours, merged, key.split("."))
    try:
        resolved = resolve_spec(OmegaConf.create(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(f"checkpoint.resume={saved.path}: {error}") from error
    own = checkpoint_file.is_signed_by_user(saved.content)
    # Targets that this command names itself are trusted, as they were composed and as resolved.
    known = {group: [ours.get(group), getattr(spec, group)] for group in TARGET_GROUPS}
    trusted_targets.check_trusted(
        to_dict(resolved), TARGET_GROUPS, known, saved.path, "checkpoint.resume", own
    )
    return resolved, own and origin.is_trusted


def _has_other_preset(
    typed: Mapping[str, str], saved: LoadedCheckpoint, origin: Invocation
) -> bool:
    """Return whether a preset was typed that the checkpoint's run did not have."""
    theirs = saved.content["choices"]
    return any(
        typed.get(group) and origin.choices.get(group) != theirs.get(group)
        for group in PRESET_GROUPS
    )


def copy_key(source: Mapping[str, Any], target: dict[str, Any], path: Sequence[str]) -> None:
    """Copy one dotted key into the target, or remove it there where the source lacks it."""
    head, *rest = path
    if head not in source:
        target.pop(head, None)
    elif rest and isinstance(source[head], Mapping) and isinstance(target.get(head), Mapping):
        # The nested mapping is the checkpoint's own: it is copied before it is changed.
        target[head] = dict(target[head])
        copy_key(source[head], target[head], rest)
    else:
        target[head] = source[head]


def optimizer_problem(spec: RunSpec, saved: LoadedCheckpoint) -> str:
    """Return why the checkpoint's optimizer state is none of this run's; empty where it may be."""
    theirs = _optimizers(saved.content["spec"].get("optimizer") or {})
    ours = _optimizers(spec.optimizer)
    if theirs == ours:
        return _division_problem(spec, saved)
    old = ", ".join(str(target) for target, _ in theirs.values())
    new = ", ".join(str(target) for target, _ in ours.values())
    return (
        f"its state is that of {old}, which {new} cannot continue. Leave optimizer= out, or type "
        f"init.weights={saved.path} instead of checkpoint.resume to start a new run from its "
        "weights."
    )


def _division_problem(spec: RunSpec, saved: LoadedCheckpoint) -> str:
    """Return which setting would give the saved state to other parameters; empty for none."""
    theirs = saved.content["spec"]
    train = theirs.get("train")
    frozen = train.get("freeze") if isinstance(train, Mapping) else None
    keys = ""
    if _divisions(theirs.get("optimizer") or {}) != _divisions(spec.optimizer):
        keys = "optimizer.groups, no_decay_on and layer_decay"
    elif (frozen or []) != spec.train.freeze:
        keys = "train.freeze"
    if not keys:
        return ""
    return (
        f"its state is that of groups of parameters with other settings. Leave {keys} out, or type "
        f"init.weights={saved.path} instead of checkpoint.resume to start a new run from its "
        "weights."
    )


def _divisions(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of each optimizer of a node that divide its parameters, by their keys."""
    nodes = {"": node} if "_target_" in node else node
    found: dict[str, Any] = {}
    for name, part in nodes.items():
        for key in GROUP_KEYS:
            if isinstance(part, Mapping) and part.get(key) is not None:
                found[f"{name}.{key}"] = part[key]
    return found


def _optimizers(node: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return target and `match` of each optimizer of a node, by its name."""
    # A node with a target is one optimizer; else it holds several, each under its name.
    nodes = {"": node} if "_target_" in node else node
    parts = {name: part for name, part in nodes.items() if isinstance(part, Mapping)}
    return {name: (part.get("_target_"), part.get("match")) for name, part in parts.items()}


def changed_settings(spec: RunSpec, saved: LoadedCheckpoint) -> dict[str, str]:
    """Return the keys whose values differ from the checkpoint's, as `old -> new`."""
    theirs = flatten(resolve_spec(OmegaConf.create(dict(saved.content["spec"]))))
    ours = flatten(spec)
    changes = {}
    for key in {**theirs, **ours}:
        # How a run is saved and where it is recorded change nothing that it computes.
        if key.partition(".")[0] in ("checkpoint", "tracking"):
            continue
        if theirs.get(key) != ours.get(key):
            changes[key] = f"{theirs.get(key, 'none')} -> {ours.get(key, 'none')}"
    return changes
