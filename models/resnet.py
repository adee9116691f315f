"""A ResNet for any image size and channel count, on torchvision's blocks."""

from collections.abc import Callable, Sequence

from torch import nn
from torchvision import models

_BUILDERS: dict[int, Callable[..., models.ResNet]] = {
    18: models.resnet18,
    34: models.resnet34,
    50: models.resnet50,
    101: models.resnet101,
    152: models.resnet152,
}
_SMALL = 64  # pixels; torchvision's stem shrinks 64 px to 16 before the first block


def resnet(
    depth: int, classes: int, input_shape: Sequence[int], small_images: bool | None = None
) -> models.ResNet:
    """Build a torchvision ResNet with random weights.

    Args:
        depth: 18, 34, 50, 101 or 152.
        classes: number of logits.
        input_shape: [channels, height, width].
        small_images: replace the stem (7x7 stride 2, max-pool) by one 3x3 convolution of stride 1,
            as He et al. 2015 (arXiv:1512.03385, section 4.2) do for CIFAR-10. None: do so when
            neither side is above 64 pixels.

    Returns:
        A module from float [B, channels, height, width] to logits [B, classes].

    Raises:
        ValueError: unknown depth, or input_shape is not three positive numbers.
    """
    if depth not in _BUILDERS:
        raise ValueError(f"resnet depth={depth} is not one of {', '.join(map(str, _BUILDERS))}")
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(
            f"resnet needs input_shape [channels, height, width], got {list(input_shape)}"
        )
    channels, *sides = input_shape
    model = _BUILDERS[depth](weights=None, num_classes=classes)
    if small_images is None:
        small_images = max(sides) <= _SMALL
    if small_images:
        model.conv1 = _stem(channels, kernel=3, stride=1)
        model.maxpool = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    elif channels != 3:
        model.conv1 = _stem(channels, kernel=7, stride=2)
    return model


def _stem(channels: int, kernel: int, stride: int) -> nn.Conv2d:
    """Return the first convolution, [B, channels, h, w] to [B, 64, h / stride, w / stride]."""
    conv = nn.Conv2d(channels, 64, kernel, stride, padding=kernel // 2, bias=False)
    # The initialisation that torchvision's ResNet gives to its convolutions.
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
