"""The training loss that task.loss names, in place of a task's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.training.tasks.task import IGNORED, count_labels
from runner.utils.errors import ConfigError
from runner.utils.tensors import widest_float


class TrainingLoss:
    """A loss of outputs and targets that is a mean over the labels that count.

    Args:
        loss: a function or nn.Module of (output, target), for example torch.nn.CrossEntropyLoss.

    Raises:
        ConfigError: it cannot be called, sums, leaves out another label than -100, or has
            parameters.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        _check(loss)
        self.loss = loss
        self._place: tuple[torch.device, torch.dtype] | None = None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss: a scalar.

        Raises:
            ConfigError: the loss returned something else than one number.
        """
        dtype = output.dtype
        # Half precision would round class weights. Autocast computes losses in float32.
        kind = output.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.promote_types(dtype, torch.float32)
        self._move(output.device, dtype)
        found = self.loss(output, target)
        if isinstance(found, Tensor) and found.numel() == 1:
            return found.reshape(())
        kind = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise ConfigError(
            f"task.loss={_name(self.loss)} returned {kind}, and training needs one number, the "
            "mean over the labels that count. Return loss.mean()."
        )

    def labels(self, target: Tensor) -> Tensor:
        """Return what the mean divides by: the labels that count, or the sum of their weights."""
        weight = _class_weights(self.loss)
        if weight is None:
            return count_labels(target)
        # Labels are counted before the first forward has moved the loss.
        self._move(target.device, weight.dtype)
        weight = _class_weights(self.loss)
        assert weight is not None
        # Into range: the forward says better than an index which weights are missing.
        inside = target.clamp(0, len(weight) - 1)
        counted = weight[inside].masked_fill(target == IGNORED, 0)
        return counted.sum(dtype=widest_float(target.device))

    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move a module's tensors to where the loss is computed, unless they are there."""
        if self._place == (device, dtype):
            return
        if isinstance(self.loss, nn.Module):
            self.loss.to(device, dtype)
        self._place = (device, dtype)


def _class_weights(loss: object) -> Tensor | None:
    """Return the weights of the classes by which a loss of torch divides; None without."""
    return loss.weight if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) else None


def _check(loss: object) -> None:
    name = _name(loss)
    if not callable(loss):
        raise ConfigError(
            f"task.loss={name} cannot be called. Allowed: a function or torch.nn.Module that takes "
            "the logits and the labels, as in task.loss={_target_: torch.nn.CrossEntropyLoss}."
        )
    if isinstance(loss, partial) and loss.func.__module__.startswith("torch."):
        hidden = [key for key in ("reduction", "ignore_index", "weight") if key in loss.keywords]
        if hidden:
            raise ConfigError(
                f"task.loss: {', '.join(hidden)} of a partial function cannot be seen when the "
                "parts of a step are weighed. Name a class, as in task.loss={_target_: "
                "torch.nn.CrossEntropyLoss, weight: [1.0,5.0]}."
            )
    reduction = getattr(loss, "reduction", "mean")
    if reduction in ("sum", "none"):
        raise ConfigError(
            f"task.loss.reduction={reduction}: the parts of a step are weighed as means over their "
            "labels. Type task.loss.reduction=mean, or leave it out."
        )
    ignored = getattr(loss, "ignore_index", IGNORED)
    if ignored != IGNORED:
        raise ConfigError(
            f"task.loss.ignore_index={ignored}: labels that do not count are {IGNORED} in every "
            f"task. Leave it out, and have the data set yield {IGNORED} for them."
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ConfigError(
            f"task.loss={name} has parameters, which no optimizer would train. Make them a part "
            "of the model, or tensors registered by register_buffer."
        )


def _name(loss: object) -> str:
    """Return the name of a function, or of an object's class."""
    return str(getattr(loss, "__name__", type(loss).__name__))
