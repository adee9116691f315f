"""Regression: real targets."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.training.tasks.task import mean, stack, wide
from runner.training.tasks.tensor_task import TensorTask


class Regression(TensorTask):
    """Mean squared error between real tensors of one shape [B, ...]."""

    takes = "real numbers in the shape of the target"
    quality = "val/loss"
    direction = "min"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the squared error, averaged over all elements, or the loss of task.loss.

        Raises:
            ValueError: the shapes differ (broadcasting would hide it), or either is not real.
        """
        numbers = self._numbers(output, target)
        return self.minimised(numbers, target, F.mse_loss)

    def totals(self, output: Tensor, target: Tensor) -> Tensor:
        """Return [summed squared error, elements]."""
        numbers = self._numbers(output, target)
        # Widened before squaring: at errors of 1e-12 the rounding of the squares would show.
        error = numbers.to(wide(numbers)) - target.to(wide(numbers))
        return stack(error.square().sum(), error.numel())

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
        if numbers.shape != target.shape or not are_real:
            raise ValueError(
                "regression needs float output and target of one shape, got "
                f"{numbers.dtype} {list(numbers.shape)} and {target.dtype} {list(target.shape)}"
            )
        return numbers
