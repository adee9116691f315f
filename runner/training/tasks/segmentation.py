"""Segmentation: one class per pixel."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.training.tasks.task import (
    IGNORED,
    count_labels,
    counted_positions,
    labels_out_of_range,
    mean,
    stack,
    wide,
)
from runner.training.tasks.tensor_task import TensorTask


class Segmentation(TensorTask):
    """Cross entropy over logits [B, C, H, W] and classes int64 [B, H, W], of which -100 does not
    count."""

    takes = "logits [B, C, H, W]"
    quality = "val/iou"
    direction = "max"

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the mean cross entropy per pixel, in nats, or the loss that task.loss names.

        Raises:
            ValueError: the shapes do not match.
        """
        return self.minimised(self._logits(output, target), target, F.cross_entropy)

    def totals(self, output: Any, target: Tensor) -> Tensor:
        """Return [summed cross entropy in nats, correct pixels, pixels that count, then for each
        class the pixels in both prediction and target, and for each those in either]: [3 + 2 C]."""
        logits = self._logits(output, target)
        losses = F.cross_entropy(logits, target, reduction="none")
        sums = stack(
            losses.to(wide(logits)).sum(),
            (logits.argmax(1) == target).sum(),
            count_labels(target),
        )
        counted = target != IGNORED
        classes = logits.shape[1]
        # One-hot and not bincount, which waits for the device to learn its result's size.
        predicted = F.one_hot(logits.argmax(1), classes).bool() & counted.unsqueeze(-1)
        true = F.one_hot(target.clamp(min=0), classes).bool() & counted.unsqueeze(-1)
        both = (predicted & true).flatten(0, -2).sum(0)
        either = (predicted | true).flatten(0, -2).sum(0)
        return torch.cat([sums, both.to(sums.dtype), either.to(sums.dtype)])

    def labels(self, target: Tensor) -> Tensor:
        """Return how many pixels count."""
        return self.counted(target)

    def metric_inputs(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, C] and classes [N] of the pixels whose labels count."""
        return counted_positions(self._logits(output, target).movedim(1, -1), target)

    def misplaced(self, target: Tensor, classes: int) -> Tensor:
        """Return bool [B], which images hold a pixel that is no class."""
        return labels_out_of_range(target, classes)

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss in nats, val/accuracy, and val/iou: the mean over the classes that occur
        of intersection over union."""
        loss, correct, count, *areas = totals
        classes = len(areas) // 2
        pairs = zip(areas[:classes], areas[classes:], strict=True)
        ratios = [both / either for both, either in pairs if either]
        return {
            "val/loss": mean(loss, count),
            "val/accuracy": mean(correct, count),
            "val/iou": mean(sum(ratios), len(ratios)),
        }

    def _logits(self, output: Any, target: Tensor) -> Tensor:
        logits = self.select(output)
        if logits.dim() != 4 or target.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(
                "segmentation needs logits [B, C, H, W] and classes [B, H, W], got "
                f"{list(logits.shape)} and {list(target.shape)}"
            )
        return logits
