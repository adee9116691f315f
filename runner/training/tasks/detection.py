"""Detection: the losses that a model returns for images and boxes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.core import ConfigError, Task
from runner.data.detection import DetectionLayout
from runner.training.tasks.model_loss import ModelLoss, loss_terms
from runner.training.tasks.tensor_task import labels_out_of_range


class Detection(ModelLoss):
    """The sum of the losses that the model returns for (images, targets), as torchvision's
    detection models do in training mode.

    Each loss is recorded in every step as train/<name>, before it is weighted. An evaluation
    computes the same sum: the model is in training mode but for normalisations and dropout, see
    core/loop/training_loop.py. Each image weighs alike.

    Args:
        loss_weights: what a loss is multiplied by, by its name; 1 where it has none.
        inputs, target: see FieldTask.

    Raises:
        ConfigError: a weight is no number from 0 on.
    """

    layout = DetectionLayout
    evaluates_losses = True
    metric_inputs = Task.metric_inputs

    def __init__(
        self,
        loss_weights: Mapping[str, float] | None = None,
        inputs: Sequence[str] | None = None,
        target: str | None = None,
    ) -> None:
        self.loss_weights = dict(loss_weights or {})
        super().__init__(inputs, target)
        for name, weight in self.loss_weights.items():
            if not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
                raise ConfigError(
                    f"task.loss_weights.{name}={weight} does not fit. Allowed: a number, 0 or more."
                )

    def loss(self, output: Any, target: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the weighted sum of the losses, a scalar, and each loss by its name.

        Raises:
            ConfigError: the output is no dict of losses, or lacks one that has a weight.
        """
        losses = loss_terms(output)
        if not losses:
            kind = type(output).__name__
            if isinstance(output, Mapping):
                kind += f" with the keys {', '.join(map(str, output))}"
            raise ConfigError(
                f"task=detection: the model returns a {kind}, and not its losses by name. Have it "
                "return a dict of scalars for (images, targets) in training mode, as torchvision's "
                "detection models do: model=torchvision model.name=fasterrcnn_resnet50_fpn."
            )
        unknown = [name for name in self.loss_weights if name not in output]
        if unknown:
            raise ConfigError(
                f"task.loss_weights names {', '.join(unknown)}, and the model returns "
                f"{', '.join(map(str, output))}."
            )
        weighted = []
        for name, value in losses.items():
            weight = self.loss_weights.get(name)
            weighted.append(value if weight is None else value * weight)
        return sum(weighted[1:], weighted[0]), losses

    def misplaced(self, target: Any, classes: int) -> Tensor:
        """Return bool [B], which images have a box whose label is no class."""
        wrong = [labels_out_of_range(one["labels"].reshape(1, -1), classes) for one in target]
        return torch.cat(wrong)
