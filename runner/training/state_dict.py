"""Collect the state that a checkpoint stores, and restore it on resume.

A resumed run may change hyperparameters, the schedule, the precision of the weights or the number
of processes: what cannot be restored as it was becomes a sentence for the terminal.
"""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.core import (
    ConfigError,
    LoadedCheckpoint,
    RunCallback,
    RunSpec,
    TrainState,
    batch_layout,
    checkpoint_file,
    random_streams,
    signature,
    tensor_facts,
    train_state,
)
from runner.precision.weight_updates import Nearest
from runner.precision.wide_step import drop_foreign_state, kept_dtype
from runner.training import schedules
from runner.training.own_state import OWN_UPDATES_KEY
from runner.training.setup import optimizer_nodes
from runner.training.weight_average import AVERAGE_KEY

# Keys of a group that say how an optimizer computes: what fits this run's dtypes and device.
_KERNEL_KEYS = {"fused", "foreach", "capturable", "differentiable"}
# Applied steps that a new schedule is advanced over; a damaged file may count any number.
_MAX_REPLAYED_STEPS = 10**7
# State that torch keeps in float32, whatever the dtype of the parameters.
_FLOAT32_COUNTERS = ("step", "mu_product", "mu", "eta")
# Keys of a group that are learning rates; schedules add all but the first.
_LEARNING_RATE_KEYS = {"lr", "initial_lr", "max_lr", "min_lr"}
MISFIT_ERRORS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)
"""Errors of torch and of the callbacks where a checkpoint's state is not of the expected form."""


def state_dict(state: TrainState, callbacks: Sequence[RunCallback]) -> dict[str, Any]:
    """Return the part of the state that only a bit-exact resume needs, not an evaluation."""
    return {
        "position": state.position,
        "evaluated": state.last_evaluation_step,
        "stagnant": state.stagnant_share,
        "rng": state.strategy.gather_object(random_streams.rng_state(state.device)),
        "callbacks": {callback.key: callback.state_dict() for callback in callbacks},
    }


def starting_point(saved: LoadedCheckpoint | None) -> batch_layout.StartingPoint:
    """Return where in the training data a run begins: where that of the checkpoint was, if any.

    Raises:
        ConfigError: the checkpoint does not say it in numbers that fit.
    """
    if saved is None:
        return batch_layout.FIRST_STEP
    content = saved.content
    try:
        size = content["spec"]["train"]["batch_size"]
        # Where no loader was, micro-batches are counted.
        reads = content.get("reads", [[content["position"] * size, size]])
        reads = tuple((int(taken), int(size)) for taken, size in reads)
        # More would overflow an index; a damaged file may count any number.
        if not all(0 <= taken < 2**48 and size > 0 for taken, size in reads):
            raise ValueError(f"reads={reads}")
        return batch_layout.StartingPoint(content["step"], max(1, content["epoch"]), reads)
    except MISFIT_ERRORS as error:
        raise _foreign_checkpoint(saved, error) from error


def restore(
    state: TrainState, saved: LoadedCheckpoint, spec: RunSpec, callbacks: Sequence[RunCallback]
) -> list[str]:
    """Restore everything but the weights.

    Args:
        state: of the run; its weights are the checkpoint's.
        saved: the checkpoint.
        spec: of the run.
        callbacks: of the run.

    Returns:
        A sentence for the terminal about each part that could not be restored as it was.

    Raises:
        ConfigError: the checkpoint's optimizers are not this run's.
    """
    notes = restore_optimizers(state, saved, spec)
    try:
        content = saved.content
        state.precision.load_state_dict(state.plain_model, content["precision_state"])
        state.step = content["step"]
        state.epoch = content["epoch"]
        state.position = starting_point(saved).examples
        state.skipped = content["skipped_steps"]
        state.last_evaluation_step = content["evaluated"]
        # Elsewhere no step counts the share again.
        state.stagnant_share = content["stagnant"] if state.precision.loses_updates else None
        notes += _restore_hooks(state, content)
        _restore_callbacks(callbacks, content["callbacks"])
        generators = content["rng"]
        rank = state.strategy.rank.index
        # A run may resume with more processes than before. The further ones have no saved state and
        # continue with the seeds that they started with.
        if rank < len(generators):
            random_streams.set_rng_state(generators[rank], state.device)
        average = content.get(AVERAGE_KEY)
        ours = state.evaluated
        if ours is None or not ours.decay:
            if average is not None and average["decay"]:
                notes.append("the checkpoint's averaged weights are dropped")
        elif average is None:
            notes.append("the average of the weights begins here: the checkpoint holds none")
        else:
            ours.load_state_dict(average)
        notes += _restore_scale(state, content, spec)
    except MISFIT_ERRORS as error:
        raise _foreign_checkpoint(saved, error) from error
    return notes


def _restore_hooks(state: TrainState, content: Mapping[str, Any]) -> list[str]:
    """Restore the hooks of the steps; return a sentence where another update rule, or one of
    another dtype, has kept something beside the tensors that the model changes."""
    kept = content.get(OWN_UPDATES_KEY, {})
    rule = content["spec"]["precision"].get("update", Nearest.name)
    ours = (state.precision.name, state.precision.update)
    is_foreign = bool(kept) and (content["precision"], rule) != ours
    state.hooks.restore({**content, OWN_UPDATES_KEY: {} if is_foreign else kept})
    if not is_foreign:
        return []
    return [
        "what precision.update kept beside tensors that the model changes is dropped: the "
        "precision, or its update, has changed"
    ]


def _foreign_checkpoint(saved: LoadedCheckpoint, error: Exception) -> ConfigError:
    return ConfigError(
        f"checkpoint.resume={saved.path} was not written by this runner: "
        f"{type(error).__name__}: {error}. Type init.weights=<it> to start from its weights."
    )


def _restore_callbacks(
    callbacks: Sequence[RunCallback], content: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore the state of each callback from what a checkpoint holds of all of them."""
    for callback in callbacks:
        saved = content.get(callback.key)
        current = callback.state_dict()
        if saved is None and callback.is_in_every_run:
            raise KeyError(f"callbacks.{callback.key}")
        if saved is None:
            # The first run had no such callback: this command asked for it, for example with
            # train.early_stop=3, and it begins with no history. Its load_state_dict is still
            # called, so that it knows of the resume.
            saved = {}
        for name, value in saved.items():
            kinds = {type(value), type(current.get(name))}
            # None stands for a value that there was not yet, and a whole float may be stored as an
            # int. A value of another type would be accepted here and break the run at its next use.
            if len(kinds) > 1 and type(None) not in kinds and kinds != {int, float}:
                raise TypeError(f"callbacks.{callback.key}.{name} is of another kind")
        callback.load_state_dict(saved)


def _restore_scale(state: TrainState, content: Mapping[str, Any], spec: RunSpec) -> list[str]:
    """Restore the loss scale; return a sentence if it does not continue as it was."""
    saved = content["loss_scale"]
    fresh = state.scale.state_dict()
    # Another precision begins with its own scale, or has none.
    if not saved and not fresh:
        return []
    if not saved:
        return [f"the loss scale begins at {fresh['scale']:g}: the checkpoint holds none"]
    if not fresh:
        name = state.precision.name
        value = saved.get("scale")
        return [f"the checkpoint's loss scale of {value} is dropped: precision={name} has none"]
    ours = spec.precision.get("loss_scale") or {}
    theirs = content["spec"]["precision"].get("loss_scale") or {}
    before = float(saved["scale"])
    # An init_scale that differs from the checkpoint's config was typed for this resume, and wins.
    if ours.get("fixed") is None and ours.get("init_scale") != theirs.get("init_scale"):
        return [f"the loss scale begins at {fresh['scale']:g}, as typed; it was {before:g}"]
    state.scale.load_state_dict(saved)
    now = state.scale.state_dict()["scale"]
    if now != before:
        return [f"the loss scale is fixed at {now:g}; it was {before:g}"]
    return []


def checkpoint_state_dict(
    state: TrainState,
    spec: RunSpec,
    choices: Mapping[str, str] = {},
    metrics: Mapping[str, float] = {},
    resume_state: Mapping[str, Any] = {},
    is_own_spec: bool = False,
) -> dict[str, Any]:
    """Return the content of a checkpoint; its tensors are those of the run, not copies.

    Args:
        state: schedules that wait for a found-inf flag are advanced.
        spec: of the run.
        choices: option chosen in each config group, for the labels of evaluations.
        metrics: of an evaluation of these very weights, where there was one.
        resume_state: the further state that a resume needs, see state_dict().
        is_own_spec: this user's commands composed the spec, which is signed with the user's key.
    """
    # The tracking section may hold credentials of a store, and says nothing about the training.
    stored_spec = {**spec.redacted_dict(), "tracking": {}}
    # Where the data take names of classes, those of the training travel with the weights.
    names = resume_state.get("learned", {}).get("classes")
    if names and "class_names" in stored_spec["data"]:
        stored_spec["data"]["class_names"] = names
    model = state.plain_model
    average = {}
    if state.evaluated is not None:
        state.release_weights()
        average = {AVERAGE_KEY: state.evaluated.state_dict()}
    # A schedule that still waits for its found-inf flag would be stored a step late.
    for scheduled in state.optimizers:
        scheduled.advance_schedule()
    return {
        **resume_state,
        "format": checkpoint_file.FORMAT,
        "spec": stored_spec,
        "signature": signature.sign(checkpoint_file.SPEC_SIGNATURE_PURPOSE, repr(stored_spec))
        if is_own_spec
        else "",
        "choices": dict(choices),
        "precision": state.precision.name,
        "layout": state.precision.layout,
        "bypassed": dict(state.plan.bypassed),
        "experts": dict(state.plan.expert_layouts),
        "precision_state": state.precision.state_dict(model),
        "metrics": dict(metrics),
        "step": state.step,
        "epoch": state.epoch,
        "skipped_steps": state.skipped,
        "model": model.state_dict(),
        "optimizers": [scheduled.optimizer.state_dict() for scheduled in state.optimizers],
        "schedulers": [
            part.scheduler.state_dict() if part.scheduler else {} for part in state.optimizers
        ],
        "planned_steps": max((part.planned_steps for part in state.optimizers), default=0),
        "loss_scale": state.scale.state_dict(),
        **state.hooks.saved_content(),
        **average,
    }


def restore_optimizers(state: TrainState, saved: LoadedCheckpoint, spec: RunSpec) -> list[str]:
    """Restore optimizers and schedules from a checkpoint.

    Returns:
        A sentence for the terminal about each part that changes.

    Raises:
        ConfigError: the checkpoint's optimizers are not this run's.
    """
    content = saved.content
    notes = []
    theirs = content["spec"]
    # In the checkpoint; of a sharded weight it says nothing.
    old_dtypes = {
        id(parameter): content["model"][name].dtype
        for name, parameter in state.plain_model.named_parameters()
        if isinstance(content["model"].get(name), Tensor)
    }
    applied_steps = content["step"] - content["skipped_steps"]
    parts = checkpoint_file.shards_folder(saved.path)
    try:
        # Whether the checkpoint's run chose how its state is kept: by a rule, or a dtype.
        nodes = optimizer_nodes(theirs["optimizer"])
        had_rules = theirs["precision"].get("update", Nearest.name) != Nearest.name
        had_rules |= any(node.get("state_dtype") is not None for _, node in nodes)
        rows = zip(
            state.optimizers,
            content["optimizers"],
            content["schedulers"],
            _changed_hyperparameters(theirs["optimizer"], spec.optimizer),
            strict=True,
        )
        for scheduled, optimizer, scheduler, changed in rows:
            if state.strategy.shards:
                values = checkpoint_file.load_sharded(optimizer["state"], scheduled.params, parts)
                optimizer = {**optimizer, "state": values}
            else:
                optimizer = checkpoint_file.load_full(optimizer, parts)
            is_same = schedules.is_same_schedule(
                theirs["scheduler"], spec.scheduler, scheduler, scheduled.scheduler
            )
            is_new_schedule = not is_same
            if content.get("planned_steps") != scheduled.planned_steps:
                is_new_schedule |= schedules.follows_run_length(spec.scheduler)
                if theirs["scheduler"] == spec.scheduler:
                    notes += _own_length(scheduled, spec.scheduler)
            notes += _load_optimizer(
                scheduled.optimizer, optimizer, old_dtypes, is_new_schedule, had_rules
            )
            if is_new_schedule:
                taken = schedules.taken_steps(scheduler, is_same, applied_steps)
                notes.append(_begin_schedule(scheduled, taken, is_same))
                continue
            typed = _changed_values(theirs["scheduler"], spec.scheduler)
            schedules.load_schedule(scheduled.scheduler, scheduler, typed)
            # After the schedule, whose state holds the learning rates that it continues from.
            _apply_hyperparameters(scheduled.optimizer, scheduled.scheduler, changed)
    except MISFIT_ERRORS as error:
        raise ConfigError(
            f"checkpoint.resume={saved.path}: its optimizer state does not fit: {error}. Resume "
            "with the optimizer that it was trained with, or type init.weights=<it> to start a new "
            "run from its weights."
        ) from error
    return [*dict.fromkeys(notes)]  # several optimizers report one change once


def _changed_hyperparameters(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> list[dict[str, tuple[Any, Any]]]:
    """Return, for each optimizer, the hyperparameters that differ from the checkpoint's config.

    Returns:
        (old, new) by the hyperparameter's name, in the order in which optimizers are built.
    """
    saved = dict(optimizer_nodes(theirs))
    return [_changed_values(saved[name], node) for name, node in optimizer_nodes(ours)]


def _changed_values(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return (old, new) by the key of each value of a node that differs from the checkpoint's."""
    pairs = {key: (theirs.get(key), value) for key, value in ours.items()}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _load_optimizer(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    old_dtypes: Mapping[int, torch.dtype],
    keep_hyperparameters: bool,
    had_rules: bool,
) -> list[str]:
    """Load one optimizer's state; state in its parameter's dtype follows a change of that dtype.

    Args:
        optimizer: made for this run.
        saved: its state of the checkpoint.
        old_dtypes: dtype of each parameter in the checkpoint, by id.
        keep_hyperparameters: the groups keep this run's values, which a new schedule will change.
        had_rules: the checkpoint's run chose the dtype of its state, by a rule or by its name.

    Returns:
        A sentence for each tensor that was cast, and for what was dropped; one may be there twice.
    """
    saved, dropped = drop_foreign_state(optimizer, saved)
    groups = []
    bases = type(optimizer).__mro__
    settings = {name for kind in bases for name in inspect.signature(kind.__init__).parameters}
    for fresh, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        # Counters that an optimizer keeps in its groups are no settings, and continue.
        counters = {"params"} | (optimizer.defaults.keys() - settings)
        keys = fresh.keys() - counters if keep_hyperparameters else fresh.keys() & _KERNEL_KEYS
        ours = {key: fresh[key] for key in keys}
        groups.append({**group, **ours})
    optimizer.load_state_dict({**saved, "param_groups": groups})
    notes = []
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    # torch casts all state to the dtype of its parameter. That would round state which was wider
    # on purpose, so each tensor is set again from the checkpoint.
    for index, values in saved["state"].items():
        p, group = params[index]
        loaded = optimizer.state[p]
        before = old_dtypes.get(id(p), p.dtype)
        is_wide = group.get("optim_bits") == 32 or getattr(optimizer, "wide_state", False)
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            # A fresh optimizer would make this state in the parameter's new dtype.
            follows_parameter = value.dtype == before and not is_wide
            is_cast = follows_parameter and before != p.dtype and key not in _FLOAT32_COUNTERS
            dtype = p.dtype if is_cast else kept_dtype(optimizer, key, value, p, had_rules)
            if dtype != value.dtype:
                names = map(tensor_facts.dtype_name, (value.dtype, dtype))
                notes.append(f"the optimizer's state is cast from {' to '.join(names)}")
            if loaded[key].dtype != dtype:
                loaded[key] = value.clone().to(loaded[key].device, dtype)
    for key in sorted(dropped):
        kind = key.replace("_", " ")
        notes.append(f"the checkpoint's {kind}s are dropped: precision.update has changed")
    return notes


def _own_length(scheduled: train_state.ScheduledOptimizer, node: Mapping[str, Any]) -> list[str]:
    """Return that a schedule does not follow the run's length; nothing for one that has none."""
    plain = schedules.schedule_after_warmup(scheduled.scheduler)
    if (
        plain is None
        or isinstance(plain, schedules.EvaluationSchedule)
        or schedules.follows_run_length(node)
    ):
        return []
    return [
        f"{type(plain).__name__} does not follow the run's length of {scheduled.planned_steps} "
        "steps: of its settings no T_max, total_steps or total_iters is null"
    ]


def _begin_schedule(
    scheduled: train_state.ScheduledOptimizer, applied_steps: int, is_longer: bool
) -> str:
    """Advance a schedule to the step of the run, where the checkpoint's own is another one.

    Args:
        scheduled: its schedule is at its beginning.
        applied_steps: that it is advanced by.
        is_longer: whether the run's length alone makes it another one.
    """
    if scheduled.scheduler is None:
        return f"the learning rate is constant at {scheduled.lr:g}: the checkpoint had a schedule"
    if not 0 <= applied_steps <= _MAX_REPLAYED_STEPS:
        raise ValueError(f"it counts {applied_steps} steps")
    # Stepped and not computed: schedules of any class define their rates by step() alone. torch
    # warns that the schedule steps before its optimizer.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(applied_steps):
            scheduled.scheduler.step()
    names = [type(part).__name__ for part in schedules.plain_schedules(scheduled.scheduler)]
    name = names[0] if names else "the constant rate"
    if isinstance(scheduled.scheduler, schedules.WarmUp):
        name += f" after {scheduled.scheduler.steps} steps of warm-up"
    reason = "is not the checkpoint's schedule"
    if is_longer:
        reason = f"follows the run's length of {scheduled.planned_steps} steps"
    return f"{name} {reason}: it is taken up at its step {applied_steps}"


def _apply_hyperparameters(
    optimizer: Optimizer, scheduler: Any, changed: Mapping[str, tuple[Any, Any]]
) -> None:
    """Set the hyperparameters that were typed for the resume."""
    for index, group in enumerate(optimizer.param_groups):
        own = group.get("own_options", ())
        for key, (old, new) in changed.items():
            if key in own:
                continue
            # A schedule may have changed the rate since the start, so the new rate enters as a
            # ratio: the schedule continues as it would from a start at the new rate.
            if key == "lr" and isinstance(old, int | float) and old:
                for rate in _LEARNING_RATE_KEYS & group.keys():
                    group[rate] *= new / old
                if isinstance(scheduler, schedules.WarmUp):
                    scheduler.scale_rate(index, new / old)
            elif key in group:
                group[key] = new
    # torch's schedules keep a copy of the initial rates.
    for part in schedules.plain_schedules(scheduler):
        if "lr" in changed and hasattr(part, "base_lrs"):
            part.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
