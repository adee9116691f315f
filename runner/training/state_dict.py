"""Collect the state that a checkpoint stores, and restore it on resume."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from runner.checkpoint.checkpoint_file import (
    FORMAT,
    SPEC_SIGNATURE_PURPOSE,
    LoadedCheckpoint,
)
from runner.config.resolve import redacted_dict
from runner.config.schema import RunSpec
from runner.config.signature import sign
from runner.training.callbacks.callback import RunCallback
from runner.training.optimizer_state import MISFIT_ERRORS, restore_optimizers, schedule_state
from runner.training.state import TrainState
from runner.training.weight_average import AVERAGE_KEY
from runner.utils.errors import ConfigError
from runner.utils.reproducibility import rng_state, set_rng_state


def state_dict(state: TrainState, callbacks: Sequence[RunCallback]) -> dict[str, Any]:
    """Return the part of the state that only a bit-exact resume needs, not an evaluation."""
    return {
        "position": state.position,
        "evaluated": state.last_evaluation_step,
        "stagnant": state.stagnant_share,
        "rng": state.strategy.gather_object(rng_state(state.device)),
        "callbacks": {callback.key: callback.state_dict() for callback in callbacks},
    }


def restore(
    state: TrainState,
    saved: LoadedCheckpoint,
    spec: RunSpec,
    callbacks: Sequence[RunCallback],
    typed_keys: Collection[str] = (),
) -> list[str]:
    """Restore everything but the weights.

    Args:
        state: of the run; its weights are the checkpoint's.
        saved: the checkpoint.
        spec: of the run.
        callbacks: of the run.
        typed_keys: keys of this command's overrides.

    Returns:
        A sentence for the terminal about each part that could not be restored as it was.

    Raises:
        ConfigError: the checkpoint's optimizers are not this run's.
    """
    notes = restore_optimizers(state, saved, spec)
    try:
        _restore_progress(state, saved.content, callbacks)
        notes += _restore_average(state, saved.content)
        notes += _restore_scale(state, saved.content, spec, typed_keys)
    except MISFIT_ERRORS as error:
        raise ConfigError(
            f"checkpoint.resume={saved.path} was not written by this runner: "
            f"{type(error).__name__}: {error}. Type init.weights=<it> to start a new run from its "
            "weights."
        ) from error
    return notes


def _restore_progress(
    state: TrainState, content: Mapping[str, Any], callbacks: Sequence[RunCallback]
) -> None:
    state.precision.load_state_dict(state.plain_model, content["precision_state"])
    state.step = content["step"]
    state.epoch = content["epoch"]
    state.position = content["position"]
    state.skipped = content["skipped_steps"]
    state.last_evaluation_step = content["evaluated"]
    state.stagnant_share = content["stagnant"]
    _restore_callbacks(callbacks, content["callbacks"])
    generators = content["rng"]
    rank = state.strategy.place.rank
    # A run may resume with more processes than before. The further ones have no saved state and
    # continue with the seeds that they started with.
    if rank < len(generators):
        set_rng_state(generators[rank], state.device)


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
        # A value of another type would be accepted here and break the run at its next use.
        odd = [name for name in saved if not _is_same_kind(saved[name], current.get(name))]
        if odd:
            raise TypeError(f"callbacks.{callback.key}.{odd[0]} is of another kind")
        callback.load_state_dict(saved)


def _restore_scale(
    state: TrainState, content: Mapping[str, Any], spec: RunSpec, typed_keys: Collection[str]
) -> list[str]:
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
    ours = _scale_settings(spec.precision)
    theirs = _scale_settings(content["spec"]["precision"])
    before = float(saved["scale"])
    # An init_scale that differs from the checkpoint's config was typed for this resume, and wins.
    if ours.get("fixed") is None and ours.get("init_scale") != theirs.get("init_scale"):
        return [f"the loss scale begins at {fresh['scale']:g}, as typed; it was {before:g}"]
    state.scale.load_state_dict(saved)
    now = state.scale.state_dict()["scale"]
    if now != before:
        return [f"the loss scale is fixed at {now:g}; it was {before:g}"]
    # An init_scale typed again with the first run's value leaves the config unchanged: the scale
    # continues, and a user who expected it to begin again reads why.
    key = "precision.loss_scale.init_scale"
    given = ours.get("init_scale")
    if key in typed_keys and given != before:
        return [f"the loss scale continues at {before:g}: {key}={given} is where the run began"]
    return []


def _restore_average(state: TrainState, content: Mapping[str, Any]) -> list[str]:
    """Restore the averaged weights; return a sentence if they do not continue as they were."""
    saved = content.get(AVERAGE_KEY)
    if state.average is None:
        return [] if saved is None else ["the checkpoint's averaged weights are dropped"]
    if saved is None:
        return ["the average of the weights begins here: the checkpoint holds none"]
    state.average.load_state_dict(saved)
    return []


def _scale_settings(precision: Mapping[str, Any]) -> Mapping[str, Any]:
    return precision.get("loss_scale") or {}


def _is_same_kind(one: Any, other: Any) -> bool:
    kinds = {type(one), type(other)}
    # None stands for a value that there was not yet, and a whole float may be stored as an int.
    return len(kinds) == 1 or type(None) in kinds or kinds == {int, float}


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
    stored_spec = {**redacted_dict(spec), "tracking": {}}
    model = state.plain_model
    # A schedule that still waits for its found-inf flag would be stored a step late.
    for scheduled in state.optimizers:
        scheduled.advance_schedule()
    return {
        **resume_state,
        "format": FORMAT,
        "spec": stored_spec,
        "signature": sign(SPEC_SIGNATURE_PURPOSE, repr(stored_spec)) if is_own_spec else "",
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
        "schedulers": [schedule_state(scheduled) for scheduled in state.optimizers],
        "loss_scale": state.scale.state_dict(),
        **({} if state.average is None else {AVERAGE_KEY: state.average.state_dict()}),
    }
