"""Collect the state that a checkpoint stores, and restore it on resume."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.checkpoint import sharded_tensors
from runner.checkpoint.checkpoint_file import _SIGNED, FORMAT, LoadedCheckpoint, shards_folder
from runner.config.resolve import redacted_dict
from runner.config.schema import RunSpec
from runner.config.signature import sign
from runner.training.callbacks.callback import Callback
from runner.training.optimizers import LENGTHS, optimizer_nodes
from runner.training.state import ScheduledOptimizer, TrainState
from runner.utils.errors import ConfigError
from runner.utils.reproducibility import rng_state, set_rng_state

_KERNELS = ("fused", "foreach", "capturable", "differentiable")
"""Keys of a group that say how an optimizer computes: what fits this run's dtypes and device."""
_MOST_STEPS = 10**7
"""Applied steps that a schedule is brought over; a file from elsewhere may count any number."""
_COUNTS = ("step", "mu_product", "mu", "eta")
"""State that torch keeps in float32 beside parameters of any dtype."""
_OBSERVERS_OF_0_1 = {
    "Tally": "summary",
    "Recorder": "metric_logger",
    "Guard": "guard",
    "EarlyStop": "early_stopping",
    "Checkpoints": "checkpointing",
}
"""Names of the observers' states in checkpoints of version 0.1, and their keys since."""
_RATES = {"lr", "initial_lr", "max_lr", "min_lr"}
"""Keys of a group that are learning rates, of schedules, too."""
_MISFITS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def state_dict(state: TrainState, observers: Sequence[Callback]) -> dict[str, Any]:
    """Return the state beside the weights that a bit-exact resume needs."""
    return {
        "position": state.position,
        "evaluated": state.last_evaluation_step,
        "stagnant": state.stagnant_share,
        "rng": state.strategy.gather_object(rng_state(state.device)),
        "observers": {o.key: o.state_dict() for o in observers},
    }


def restore(
    state: TrainState,
    saved: LoadedCheckpoint,
    spec: RunSpec,
    observers: Sequence[Callback],
    typed: Collection[str] = (),
) -> list[str]:
    """Restore everything but the weights.

    Args:
        state: of the run; its weights are the checkpoint's.
        saved: the checkpoint.
        spec: of the run.
        observers: of the run.
        typed: keys of this command's overrides.

    Returns:
        What could not come back as it was, one sentence each, for the terminal.

    Raises:
        ConfigError: the checkpoint's optimizers are not this run's.
    """
    notes = _restore_optimizers(state, saved, spec)
    try:
        _restore_rest(state, saved.content, observers)
        notes += _restore_scale(state, saved.content, spec, typed)
    except _MISFITS as error:
        raise ConfigError(
            f"checkpoint.resume={saved.path} was not written by this runner: "
            f"{type(error).__name__}: {error}. Type init.weights=<it> to start a new run from its "
            "weights."
        ) from error
    return notes


def _restore_rest(
    state: TrainState, content: Mapping[str, Any], observers: Sequence[Callback]
) -> None:
    state.precision.load_state_dict(state.plain_model, content["precision_state"])
    state.step, state.epoch = content["step"], content["epoch"]
    state.position, state.skipped = content["position"], content["skipped_steps"]
    state.last_evaluation_step, state.stagnant_share = content["evaluated"], content["stagnant"]
    _restore_observers(observers, content["observers"])
    streams, rank = _streams(content["rng"]), state.strategy.place.rank
    if rank < len(streams):  # more processes than before go on with seeds of their own
        set_rng_state(streams[rank], state.device)


def _restore_observers(
    observers: Sequence[Callback], content: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore the state of each observer from what a checkpoint holds of all of them."""
    states = {_OBSERVERS_OF_0_1.get(name, name): state for name, state in content.items()}
    for observer in observers:
        theirs, ours = states.get(observer.key), observer.state_dict()
        if theirs is None and observer.is_in_every_run:
            raise KeyError(f"observers.{observer.key}")
        if theirs is None:
            # The first run had no such observer: this command asked for it, for example with
            # train.early_stop=3, and it begins with no history. Its load_state_dict is still
            # called, so that it knows of the resume.
            theirs = {}
        # Version 0.1 stored the summary's attributes, of which some begin with an underscore.
        theirs = {name.removeprefix("_"): value for name, value in theirs.items()}
        if odd := [name for name in theirs if not _alike(theirs[name], ours.get(name))]:
            raise TypeError(f"observers.{observer.key}.{odd[0]} is of another kind")
        observer.load_state_dict(theirs)


def _restore_scale(
    state: TrainState, content: Mapping[str, Any], spec: RunSpec, typed: Collection[str]
) -> list[str]:
    """Restore the loss scale. An init_scale that differs from the checkpoint's config was typed
    anew and wins; another precision begins with its own scale, or has none."""
    kept, fresh = content["loss_scale"], state.scale.state_dict()
    if not kept or not fresh:
        if fresh:
            return [f"the loss scale begins at {fresh['scale']:g}: the checkpoint holds none"]
        name = state.precision.name
        dropped = f"the checkpoint's loss scale of {kept.get('scale')} is dropped: precision={name}"
        return [f"{dropped} has none"] if kept else []
    ours, theirs = _scale_keys(spec.precision), _scale_keys(content["spec"]["precision"])
    before, key = float(kept["scale"]), "precision.loss_scale.init_scale"
    if ours.get("fixed") is None and ours.get("init_scale") != theirs.get("init_scale"):
        return [f"the loss scale begins at {fresh['scale']:g}, as typed; it was {before:g}"]
    state.scale.load_state_dict(kept)
    if (now := state.scale.state_dict()["scale"]) != before:
        return [f"the loss scale is fixed at {now:g}; it was {before:g}"]
    if key in typed and ours.get("init_scale") != before:
        given = ours.get("init_scale")
        return [f"the loss scale continues at {before:g}: {key}={given} is where the run began"]
    return []


def _scale_keys(precision: Mapping[str, Any]) -> Mapping[str, Any]:
    return precision.get("loss_scale") or {}


def _streams(saved: Any) -> list[Mapping[str, Any]]:
    """Of each process; checkpoints of one process used to hold no list."""
    return saved if isinstance(saved, list) else [saved]


def _alike(one: Any, other: Any) -> bool:
    kinds = {type(one), type(other)}
    return len(kinds) == 1 or type(None) in kinds or kinds == {int, float}


def _restore_optimizers(state: TrainState, saved: LoadedCheckpoint, spec: RunSpec) -> list[str]:
    """Restore optimizers and schedules; what of them could not come back as it was."""
    content, notes = saved.content, dict[str, None]()
    theirs = content["spec"]
    was = _dtypes_before(state, content["model"])
    applied = content["step"] - content["skipped_steps"]
    try:
        other = theirs["scheduler"].get("_target_") != spec.scheduler.get("_target_")
        pairs = zip(
            state.optimizers,
            content["optimizers"],
            content["schedulers"],
            _changed(theirs["optimizer"], spec.optimizer),
            strict=True,
        )
        for scheduled, optimizer, scheduler, changed in pairs:
            parts = shards_folder(saved.path)
            if state.strategy.shards:
                held = sharded_tensors.load_sharded(optimizer["state"], scheduled.params, parts)
                optimizer = {**optimizer, "state": held}
            else:
                optimizer = sharded_tensors.load_full(optimizer, parts)
            notes |= dict.fromkeys(_load_optimizer(scheduled.optimizer, optimizer, was, other))
            if other:
                notes |= dict.fromkeys(_begin_schedule(scheduled, applied))
                continue
            if scheduled.scheduler is not None:
                _load_schedule(scheduled.scheduler, scheduler, theirs["scheduler"], spec.scheduler)
            _change(scheduled.optimizer, scheduled.scheduler, changed)
    except _MISFITS as error:
        raise ConfigError(
            f"checkpoint.resume={saved.path}: its optimizer state does not fit: {error}. Resume "
            "with the optimizer that it was trained with, or type init.weights=<it> to start a new "
            "run from its weights."
        ) from error
    return list(notes)


def _changed(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> list[dict[str, tuple[Any, Any]]]:
    """Hyperparameters that differ from the checkpoint's, as (old, new), of each optimizer."""
    pairs = [(theirs, ours)]
    if "_target_" not in ours:
        pairs = [(theirs[name], node) for name, node in optimizer_nodes(ours)]
    return [
        {key: (old.get(key), value) for key, value in new.items() if old.get(key) != value}
        for old, new in pairs
    ]


def _dtypes_before(state: TrainState, weights: Mapping[str, Any]) -> dict[int, torch.dtype]:
    """Return the dtype of each parameter in the checkpoint, by the id of the parameter."""
    found = {}
    for name, parameter in state.plain_model.named_parameters():
        if isinstance(weight := weights.get(name), Tensor):
            found[id(parameter)] = weight.dtype
    return found


def _load_optimizer(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    was: Mapping[int, torch.dtype],
    anew: bool,
) -> list[str]:
    """Load one optimizer's state, each tensor in the dtype that it had, where its parameter's is
    still the same. torch alone would cast all of it to the parameters' dtype.

    Args:
        optimizer: made for this run.
        saved: its state of the checkpoint.
        was: dtype of each parameter in the checkpoint, by id.
        anew: the groups keep this run's hyperparameters, which another schedule is to change.

    Returns:
        A sentence for each pair of dtypes that state was cast between.
    """
    groups = []
    for fresh, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        kernels = {key: fresh[key] for key in _KERNELS if key in fresh}
        hyper = {k: v for k, v in fresh.items() if k != "params"} if anew else kernels
        groups.append({**group, **hyper})
    optimizer.load_state_dict({**saved, "param_groups": groups})
    cast = set[tuple[torch.dtype, torch.dtype]]()
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for index, values in saved["state"].items():
        p, group = params[index]
        loaded, before = optimizer.state[p], was.get(id(p), p.dtype)
        wide = group.get("optim_bits") == 32 or getattr(optimizer, "wide_state", False)
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            follows = value.dtype == before != p.dtype and not wide and key not in _COUNTS
            dtype = p.dtype if follows else value.dtype
            if follows:
                cast.add((before, p.dtype))
            if loaded[key].dtype != dtype:
                loaded[key] = value.clone().to(loaded[key].device, dtype)
    return [f"the optimizer's state is cast from {_name(old)} to {_name(new)}" for old, new in cast]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load_schedule(
    scheduler: Any, saved: Mapping[str, Any], theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> None:
    """Restore a schedule; what was typed anew, and what follows from the run's length, counts."""
    anew = {key for key, value in ours.items() if theirs.get(key) != value}
    kept = {key: value for key, value in vars(scheduler).items() if key in {*LENGTHS, *anew}}
    scheduler.load_state_dict(saved)
    vars(scheduler).update(kept)


def _begin_schedule(scheduled: ScheduledOptimizer, applied: int) -> list[str]:
    """Bring a schedule that the checkpoint does not know to the step of the run."""
    if scheduled.scheduler is None:
        return [f"the learning rate is constant at {scheduled.lr:g}: the checkpoint had a schedule"]
    if not 0 <= applied <= _MOST_STEPS:
        raise ValueError(f"it counts {applied} steps")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the schedule steps before its optimizer
        for _ in range(applied):
            scheduled.scheduler.step()
    name = type(scheduled.scheduler).__name__
    return [f"{name} is not the checkpoint's schedule: it is taken up at its step {applied}"]


def _change(optimizer: Optimizer, scheduler: Any, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Set the hyperparameters that were typed for the resume.

    A schedule continues from a new learning rate as from the old one.
    """
    for group in optimizer.param_groups:
        for key, (old, new) in changed.items():
            if key == "lr" and isinstance(old, int | float) and old:
                for rate in _RATES & group.keys():
                    group[rate] *= new / old
            elif key in group:
                group[key] = new
    if scheduler is not None and "lr" in changed and hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]


def checkpoint_state_dict(
    state: TrainState,
    spec: RunSpec,
    choices: Mapping[str, str] = {},
    metrics: Mapping[str, float] = {},
    course: Mapping[str, Any] = {},
    own: bool = False,
) -> dict[str, Any]:
    """Return the content of a checkpoint; its tensors are those of the run, not copies.

    Args:
        state: schedules that wait for a found-inf flag are advanced.
        spec: of the run.
        choices: option chosen in each config group, for the labels of evaluations.
        metrics: of an evaluation of these very weights, where there was one.
        course: the state that a resume needs besides, see state_dict().
        own: this user's commands composed the spec, which is signed with the user's key.
    """
    kept = {**redacted_dict(spec), "tracking": {}}
    model = state.plain_model
    for scheduled in state.optimizers:
        scheduled.advance_schedule()
    return {
        **course,
        "format": FORMAT,
        "spec": kept,
        "signature": sign(_SIGNED, repr(kept)) if own else "",
        "choices": dict(choices),
        "precision": state.precision.name,
        "layout": state.precision.layout,
        "bypassed": dict(state.precision.bypassed),
        "precision_state": state.precision.state_dict(model),
        "metrics": dict(metrics),
        "step": state.step,
        "epoch": state.epoch,
        "skipped_steps": state.skipped,
        "model": model.state_dict(),
        "optimizers": [scheduled.optimizer.state_dict() for scheduled in state.optimizers],
        "schedulers": [d.scheduler.state_dict() if d.scheduler else {} for d in state.optimizers],
        "loss_scale": state.scale.state_dict(),
    }
