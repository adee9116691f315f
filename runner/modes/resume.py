"""Choose the run and the checkpoint that checkpoint.resume continues.

The step at which training continues is that of the newest undamaged checkpoint in the run's folder
(checkpoint/locate.py); training/state_dict.py restores it. The settings are merged, and
the store is found, by saved_run.py.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner.config.resolve import resolve_spec
from runner.config.trusted_targets import checkpoint_config
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
    layout,
    run_context,
    targets,
)
from runner.modes.saved_run import PRESET_GROUPS, changes, merge, typed_overrides
from runner.tracking import locate
from runner.tracking.run_store import with_run_store

_MAX_SKIPPED_RUNS = 3
"""Skipped runs that the error of checkpoint.resume=last names."""
_KEYS_OF_THE_COMMAND = ("tracking", "mode", "strategy")
"""Top-level keys that are this command's and not the checkpoint's.

saved_run.py chooses the store, and a run may be resumed with another number of processes.
"""


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
    _check_resumable(saved, folder, plan.invocation, where)
    merged, invocation = _merge_spec(plan.spec, saved, plan.invocation)
    problem = _state_problem(merged, saved)
    if problem:
        raise ConfigError(f"checkpoint.resume={where}: {problem}")
    # A list of its own: while an error can still come, `notes` counts damaged files only.
    store_notes: list[str] = []
    waits = plan.spec.checkpoint.resume == RunSpec.AUTO
    merged = with_run_store(merged, folder, invocation, waits, store_notes.append)
    notes += store_notes
    return run_context.PlannedRun(
        folder, saved, merged, invocation, changed_settings(merged, saved)
    )


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


def _check_resumable(
    saved: LoadedCheckpoint, folder: Path, invocation: Invocation, where: str
) -> None:
    """Raise ConfigError for a checkpoint that no run can continue, and for a finished run."""
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
    if invocation.sweep is None and (folder.parent / layout.MANIFEST).exists():
        raise ConfigError(
            f"checkpoint.resume={where}: it is a job of a sweep, whose report would lose it. Type "
            f"sweep.resume={folder.parent}, or init.weights=<it> to start a run from its weights."
        )
    is_longer = {"train.epochs", "train.max_steps"} & typed_overrides(invocation).keys()
    if _is_finished(folder) and not is_longer:
        raise ConfigError(
            f"checkpoint.resume={where}: the run is finished. To train on, type "
            "train.max_steps=<more steps> or train.epochs=<more>."
        )


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
            notes.append(f"skipped {run}: a command is at work there")
        elif _is_finished(run):
            notes.append(f"skipped {run}: it is finished")
        elif checkpoint_file.checkpoints_of_run(run):
            return run
        else:
            notes.append(f"skipped {run}: it has no checkpoint")
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
    step = saved.content["step"]
    epoch = saved.content["epoch"]
    max_steps = spec.train.max_steps
    # train.max_steps wins over train.epochs, so epochs count only where it is not set.
    if max_steps is not None and max_steps < step:
        return f"the run is at step {step} already. Type train.max_steps=<more than that>."
    if max_steps is None and spec.train.epochs < epoch:
        return f"the run is in epoch {epoch} already. Type train.epochs=<more than that>."
    new_run = f"init.weights={saved.path} in place of checkpoint.resume for a new run."
    old = _optimizers(saved.content["spec"].get("optimizer") or {})
    new = _optimizers(spec.optimizer)
    old_kinds = {name: (node.get("_target_"), node.get("match")) for name, node in old.items()}
    new_kinds = {name: (node.get("_target_"), node.get("match")) for name, node in new.items()}
    if old_kinds != new_kinds:
        old_targets = ", ".join(str(target) for target, _ in old_kinds.values())
        new_targets = ", ".join(str(target) for target, _ in new_kinds.values())
        which = f"its state is that of {old_targets}, which {new_targets} cannot continue"
        return f"{which}. Leave optimizer= out, or type {new_run}"
    train = saved.content["spec"].get("train")
    frozen = train.get("freeze") if isinstance(train, Mapping) else None
    # Settings that would give the saved state to other parameters.
    if _divisions(old) != _divisions(new):
        keys = "optimizer.groups, no_decay_on and layer_decay"
    elif (frozen or []) != spec.train.freeze:
        keys = "train.freeze"
    else:
        return ""
    return f"its state is of groups with other settings. Leave {keys} out, or type {new_run}"


def _optimizers(node: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the nodes of a run's optimizers by their names."""
    # A node with a target is one optimizer; else it holds several, each under its name.
    nodes = {"": node} if "_target_" in node else node
    return {name: part for name, part in nodes.items() if isinstance(part, Mapping)}


def _divisions(optimizers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of optimizers that divide their parameters, by their keys."""
    settings: dict[str, Any] = {}
    for name, node in optimizers.items():
        for key in targets.GROUP_KEYS:
            if node.get(key) is not None:
                settings[f"{name}.{key}"] = node[key]
    return settings


def changed_settings(spec: RunSpec, saved: LoadedCheckpoint) -> dict[str, str]:
    """Return the keys whose values differ from the checkpoint's, as `old -> new`."""
    # How a run is saved and where it is recorded change nothing that it computes.
    return {
        key: f"{'none' if old is None else old} -> {'none' if new is None else new}"
        for key, (old, new) in changes(saved.content["spec"], spec).items()
        if key.partition(".")[0] not in ("checkpoint", "tracking")
    }
