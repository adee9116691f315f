"""Going on where a run was cut: which checkpoint, and with which spec."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from runner.checkpoint import checkpoint_file, locate
from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.config import trusted_targets
from runner.config.invocation import Invocation
from runner.config.resolve import flatten, resolve_spec, to_dict
from runner.config.schema import AUTO, RunSpec
from runner.modes.result import RunResult
from runner.modes.run_store import resumed_store
from runner.utils.errors import ConfigError
from runner.utils.folder_lock import is_locked
from runner.utils.layout import MANIFEST

PRESETS = ("experiment", "debug", "sweep")
"""Groups that set keys anywhere."""
GROUPS = ("precision", "model", "adapter", "data", "task", "optimizer", "scheduler")
"""Groups whose targets a checkpoint names."""


class ResumePlan(NamedTuple):
    """A run to go on with: its folder, its checkpoint, and what to run now."""

    folder: Path
    saved: LoadedCheckpoint
    spec: RunSpec
    origin: Invocation


def plan_resume(
    spec: RunSpec, origin: Invocation, out: Path, console: Console
) -> ResumePlan | None:
    """Return the run that checkpoint.resume names, with the keys that were typed now over its own.

    The result is None if there is nothing to resume: no run is named, or it is `auto` and this
    run's folder holds no checkpoint.

    Args:
        spec: as composed.
        origin: what was typed.
        out: this run's own folder; `auto` looks into it, `last` beside it.
        console: told of what was skipped.

    Raises:
        ConfigError: there is none, it is finished, or no checkpoint of it is whole.
    """
    where, told = spec.checkpoint.resume, list[str]()
    if where is None or spec.mode != "train":
        return None
    if where == AUTO:
        return _own(spec, origin, out, console)
    path = str(_newest_run(out, told)) if where == "last" else where
    found = _found(spec, origin, path, told)
    for line in told:
        console.print(line, markup=False, soft_wrap=True)
    return found


def _own(spec: RunSpec, origin: Invocation, out: Path, console: Console) -> ResumePlan | None:
    """Return the run in its own folder, if that holds a complete checkpoint.

    A job of a sweep is resumed only as the same job: a search may ask for another one in its
    folder.
    """
    checkpoints, told = out / "checkpoints", list[str]()
    if not any(checkpoints.glob("step-*.pt")):
        _resolved(origin)
        if origin.sweep is None:
            console.print(
                f"{out} holds no checkpoint: the run begins.", markup=False, soft_wrap=True
            )
        return None
    try:
        found = _found(spec, origin, str(out), told)
    except ConfigError as error:
        if len(told) < len(
            [*checkpoints.glob("step-*.pt")]
        ):  # one is whole: what was typed is wrong
            raise
        found, reason = None, str(error)
    else:
        changed = changed_settings(found.spec, found.saved) if origin.sweep else {}
        found, reason = (None, f"it was another job: {changed}") if changed else (found, "")
    if found is None:
        told.append(f"starts over: {reason}")
        checkpoint_file.set_aside_newer(checkpoints, -1)
    for line in told:
        console.print(line, markup=False, soft_wrap=True)
    if found is None:
        _resolved(origin)
    return found


def _resolved(origin: Invocation) -> None:
    """Raise ConfigError for interpolations that only a checkpoint's values would have resolved."""
    if origin.composed_config is not None:
        resolve_spec(OmegaConf.create(dict(origin.composed_config)))


def _found(spec: RunSpec, origin: Invocation, where: str, told: list[str]) -> ResumePlan:
    """Return the run of a file, a folder or an id."""
    saved = locate.load_newest(where, spec.tracking.get("uri"), "checkpoint.resume", told)
    if "position" not in saved.content:
        raise ConfigError(
            f"checkpoint.resume={where}: {saved.path} holds weights and optimizers, but not where "
            "its run was. Type init.weights=<it> to start a new run from its weights."
        )
    folder = saved.path.parent.parent
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(
            f"checkpoint.resume={where}: {saved.path} does not lie in a run's folder, whose record "
            "is to go on. Type init.weights=<it> to start a new run from its weights."
        )
    if origin.sweep is None and (folder.parent / MANIFEST).exists():
        raise ConfigError(
            f"checkpoint.resume={where}: it is a job of a sweep, whose report would lose it. Type "
            f"sweep.resume={folder.parent}, or init.weights=<it> to start a run from its weights."
        )
    if _finished(folder) and not {"train.epochs", "train.max_steps"} & _typed(origin).keys():
        raise ConfigError(
            f"checkpoint.resume={where}: the run is finished. To train on, type "
            "train.max_steps=<more steps> or train.epochs=<more>."
        )
    choices = {**origin.choices, **_checkpoint_choices(saved.content["choices"], origin)}
    merged, own = _merged(spec, saved, origin)
    if problem := _nothing_left_to_train(merged, saved) or _other_optimizer(merged, saved):
        raise ConfigError(f"checkpoint.resume={where}: {problem}")
    said = list[str]()
    merged = resumed_store(merged, folder, origin, spec.checkpoint.resume == AUTO, said.append)
    told += said
    return ResumePlan(folder, saved, merged, replace(origin, choices=choices, is_trusted=own))


def _newest_run(out: Path, told: list[str]) -> Path:
    """Return the newest run beside `out` that has not finished and has a checkpoint."""
    for run in [run for run in locate.newest_runs(out.parent) if run != out]:
        if is_locked(run):
            told.append(f"skipped {run}: a command is at work there")
        elif _finished(run):
            told.append(f"skipped {run}: it is finished")
        elif locate.checkpoints_of_run(run):
            return run
        else:
            told.append(f"skipped {run}: it has no checkpoint")
    over = "".join(f" {text[0].upper()}{text[1:]}." for text in told[:3])
    raise ConfigError(
        f"checkpoint.resume=last: no run in {out.parent} was cut and left a checkpoint.{over} Type "
        "checkpoint.resume=<run folder, .pt file or MLflow run id>, and save with "
        "checkpoint.every_steps=<n>."
    )


def _nothing_left_to_train(spec: RunSpec, saved: LoadedCheckpoint) -> str:
    """Why there is nothing left to train; empty where there may be."""
    step, epoch, most = saved.content["step"], saved.content["epoch"], spec.train.max_steps
    if most is not None and most < step:
        return f"the run is at step {step} already. Type train.max_steps=<more than that>."
    if most is None and spec.train.epochs < epoch:
        return f"the run is in epoch {epoch} already. Type train.epochs=<more than that>."
    return ""


def _other_optimizer(spec: RunSpec, saved: LoadedCheckpoint) -> str:
    """Why the checkpoint's optimizer state is none of this run's; empty where it may be."""
    theirs, ours = (
        _optimizers(saved.content["spec"].get("optimizer") or {}),
        _optimizers(spec.optimizer),
    )
    if theirs == ours:
        return ""
    old, new = (", ".join(str(target) for target, _ in node.values()) for node in (theirs, ours))
    return (
        f"its state is that of {old}, which {new} cannot continue. Leave optimizer= out, or type "
        f"init.weights={saved.path} instead of checkpoint.resume to start a new run from its "
        "weights."
    )


def _optimizers(node: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Target and `match` of each optimizer of a node, by its name."""
    nodes = {"": node} if "_target_" in node else node
    parts = {name: part for name, part in nodes.items() if isinstance(part, Mapping)}
    return {name: (part.get("_target_"), part.get("match")) for name, part in parts.items()}


def _finished(run: Path) -> bool:
    with suppress(ValueError, OSError):  # none, or damaged
        return RunResult.read(run).status == "finished"
    return False


def _checkpoint_choices(choices: Mapping[str, str], origin: Invocation) -> dict[str, str]:
    """Return the checkpoint's choices of groups where none was typed now."""
    return {group: name for group, name in choices.items() if group not in _typed(origin)}


def _typed(origin: Invocation) -> dict[str, str]:
    """Keys of the overrides, without marks, and the overrides."""
    return {text.lstrip("+~").partition("=")[0]: text for text in origin.overrides}


def _merged(spec: RunSpec, saved: LoadedCheckpoint, origin: Invocation) -> tuple[RunSpec, bool]:
    """Return the checkpoint's spec with what was typed now over it, and whether this user composed
    all of it.

    What was typed is put over it before its interpolations are resolved, so that they read the
    checkpoint's values.
    """
    ours, theirs = dict(origin.composed_config or to_dict(spec)), dict(saved.content["spec"])
    typed = _typed(origin)
    if any(
        typed.get(p) and origin.choices.get(p) != saved.content["choices"].get(p) for p in PRESETS
    ):
        return spec, origin.is_trusted  # a preset sets keys anywhere
    here = {key: ours[key] for key in ("tracking", "mode", "strategy")}
    merged = {**ours, **theirs, **here}
    for key in typed:
        _copy(ours, merged, key.split("."))
    merged["checkpoint"] = {**ours["checkpoint"], **theirs.get("checkpoint", {}), "path": None}
    for key in [key for key in typed if key.startswith("checkpoint.")]:
        _copy(ours, merged, key.split("."))
    try:
        resolved = resolve_spec(OmegaConf.create(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(f"checkpoint.resume={saved.path}: {error}") from error
    own = checkpoint_file.is_own(saved.content)
    known = {group: [ours.get(group), getattr(spec, group)] for group in GROUPS}
    trusted_targets.check_trusted(
        to_dict(resolved), GROUPS, known, saved.path, "checkpoint.resume", own
    )
    return resolved, own and origin.is_trusted


def _copy(source: Mapping[str, Any], target: dict[str, Any], path: Sequence[str]) -> None:
    """Copy one dotted key, or remove it."""
    head, *rest = path
    if head not in source:
        target.pop(head, None)
    elif rest and isinstance(source[head], Mapping) and isinstance(target.get(head), Mapping):
        target[head] = dict(target[head])
        _copy(source[head], target[head], rest)
    else:
        target[head] = source[head]


def changed_settings(spec: RunSpec, saved: LoadedCheckpoint) -> dict[str, str]:
    """Keys whose values differ from the checkpoint's, as `old -> new`."""

    def flat(values: Mapping[str, Any]) -> dict[str, str]:
        return flatten(resolve_spec(OmegaConf.create(dict(values))))

    theirs, ours = flat(saved.content["spec"]), flatten(spec)
    ignored = ("checkpoint", "tracking")
    keys = [k for k in {**theirs, **ours} if k.partition(".")[0] not in ignored]
    return {
        k: f"{theirs.get(k, 'none')} -> {ours.get(k, 'none')}"
        for k in keys
        if theirs.get(k) != ours.get(k)
    }
