"""The contract of a task: what to minimise, what to report, which number decides."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from runner.precision.cast import widest


class Task(ABC):
    """Loss and metrics of one kind of problem.

    Validation metrics are sums over examples: `totals` of every batch (and process) are added
    on the device and `summarise` divides once, so a partial last batch weighs what it should.
    """

    quality: ClassVar[str]
    """The metric that runs are compared by, e.g. "val/accuracy"."""
    direction: ClassVar[Literal["max", "min"]]
    """Whether `quality` is better high ("max") or low ("min")."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the batch's mean loss: a scalar on the device, computed in output's dtype."""

    @abstractmethod
    def totals(self, output: Tensor, target: Tensor) -> Tensor:
        """Return one batch's sums: [K] on the device, float64 where it has it, without a sync."""

    def misplaced(self, target: Tensor, classes: int) -> Tensor | None:
        """Return bool [B], which examples have a label that is none of the classes 0 to
        classes - 1; None where labels are no classes."""
        return None

    @abstractmethod
    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Turn the sums over all batches, K numbers, into metrics named "val/...".

        No examples at all give NaN.
        """


IGNORED = -100
"""The label that torch's cross entropy leaves out."""


def outside(target: Tensor, classes: int) -> Tensor:
    """Return bool [B], which examples of integers [B, ...] have one that is no class."""
    wrong = ((target < 0) & (target != IGNORED)) | (target >= classes)
    return wrong.reshape(len(target), -1).any(1)


def stack(*sums: Tensor | int) -> Tensor:
    """Stack sums into one vector [K] on the device of the first, without a sync."""
    first = sums[0]
    assert isinstance(first, Tensor)
    dtype = wide(first)
    parts = [s if isinstance(s, Tensor) else first.new_full((), s, dtype=dtype) for s in sums]
    return torch.stack([part.to(dtype) for part in parts])


def wide(like: Tensor) -> torch.dtype:
    """Return the dtype to add up in: the widest of the device."""
    return widest(like.device)


def mean(total: float, count: float) -> float:
    """Divide, with NaN for no examples."""
    return total / count if count else math.nan
