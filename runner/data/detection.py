"""Batches of images with boxes: data.collate=runner.data.detection.collate_detection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.core import Batch, ConfigError, batch_layout


def collate_detection(examples: Sequence[Any]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Return the batch of images of any sizes with boxes: lists, as torchvision's models take them.

    Args:
        examples: pairs (image, target): the image float [C, H, W] in [0, 1], which the model
            normalises, and the target a dict of `boxes` [N, 4] in pixels (x1, y1, x2, y2),
            `labels` integers [N], and further fields of the model, such as `masks` [N, H, W].

    Returns:
        The images, and the targets: boxes float32, labels int64, other fields as they are.

    Raises:
        ConfigError: an example is something else.
    """
    images: list[Tensor] = []
    targets: list[dict[str, Any]] = []
    for i, example in enumerate(examples):
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise ConfigError(f"example {i} is a {_kind(example)}. Yield (image, target)")
        image, target = example
        if not (isinstance(image, Tensor) and image.ndim == 3 and image.is_floating_point()):
            raise ConfigError(
                f"the image of example {i} is a {_kind(image)}. Yield float [C, H, W], 0 to 1, as "
                "torchvision.transforms.v2.functional.to_dtype(image, torch.float32, scale=True)"
            )
        images.append(image.as_subclass(Tensor))  # of a torchvision.tv_tensors.Image, too
        targets.append(_target(i, target))
    return images, targets


def _target(i: int, target: Any) -> dict[str, Any]:
    if not isinstance(target, Mapping):
        raise ConfigError(
            f"the target of example {i} is a {_kind(target)}. Yield a dict with boxes and labels"
        )
    missing = [name for name in ("boxes", "labels") if name not in target]
    if missing:
        raise ConfigError(
            f"the target of example {i} has {', '.join(map(str, target))}, not {', '.join(missing)}"
        )
    boxes = torch.as_tensor(target["boxes"]).as_subclass(Tensor).to(torch.float32)
    labels = torch.as_tensor(target["labels"]).as_subclass(Tensor)
    # An image without a box: an empty list is a tensor [0].
    boxes = boxes.reshape(0, 4) if not boxes.numel() else boxes
    if boxes.ndim != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
        raise ConfigError(
            f"example {i}: boxes {[*boxes.shape]}, labels {[*labels.shape]}. Yield [N, 4] and [N]"
        )
    if bool((boxes[:, 2:] <= boxes[:, :2]).any()):
        raise ConfigError(
            f"example {i} has a box without an area. Yield (x1, y1, x2, y2), x1 < x2 and y1 < y2"
        )
    return {**target, "boxes": boxes, "labels": labels.to(torch.int64)}


@dataclass(frozen=True)
class DetectionLayout(batch_layout.BatchLayout):
    """Split batches (images, targets), two lists, one target for each image."""

    def split(self, batch: Any) -> Batch:
        """Return the inputs of the model, targets among them, and the targets.

        Raises:
            ConfigError: the targets are no list of dicts, one for each image.
        """
        inputs, targets = super().split(batch)
        images = (
            inputs[0]
            if isinstance(inputs, batch_layout.PositionalInputs)
            else next(iter(inputs.values()))
        )
        are_lists = isinstance(images, tuple | list) and isinstance(targets, tuple | list)
        match = are_lists and len(images) == len(targets)
        if not match or not all(isinstance(target, Mapping) for target in targets):
            raise ConfigError(
                f"task=detection takes a list of images and a list of as many dicts, and a batch "
                f"has a {_kind(images)} and a {_kind(targets)}. Type data.collate="
                "runner.data.detection.collate_detection, or a function that returns such lists."
            )
        return inputs, targets


def _kind(value: Any) -> str:
    """Return a value in words: dtype and shape of a tensor, else its type."""
    if isinstance(value, Tensor):
        return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, tuple | list) else name
