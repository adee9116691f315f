"""Segmentation: one class per pixel."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.core import ConfigError, batch_layout
from runner.training.tasks.tensor_task import ClassTask, mean


class Segmentation(ClassTask):
    """Cross entropy over logits [B, C, H, W] and classes [B, H, W], of which -100 and ignore_index
    do not count.

    Args:
        aux_weight: what the loss of the output's part `aux`, the auxiliary head of torchvision's
            models, is multiplied by in training; 0 leaves it out. The metrics are without it.
        ignore_index: label of the pixels that do not count, such as the 255 at the borders of VOC
            and Cityscapes.
        inputs, target, loss: see TensorTask.
        output: see TensorTask; None takes the part `out` of a dict that has it, too.

    Raises:
        ConfigError: aux_weight is negative.
    """

    takes = "logits [B, C, H, W]"
    labels_taken = "classes [B, H, W]"
    dims = 4
    quality = "val/iou"

    def __init__(
        self,
        inputs: Sequence[str] | None = None,
        target: str | None = None,
        output: str | int | None = None,
        loss: Callable[..., Any] | None = None,
        aux_weight: float = 0.0,
        ignore_index: int = batch_layout.IGNORED_LABEL,
    ) -> None:
        super().__init__(inputs, target, output, loss)
        if not 0 <= aux_weight < float("inf"):
            raise ConfigError(
                f"task.aux_weight={aux_weight} does not fit. Allowed: a number, 0 or more."
            )
        self.aux_weight = aux_weight
        self.ignored_label = ignore_index

    def loss(self, output: Any, target: Tensor) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return the mean cross entropy per pixel, in nats, or the loss that task.loss names.

        With aux_weight that of the auxiliary head is added, and both are returned by name.

        Raises:
            ValueError: the shapes do not match.
            ConfigError: aux_weight is given, and the output has no part `aux`.
        """
        main = self.minimised(*self.aligned(output, target), self.own_loss)
        if not self.aux_weight:
            return main
        logits = output.get("aux") if isinstance(output, Mapping) else None
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"task.aux_weight={self.aux_weight}: the model returns no part aux. Type "
                "task.aux_weight=0, or model.options={aux_loss: true} where torchvision's model "
                "has one."
            )
        aux = self.minimised(logits, target, self.own_loss)
        return main + self.aux_weight * aux, {"main_loss": main, "aux_loss": aux}

    def select(self, output: Any) -> Any:
        """Return the logits; see TensorTask.select."""
        return output["out"] if self._takes_out(output) else super().select(output)

    def describe_output(self, output: Any) -> str:
        """Return that the part `out` was found by itself."""
        if not self._takes_out(output):
            return ""
        others = [str(key) for key in output if key != "out"]
        unused = f"; not taken: {', '.join(others)}" if others and not self.aux_weight else ""
        return f"task=segmentation takes out of the model's output (task.output=out){unused}"

    def _takes_out(self, output: Any) -> bool:
        """Return whether an output is torchvision's, {"out": logits, ...}, and none was named."""
        if self.output_field is not None or not isinstance(output, Mapping):
            return False
        return "logits" not in output and isinstance(output.get("out"), Tensor)

    def totals(self, output: Any, target: Tensor) -> Tensor:
        """Return [summed cross entropy in nats, correct pixels, pixels that count, then for each
        class the pixels in both prediction and target, and for each those in either]: [3 + 2 C]."""
        sums = super().totals(output, target)
        logits = self.select(output)
        classes = logits.shape[1]
        cells = target.clamp(min=0) * classes + logits.argmax(1)
        counted = (target != batch_layout.IGNORED_LABEL).long()
        # bincount would wait for the device to learn its result's size.
        counts = torch.zeros(classes * classes, dtype=torch.int64, device=target.device)
        confusion = counts.scatter_add_(0, cells.flatten(), counted.flatten()).view(
            classes, classes
        )
        both = confusion.diagonal()
        either = confusion.sum(0) + confusion.sum(1) - both
        return torch.cat([sums, both.to(sums.dtype), either.to(sums.dtype)])

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss in nats, val/accuracy, and val/iou: the mean over the classes that occur
        of intersection over union."""
        areas = totals[3:]
        classes = len(areas) // 2
        pairs = zip(areas[:classes], areas[classes:], strict=True)
        ratios = [both / either for both, either in pairs if either]
        return {**super().summarise(totals[:3]), "val/iou": mean(sum(ratios), len(ratios))}
