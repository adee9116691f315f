"""Going on where a run was cut: what a checkpoint keeps beside the weights, and taking it back."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer

from runner import checkpoint, trust
from runner.alone import at_work
from runner.build import LENGTHS
from runner.checkpoint import Saved
from runner.config import flatten, resolve, to_dict
from runner.errors import ConfigError
from runner.manifest import FILE as MANIFEST
from runner.observers.base import Observer
from runner.result import RunResult
from runner.rng import rng_state, set_rng_state
from runner.spec import AUTO, Origin, RunSpec
from runner.state import TrainState

PRESETS = ("experiment", "debug", "sweep")
"""Groups that set keys anywhere."""
GROUPS = ("precision", "model", "adapter", "data", "task", "optimizer", "scheduler")
"""Groups whose targets a checkpoint names."""
_MISFITS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


class Resumption(NamedTuple):
    """A run to go on with: its folder, its checkpoint, and what to run now."""

    folder: Path
    saved: Saved
    spec: RunSpec
    origin: Origin


def begin(spec: RunSpec, origin: Origin, out: Path, console: Console) -> Resumption | None:
    """The run that checkpoint.resume names, with the keys that were typed now over its own; None
    where there is nothing to go on with: none is named, or it is `auto` and the run begins.

    Args:
        spec: as composed.
        origin: what was typed.
        out: this run's own folder; `auto` looks into it, `last` beside it.
        console: told of what was passed over.

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
        console.print(line, markup=False)
    return found


def _own(spec: RunSpec, origin: Origin, out: Path, console: Console) -> Resumption | None:
    """The run in its own folder, if it left a checkpoint that is whole; a job of a sweep only as
    the very same job, for a search may ask for another one."""
    checkpoints, told = out / "checkpoints", list[str]()
    if not any(checkpoints.glob("step-*.pt")):
        if origin.sweep is None:
            console.print(f"{out} holds no checkpoint: the run begins.", markup=False)
        return None
    try:
        found = _found(spec, origin, str(out), told)
    except ConfigError as error:
        if not told:  # none of them is damaged: what was typed is wrong
            raise
        found, reason = None, str(error)
    else:
        changed = changes(found.spec, found.saved) if origin.sweep else {}
        found, reason = (None, f"it was another job: {changed}") if changed else (found, "")
    if found is None:
        told.append(f"starts over: {reason}")
        checkpoint.set_aside(checkpoints, -1)
    for line in told:
        console.print(line, markup=False)
    return found


def _found(spec: RunSpec, origin: Origin, where: str, told: list[str]) -> Resumption:
    """The run of a file, a folder or an id."""
    saved = checkpoint.newest(where, spec.tracking.get("uri"), "checkpoint.resume", told)
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
    choices = {**origin.choices, **_kept(saved.content["choices"], origin)}
    merged = _merged(spec, saved, origin)
    if problem := _behind(merged, saved):
        raise ConfigError(f"checkpoint.resume={where}: {problem}")
    return Resumption(folder, saved, merged, replace(origin, choices=choices))


def _newest_run(out: Path, told: list[str]) -> Path:
    """The newest run beside `out` that was not finished and left a checkpoint."""
    runs = [path.parent for path in out.parent.glob("*/checkpoints") if path.parent != out]
    for run in sorted(runs, key=lambda path: path.name, reverse=True):
        if at_work(run):
            told.append(f"passed over {run}: a command is at work there")
        elif _finished(run):
            told.append(f"passed over {run}: it is finished")
        elif any(run.glob("checkpoints/step-*.pt")):
            return run
        else:
            told.append(f"passed over {run}: it has no checkpoint")
    over = "".join(f" {text[0].upper()}{text[1:]}." for text in told[:3])
    raise ConfigError(
        f"checkpoint.resume=last: no run in {out.parent} was cut and left a checkpoint.{over} Type "
        "checkpoint.resume=<run folder, .pt file or MLflow run id>, and save with "
        "checkpoint.every_steps=<n>."
    )


def _behind(spec: RunSpec, saved: Saved) -> str:
    """Why there is nothing left to train; empty where there may be."""
    step, epoch, most = saved.content["step"], saved.content["epoch"], spec.train.max_steps
    if most is not None and most < step:
        return f"the run is at step {step} already. Type train.max_steps=<more than that>."
    if most is None and spec.train.epochs < epoch:
        return f"the run is in epoch {epoch} already. Type train.epochs=<more than that>."
    return ""


def _finished(run: Path) -> bool:
    with suppress(ValueError, OSError):  # none, or damaged
        return RunResult.read(run).status == "finished"
    return False


def _kept(choices: Mapping[str, str], origin: Origin) -> dict[str, str]:
    """The checkpoint's choices of groups where none was typed now."""
    return {group: name for group, name in choices.items() if group not in _typed(origin)}


def _typed(origin: Origin) -> dict[str, str]:
    """Keys of the overrides, without marks, and the overrides."""
    return {text.lstrip("+~").partition("=")[0]: text for text in origin.overrides}


def _merged(spec: RunSpec, saved: Saved, origin: Origin) -> RunSpec:
    """The checkpoint's own spec, and over it what was typed now."""
    ours, theirs = to_dict(spec), dict(saved.content["spec"])
    typed = _typed(origin)
    if any(typed.get(p) and origin.choices.get(p) != saved.content["choices"].get(p)
           for p in PRESETS):  # fmt: skip
        return spec  # a preset sets keys anywhere
    merged = {**ours, **theirs, "tracking": ours["tracking"], "mode": ours["mode"]}
    for key in typed:
        _copy(ours, merged, key.split("."))
    merged["checkpoint"] = {**ours["checkpoint"], **theirs.get("checkpoint", {}), "path": None}
    for key in [key for key in typed if key.startswith("checkpoint.")]:
        _copy(ours, merged, key.split("."))
    trust.check(merged, GROUPS, ours, saved.path, "checkpoint.resume")
    try:
        return resolve(OmegaConf.create(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(f"checkpoint.resume={saved.path}: {error}") from error


def _copy(source: Mapping[str, Any], target: dict[str, Any], path: Sequence[str]) -> None:
    """Takes one dotted key over, or out."""
    head, *rest = path
    if head not in source:
        target.pop(head, None)
    elif rest and isinstance(source[head], Mapping) and isinstance(target.get(head), Mapping):
        target[head] = dict(target[head])
        _copy(source[head], target[head], rest)
    else:
        target[head] = source[head]


def capture(state: TrainState, observers: Sequence[Observer]) -> dict[str, Any]:
    """What a checkpoint keeps so that the run goes on as if it had not been cut."""
    return {
        "position": state.position,
        "evaluated": state.evaluated,
        "stagnant": state.stagnant,
        "rng": rng_state(state.device),
        "observers": {type(o).__name__: o.state_dict() for o in observers},
    }


def restore(state: TrainState, saved: Saved, spec: RunSpec, observers: Sequence[Observer]) -> None:
    """Put everything but the weights back.

    Raises:
        ConfigError: the checkpoint's optimizers or loss scale are not this run's.
    """
    _restore_optimizers(state, saved, spec)
    try:
        _restore_rest(state, saved.content, observers)
    except _MISFITS as error:
        raise ConfigError(
            f"checkpoint.resume={saved.path} was not written by this runner: "
            f"{type(error).__name__}: {error}. Type init.weights=<it> to start a new run from its "
            "weights."
        ) from error


def _restore_rest(
    state: TrainState, content: Mapping[str, Any], observers: Sequence[Observer]
) -> None:
    state.precision.load_state_dict(state.plain_model, content["precision_state"])
    state.scale.load_state_dict(content["loss_scale"])
    state.step, state.epoch = content["step"], content["epoch"]
    state.position, state.skipped = content["position"], content["skipped_steps"]
    state.evaluated, state.stagnant = content["evaluated"], content["stagnant"]
    for observer in observers:
        theirs, ours = content["observers"].get(type(observer).__name__, {}), observer.state_dict()
        if odd := [key for key in theirs if not _alike(theirs[key], ours.get(key))]:
            raise TypeError(f"{type(observer).__name__}.{odd[0]} is of another kind")
        observer.load_state_dict(theirs)
    set_rng_state(content["rng"], state.device)


def _alike(one: Any, other: Any) -> bool:
    kinds = {type(one), type(other)}
    return len(kinds) == 1 or type(None) in kinds or kinds == {int, float}


def _restore_optimizers(state: TrainState, saved: Saved, spec: RunSpec) -> None:
    theirs = saved.content["spec"]
    changed = {
        key: (theirs["optimizer"].get(key), value)
        for key, value in spec.optimizer.items()
        if theirs["optimizer"].get(key) != value
    }
    try:
        pairs = zip(state.driven, saved.content["optimizers"], saved.content["schedulers"],
                    strict=True)  # fmt: skip
        for driven, optimizer, scheduler in pairs:
            lengths = {k: getattr(driven.scheduler, k) for k in LENGTHS
                       if hasattr(driven.scheduler, k)}  # fmt: skip
            _load_optimizer(driven.optimizer, optimizer)
            if driven.scheduler is not None and theirs["scheduler"] == spec.scheduler:
                driven.scheduler.load_state_dict(scheduler)
                vars(driven.scheduler).update(lengths)
            _change(driven.optimizer, driven.scheduler, changed)
    except _MISFITS as error:
        raise ConfigError(
            f"checkpoint.resume={saved.path}: its optimizer state does not fit: {error}. Resume "
            "with the optimizer that it was trained with, or type init.weights=<it> to start a new "
            "run from its weights."
        ) from error


def _load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """torch casts the state to the parameters' dtype; here each tensor stays what it was."""
    optimizer.load_state_dict(dict(saved))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in saved["state"].items():
        loaded = optimizer.state[params[index]]
        for key, value in values.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.clone().to(loaded[key].device)


def _change(optimizer: Optimizer, scheduler: Any, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Hyperparameters that were typed anew; a schedule goes on from a new learning rate as from
    the old one."""
    for group in optimizer.param_groups:
        for key, (old, new) in changed.items():
            if key == "lr" and isinstance(old, float) and old:
                group["lr"] *= new / old
                if "initial_lr" in group:
                    group["initial_lr"] *= new / old
            elif key in group:
                group[key] = new
    if scheduler is not None and "lr" in changed and hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]


def changes(spec: RunSpec, saved: Saved) -> dict[str, str]:
    """Keys whose values differ from the checkpoint's, as `old -> new`."""

    def flat(values: Mapping[str, Any]) -> dict[str, str]:
        return flatten(resolve(OmegaConf.create(dict(values))))

    theirs, ours = flat(saved.content["spec"]), flatten(spec)
    ignored = ("checkpoint", "tracking")
    keys = [k for k in {**theirs, **ours} if k.partition(".")[0] not in ignored]
    return {
        k: f"{theirs.get(k, 'none')} -> {ours.get(k, 'none')}"
        for k in keys if theirs.get(k) != ours.get(k)
    }  # fmt: skip
