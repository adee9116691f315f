"""Regression: real or complex targets."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.precision.casting import cast_tensor
from runner.training.tasks.tensor_task import TensorTask, stack, wide


class Regression(TensorTask):
    """Mean squared error between tensors of one shape [B, ...], real ones or complex ones, whose
    error is squared by its magnitude."""

    takes = "numbers in the shape of the target, both real or both complex"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the squared error, averaged over all elements, or the loss of task.loss.

        Raises:
            ValueError: the shapes differ (broadcasting would hide it), or one is complex alone.
        """
        numbers = self._numbers(output, target)
        own = _complex_error if numbers.is_complex() else F.mse_loss
        return self.minimised(numbers, target, own)

    def totals(self, output: Tensor, target: Tensor) -> Tensor:
        """Return [summed squared error, elements]."""
        numbers = self._numbers(output, target)
        # Widened before squaring: at errors of 1e-12 the rounding of the squares would show.
        dtype = wide(numbers)
        error = cast_tensor(numbers, dtype) - cast_tensor(target, dtype)
        return stack(error.abs().square().sum(), error.numel())

    def labels(self, target: Tensor) -> Tensor:
        """Return the number of elements."""
        return torch.full((), target.numel(), device=target.device)

    def misplaced(self, target: Tensor, classes: int) -> None:
        """Return None: targets are no classes."""

    def metric_inputs(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the output and the targets, in one shape [B, ...]."""
        return self.select(output), target

    def _numbers(self, output: Any, target: Tensor) -> Tensor:
        numbers = self.select(output)
        are_real = numbers.is_floating_point() and target.is_floating_point()
        are_complex = numbers.is_complex() and target.is_complex()
        if numbers.shape != target.shape or not (are_real or are_complex):
            raise ValueError(
                "regression needs float output and target of one shape, or complex ones, got "
                f"{numbers.dtype} {list(numbers.shape)} and {target.dtype} {list(target.shape)}"
            )
        return numbers


def _complex_error(output: Tensor, target: Tensor) -> Tensor:
    return torch.view_as_real(output - target).square().sum(-1).mean()
