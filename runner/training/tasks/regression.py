"""Regression: real or complex targets."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.training.tasks.task import mean, stack, wide
from runner.training.tasks.tensor_task import TensorTask


class Regression(TensorTask):
    """Mean squared error between tensors of one shape [B, ...], both real or both complex."""

    takes = "real or complex numbers in the shape of the target"
    quality = "val/loss"
    direction = "min"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the squared error, averaged over all elements, or the loss of task.loss.

        Raises:
            ValueError: the shapes differ (broadcasting would hide it), or one is real alone.
        """
        numbers = self._numbers(output, target)
        return self.minimised(numbers, target, _mean_squared_error)

    def totals(self, output: Tensor, target: Tensor) -> Tensor:
        """Return [summed squared error, elements]."""
        numbers = self._numbers(output, target)
        # Widened before squaring: at errors of 1e-12 the rounding of the squares would show.
        dtype = torch.promote_types(wide(numbers), numbers.dtype)
        error = numbers.to(dtype) - target.to(dtype)
        return stack(_squares(error).sum(), error.numel())

    def labels(self, target: Tensor) -> Tensor:
        """Return the number of elements."""
        return torch.full((), target.numel(), device=target.device)

    def misplaced(self, target: Tensor, classes: int) -> None:
        """Return None: targets are no classes."""

    def metric_inputs(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the output and the targets, in one shape [B, ...]."""
        return self.select(output), target

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss, the mean squared error."""
        return {"val/loss": mean(*totals)}

    def _numbers(self, output: Any, target: Tensor) -> Tensor:
        numbers = self.select(output)
        are_real = numbers.is_floating_point() and target.is_floating_point()
        are_complex = numbers.is_complex() and target.is_complex()
        if numbers.shape != target.shape or not (are_real or are_complex):
            raise ValueError(
                "regression needs float output and target of one shape, or both complex, got "
                f"{numbers.dtype} {list(numbers.shape)} and {target.dtype} {list(target.shape)}"
            )
        return numbers


def _mean_squared_error(numbers: Tensor, target: Tensor) -> Tensor:
    # torch's mse_loss takes no complex numbers.
    is_complex = numbers.is_complex()
    return _squares(numbers - target).mean() if is_complex else F.mse_loss(numbers, target)


def _squares(error: Tensor) -> Tensor:
    """Return the squared absolute values, real."""
    return torch.view_as_real(error).square().sum(-1) if error.is_complex() else error.square()
