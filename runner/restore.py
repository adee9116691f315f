"""What a checkpoint keeps beside the weights, and taking it back."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from runner import accelerator, shards
from runner.build import LENGTHS
from runner.checkpoint import Saved, parts_of
from runner.errors import ConfigError
from runner.observers.base import Observer
from runner.spec import RunSpec
from runner.state import TrainState

_MISFITS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def capture(state: TrainState, observers: Sequence[Observer]) -> dict[str, Any]:
    """What a checkpoint keeps so that the run goes on as if it had not been cut."""
    return {
        "position": state.position,
        "evaluated": state.evaluated,
        "stagnant": state.stagnant,
        "rng": state.strategy.gather(rng_state(state.device)),
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
    streams, rank = _streams(content["rng"]), state.strategy.place.rank
    if rank < len(streams):  # more processes than before go on with seeds of their own
        set_rng_state(streams[rank], state.device)


def _streams(saved: Any) -> list[Mapping[str, Any]]:
    """Of each process; checkpoints of one process used to hold no list."""
    return saved if isinstance(saved, list) else [saved]


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
            parts = parts_of(saved.path)
            if state.strategy.shards:
                held = shards.parted(optimizer["state"], driven.params, parts)
                optimizer = {**optimizer, "state": held}
            else:
                optimizer = shards.whole(optimizer, parts)
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


def rng_state(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's and torch's generators, the device's too, in plain containers."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    states = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if (drawn := accelerator.rng_state(device)) is not None:
        states[device.type] = drawn
    return states


def set_rng_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Take back what rng_state gave; another kind of device keeps its seeded stream."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"].clone())
    if device.type in states:
        accelerator.set_rng_state(states[device.type].clone(), device)
