"""Read the settings of a saved run, merge them with what is typed now, and choose what to resume.

A checkpoint holds the settings of its run, and a run's folder holds config.yaml. Anybody may have
written these files, so code that they name is called only as config/trusted_targets.py allows.
The run's journal names the store; whether the journal is believed is decided before anything is
trained, and the store is asked for the run.

The step at which training continues is that of the newest undamaged checkpoint in the run's folder
(tracking/locate.py); training/state_dict.py restores it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.resolve import resolve_spec
from runner.config.trusted_targets import SavedConfig, check_trusted, checkpoint_config, masked_keys
from runner.core import (
    ConfigError,
    Invocation,
    LoadedCheckpoint,
    RunnerError,
    RunResult,
    RunSpec,
    Strategy,
    checkpoint_file,
    files,
    fmt,
    layout,
    run_context,
)
from runner.tracking import locate
from runner.tracking.run_store import with_run_store
from runner.training.parameter_groups import DIVISION_KEYS

PRESET_GROUPS = ("experiment", "debug", "sweep")
"""Groups that set keys anywhere."""
TARGET_GROUPS = (
    *("precision", "model", "adapter", "data", "task", "optimizer", "scheduler", "callbacks"),
)
"""Groups whose targets a saved run names."""
GIVEN_DATA = "runner.api.objects.given_data"
RUN_KEYS = (*TARGET_GROUPS[:-1], "train", "init", "seed")
"""Top-level keys that a run's training is repeated with."""
_MAX_SKIPPED_RUNS = 3
"""Skipped runs that the error of checkpoint.resume=last names."""
_KEYS_OF_THE_COMMAND = ("tracking", "mode", "strategy")
"""Top-level keys that are this command's and not the checkpoint's.

The run's journal names the store, and a run may be resumed with another number of processes.
"""


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


def plan_resume_in_processes(
    plan: run_context.PlannedRun, say: Callable[[str], None], strategy: Strategy
) -> run_context.PlannedRun:
    """Return what checkpoint.resume continues; the first process looks for it.

    The others take the checkpoint that it found: a file may appear between two looks.
    """
    rank = strategy.rank
    found = plan
    failure = None
    if rank.is_main:
        try:
            found = plan_resume(plan, say)
        except RunnerError as error:
            failure = error
    path = str(found.saved.path) if found.saved else None
    # All processes raise, so that none waits for one that has ended.
    path, failure = strategy.broadcast_object((path, failure))
    if failure is not None:
        raise failure
    if rank.is_main or path is None:
        return found
    checkpoint = replace(plan.spec.checkpoint, resume=path)
    return plan_resume(plan._replace(spec=replace(plan.spec, checkpoint=checkpoint)), say)


def plan_resume(plan: run_context.PlannedRun, say: Callable[[str], None]) -> run_context.PlannedRun:
    """Return the run that checkpoint.resume names, with the keys that were typed now over its own.

    The result is this command's own run if there is nothing to resume: no run is named, or it is
    `auto` and this run's folder holds no checkpoint.

    Args:
        plan: this command's own run; `auto` looks into its folder, `last` at those next to it.
        say: prints what was skipped.

    Raises:
        ConfigError: there is none, it is finished, or no checkpoint of it is whole.
    """
    where = plan.spec.checkpoint.resume
    if where is None:
        return plan
    if where == RunSpec.AUTO:
        return _plan_own_folder(plan, say)
    notes: list[str] = []
    path = str(_newest_run(plan.folder, notes)) if where == "last" else where
    plan = _plan_from(plan, path, notes)
    for line in notes:
        say(line)
    return plan


def _plan_own_folder(
    plan: run_context.PlannedRun, say: Callable[[str], None]
) -> run_context.PlannedRun:
    """Return the run in its own folder, resumed if that holds an undamaged checkpoint.

    A job of a sweep is resumed only as the same job: a search may ask for another one in its
    folder.
    """
    out = plan.folder
    invocation = plan.invocation
    checkpoints = checkpoint_file.checkpoints_of_run(out)
    notes: list[str] = []
    resumed = None
    reason = ""
    if checkpoints:
        try:
            resumed = _plan_from(plan, str(out), notes)
        except ConfigError as error:
            # Each damaged file has left a note. With fewer notes than files one file is whole, and
            # the error is about what was typed: starting over would hide it.
            if len(notes) < len(checkpoints):
                raise
            reason = f"starts over: {error}"
    if resumed and resumed.changes and invocation.sweep:
        reason = f"starts over: it was another job: {resumed.changes}"
        resumed = None
    if checkpoints and resumed is None:
        checkpoint_file.rename_superseded(out / "checkpoints", -1)
    for line in notes:
        say(line)
    if resumed:
        return resumed
    if invocation.composed_config is not None:
        # An interpolation that only a checkpoint's values would have resolved is an error.
        resolve_spec(OmegaConf.create(dict(invocation.composed_config)))
    if reason:
        say(reason)
    elif invocation.sweep is None:
        say(f"{out} holds no checkpoint: the run begins.")
    return plan


def _plan_from(
    plan: run_context.PlannedRun, where: str, notes: list[str]
) -> run_context.PlannedRun:
    """Return the run of a checkpoint file, a run's folder or an MLflow id.

    Args:
        plan: this command's own run.
        where: the file, folder or id.
        notes: gets a line for each damaged file, and then those on the run's store.

    Raises:
        ConfigError: it cannot be resumed; the message says what to type.
    """
    tracking_uri = plan.spec.tracking.get("uri")
    saved = locate.load_newest(where, tracking_uri, "checkpoint.resume", notes)
    folder = saved.path.parent.parent
    if "position" not in saved.content:
        raise ConfigError(
            f"checkpoint.resume={where}: {saved.path} holds weights and optimizers, but not where "
            "its run was. Type init.weights=<it> to start a new run from its weights."
        )
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(
            f"checkpoint.resume={where}: {saved.path} is not in a run's folder, whose record a "
            "resumed run continues. Type init.weights=<it> to start a new run from its weights."
        )
    if plan.invocation.sweep is None and (folder.parent / layout.MANIFEST).exists():
        raise ConfigError(
            f"checkpoint.resume={where}: it is a job of a sweep, whose report would lose it. Type "
            f"sweep.resume={folder.parent}, or init.weights=<it> to start a run from its weights."
        )
    is_longer = {"train.epochs", "train.max_steps"} & typed_overrides(plan.invocation).keys()
    if _is_finished(folder) and not is_longer:
        raise ConfigError(
            f"checkpoint.resume={where}: the run is finished. To train on, type "
            "train.max_steps=<more steps> or train.epochs=<more>."
        )
    merged, invocation = _merge_spec(plan.spec, saved, plan.invocation)
    problem = _state_problem(merged, saved)
    if problem:
        raise ConfigError(f"checkpoint.resume={where}: {problem}")
    # A list of its own: while an error can still come, `notes` counts damaged files only.
    store_notes: list[str] = []
    waits = plan.spec.checkpoint.resume == RunSpec.AUTO
    merged = with_run_store(merged, folder, invocation, waits, store_notes.append)
    notes += store_notes
    # How a run is saved and where it is recorded change nothing that it computes.
    changed = {
        key: f"{'none' if old is None else old} -> {'none' if new is None else new}"
        for key, (old, new) in changes(saved.content["spec"], merged).items()
        if key.partition(".")[0] not in ("checkpoint", "tracking")
    }
    return run_context.PlannedRun(folder, saved, merged, invocation, changed)


def _merge_spec(
    spec: RunSpec, saved: LoadedCheckpoint, invocation: Invocation
) -> tuple[RunSpec, Invocation]:
    """Return the checkpoint's spec with what was typed now over it, and what it was composed from.

    Args:
        spec: as composed.
        saved: the checkpoint.
        invocation: what was typed.

    Raises:
        ConfigError: the settings do not resolve, or name code that is not trusted.
    """
    typed = typed_overrides(invocation)
    saved_choices = saved.content["choices"]
    choices = {**invocation.choices}
    for group in {*choices, *saved_choices} - {*typed}:
        choices[group] = saved_choices.get(group, "")  # none of a group that was typed as a node
    invocation = replace(invocation, choices=choices)
    presets = [group for group in PRESET_GROUPS if group in typed]
    if any(invocation.choices.get(group) != saved_choices.get(group) for group in presets):
        # A preset sets keys anywhere, so which of the checkpoint's keys would be meant to stay
        # cannot be known: the command's spec counts as a whole.
        return spec, invocation
    config = checkpoint_config(saved, "checkpoint.resume")
    composed = invocation.composed_config or spec.to_dict()
    # checkpoint.path belongs to mode=evaluate.
    checkpoint = {**composed["checkpoint"], **config.values.get("checkpoint", {}), "path": None}
    values = {**config.values, "checkpoint": checkpoint}
    keys = [key for key in values if key not in _KEYS_OF_THE_COMMAND]
    return merge(config._replace(values=values), spec, invocation, keys)


def _newest_run(out: Path, notes: list[str]) -> Path:
    """Return the newest run in the folder of `out` that has not finished and has a checkpoint.

    Args:
        out: this run's own folder, which is left out.
        notes: gets a line for each run that was skipped.

    Raises:
        ConfigError: there is none.
    """
    for run in locate.newest_runs(out.parent):
        if run == out:
            continue
        if files.is_locked(run):
            reason = "a command is at work there"
        elif _is_finished(run):
            reason = "it is finished"
        elif checkpoint_file.checkpoints_of_run(run):
            return run
        else:
            reason = "it has no checkpoint"
        notes.append(f"skipped {run}: {reason}")
    skipped = "".join(f" {text[0].upper()}{text[1:]}." for text in notes[:_MAX_SKIPPED_RUNS])
    raise ConfigError(
        f"checkpoint.resume=last: no run in {out.parent} was interrupted and left a checkpoint."
        f"{skipped} Type checkpoint.resume=<run folder, .pt file or run id>, and save with "
        "checkpoint.every_steps=<n>."
    )


def _is_finished(run: Path) -> bool:
    """Return whether a run has taken all the steps that it was meant to take."""
    with suppress(ValueError, OSError):  # none, or damaged
        return RunResult.read(run).is_whole
    return False


def _state_problem(spec: RunSpec, saved: LoadedCheckpoint) -> str:
    """Return why the run cannot continue from the checkpoint's state; empty where it may.

    Nothing is left to train, or the optimizer state is none of this run's.
    """
    place, reached = "in epoch", saved.content["epoch"]
    key, limit = "epochs", spec.train.epochs
    # train.max_steps wins over train.epochs, so epochs count only where it is not set.
    if spec.train.max_steps is not None:
        place, reached = "at step", saved.content["step"]
        key, limit = "max_steps", spec.train.max_steps
    if limit < reached:
        return f"the run is {place} {reached} already. Type train.{key}=<more than that>."
    new_run = f"init.weights={saved.path} in place of checkpoint.resume for a new run."
    kinds, divisions = _optimizers(saved.content["spec"].get("optimizer") or {})
    new_kinds, new_divisions = _optimizers(spec.optimizer)
    if kinds != new_kinds:
        names, new_names = (
            ", ".join(str(target) for target, _ in each.values()) for each in (kinds, new_kinds)
        )
        which = f"its state is that of {names}, which {new_names} cannot continue"
        return f"{which}. Leave optimizer= out, or type {new_run}"
    train = saved.content["spec"].get("train")
    frozen = train.get("freeze") if isinstance(train, Mapping) else None
    # Settings that would give the saved state to other parameters.
    if divisions != new_divisions:
        keys = "optimizer.groups, no_decay_on and layer_decay"
    elif (frozen or []) != spec.train.freeze:
        keys = "train.freeze"
    else:
        return ""
    return f"its state is of groups with other settings. Leave {keys} out, or type {new_run}"


def _optimizers(
    node: Mapping[str, Any],
) -> tuple[dict[str, tuple[Any, Any]], dict[str, dict[str, Any]]]:
    """Return the kinds of a run's optimizers, and the settings that divide their parameters, by
    their names."""
    # A node with a target is one optimizer; else it holds several, each under its name.
    nodes = {"": node} if "_target_" in node else node
    kinds = {}
    divisions = {}
    for name, part in nodes.items():
        if isinstance(part, Mapping):
            kinds[name] = (part.get("_target_"), part.get("match"))
            divisions[name] = {k: part[k] for k in DIVISION_KEYS if part.get(k) is not None}
    return kinds, divisions
