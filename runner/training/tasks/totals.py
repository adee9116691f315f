"""Sums of losses and labels that a task adds up over the batches of an evaluation."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.core import tensor_facts
from runner.core.loop.task import IGNORED


def count_labels(target: Tensor) -> Tensor:
    """Return how many of the labels torch's cross entropy averages over: int64 []."""
    return (target != IGNORED).sum()


def counted_positions(predictions: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return predictions [N, C] and classes int64 [N] of the positions whose labels count.

    On a GPU the host waits for their number.

    Args:
        predictions: [..., C].
        target: integers [...] of the same shape without C.
    """
    counted = (target != IGNORED).flatten()
    return predictions.flatten(0, -2)[counted], target.flatten()[counted]


def labels_out_of_range(target: Tensor, classes: int) -> Tensor:
    """Return bool [B], which examples of integers [B, ...] have one that is no class."""
    # IGNORED is below 0 and no error: cross entropy leaves it out.
    wrong = ((target < 0) & (target != IGNORED)) | (target >= classes)
    return wrong.reshape(len(target), -1).any(1)


def class_totals(logits: Tensor, target: Tensor) -> Tensor:
    """Return [summed cross entropy in nats, correct predictions, labels that count]: float64 [3].

    Args:
        logits: [B, C, ...].
        target: classes int64 [B, ...].
    """
    losses = F.cross_entropy(logits, target, reduction="none").to(wide(logits))
    correct = (logits.argmax(1) == target).sum()
    return stack(losses.sum(), correct, count_labels(target))


def class_metrics(totals: list[float]) -> dict[str, float]:
    """Return val/loss in nats and val/accuracy in [0, 1], from the sums of class_totals."""
    loss, correct, count = totals
    return {"val/loss": mean(loss, count), "val/accuracy": mean(correct, count)}


def stack(*sums: Tensor | int) -> Tensor:
    """Stack sums into one vector [K] on the device of the first, without a sync."""
    # new_full() fills in the host's numbers on the device without a wait for it, which a copy of a
    # host tensor would need.
    first = sums[0]
    assert isinstance(first, Tensor)
    dtype = wide(first)
    parts = [s if isinstance(s, Tensor) else first.new_full((), s, dtype=dtype) for s in sums]
    return torch.stack([part.to(dtype) for part in parts])


def wide(like: Tensor) -> torch.dtype:
    """Return the dtype in which sums are added up: the widest float of the tensor's device."""
    return tensor_facts.widest_float(like.device)


def mean(total: float, count: float) -> float:
    """Return total / count; NaN if nothing was counted."""
    return total / count if count else math.nan
