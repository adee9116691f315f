import pytest
import torch
from torch import nn

from runner.models.resnet import resnet


@pytest.mark.parametrize("shape", [[1, 8, 8], [3, 32, 32], [4, 65, 70]])
def test_any_channels_and_size(shape):
    model = resnet(18, 7, shape)
    output = model(torch.randn(2, *shape))
    output.sum().backward()
    assert output.shape == (2, 7)
    assert model.conv1.weight.grad is not None


def test_stem_follows_the_image_size():
    small, large = resnet(18, 10, [3, 64, 64]), resnet(18, 10, [3, 64, 65])
    assert (small.conv1.kernel_size, small.conv1.stride) == ((3, 3), (1, 1))
    assert isinstance(small.maxpool, nn.Identity)
    assert (large.conv1.kernel_size, large.conv1.stride) == ((7, 7), (2, 2))
    assert isinstance(large.maxpool, nn.MaxPool2d)


def test_stem_can_be_chosen():
    assert resnet(18, 10, [3, 32, 32], small_images=False).conv1.stride == (2, 2)
    assert resnet(18, 10, [1, 224, 224], small_images=True).conv1.stride == (1, 1)


def test_depth_counts_weight_layers():
    model = resnet(34, 10, [1, 8, 8])
    layers = [m for n, m in model.named_modules() if "downsample" not in n]
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in layers) == 34


def test_replaced_stem_starts_as_torchvisions():
    weight = resnet(18, 10, [1, 224, 224]).conv1.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 49)) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("depth", "shape", "message"), [(20, [3, 8, 8], "18, 34, 50"), (18, [64], "channels, height")]
)
def test_refuses_bad_arguments(depth, shape, message):
    with pytest.raises(ValueError, match=message):
        resnet(depth, 10, shape)
