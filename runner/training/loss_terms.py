"""The further values that a task returns beside its loss, recorded in every step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from runner.training.state import TrainState
from runner.training.step_metrics import FORBIDDEN_CHARACTERS, STEP_METRICS
from runner.utils.errors import ConfigError


def split_loss(returned: Any, task: object) -> tuple[Any, Mapping[str, Tensor]]:
    """Return the loss and the terms of what a task's `loss` returned, detached and by name.

    Args:
        returned: the loss, or the pair (loss, {name: scalar tensor}).
        task: named in messages.

    Raises:
        ConfigError: the second of the pair is no mapping, or a name or a value does not fit.
    """
    if not isinstance(returned, tuple):
        return returned, {}
    where = f"task={type(task).__name__}: loss()"
    if len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise ConfigError(
            f"{where} returned a tuple of {len(returned)}. It returns the loss, or (loss, values) "
            'with values by name, as in return loss, {"kl": kl.mean()}.'
        )
    loss, terms = returned
    for name, value in terms.items():
        _check_name(where, name)
        _check_value(where, name, value, loss)
    return loss, {name: value.detach().reshape(()) for name, value in terms.items()}


def note_names(state: TrainState, terms: Mapping[str, Tensor]) -> None:
    """Note the names of a step's terms in the state, where later steps are held to them.

    Raises:
        ConfigError: an earlier micro-batch had other names.
    """
    names = tuple(terms)
    if state.term_names is None:
        state.term_names = names
    elif {*state.term_names} != {*names}:
        before = ", ".join(state.term_names) or "none"
        raise ConfigError(
            f"task={type(state.task).__name__}: loss() returned the values {before} before, and "
            f"in step {state.step} {', '.join(names) or 'none'}. Return the same names in every "
            "step; where there is nothing to measure, loss.new_zeros(())."
        )


def _check_name(where: str, name: object) -> None:
    taken = [entry.metric.removeprefix("train/") for entry in STEP_METRICS]
    if name in taken:
        raise ConfigError(
            f"{where} returned a value named {name}, and train/{name} is recorded by the runner. "
            f"Give it another name than {', '.join(taken)}."
        )
    if not isinstance(name, str) or not name or FORBIDDEN_CHARACTERS.search(name):
        raise ConfigError(
            f"{where} returned a value named {name!r}. Allowed: text of letters, digits, spaces "
            "and _ - . : /."
        )


def _check_value(where: str, name: str, value: object, loss: Any) -> None:
    found = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        # What a loss that is no tensor should have been, the check of the loss says.
        if value.numel() == 1 and getattr(loss, "device", value.device) == value.device:
            return
        found = f"a tensor {list(value.shape)} on {value.device}"
    raise ConfigError(
        f"{where} returned as {name} {found}. Allowed: a tensor of one number on the loss's "
        "device; no .item(), which makes every step wait. Type value.mean()."
    )
