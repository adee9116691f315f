import pytest
import torch
from torch import nn

from runner.models.torchvision_any import torchvision_any


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "squeezenet1_1", "googlenet"])
@pytest.mark.parametrize("channels", [1, 3])
def test_gives_logits_in_training(name, channels):
    output = torchvision_any(name, 7, [channels, 64, 64])(torch.randn(2, channels, 64, 64))
    assert isinstance(output, torch.Tensor)
    assert output.shape == (2, 7)


def test_adapted_convolution_keeps_its_geometry_and_scale():
    adapted, plain = (torchvision_any("squeezenet1_1", 7, [c, 64, 64]) for c in (2, 3))
    new, old = (
        next(m for m in model.modules() if isinstance(m, nn.Conv2d)) for model in (adapted, plain)
    )
    assert new.weight.shape == (64, 2, 3, 3)
    assert (new.stride, new.padding, new.bias is None) == (old.stride, old.padding, False)
    assert new.weight.std().item() == pytest.approx(old.weight.std().item(), rel=0.2)


def test_vision_transformers_take_the_image_size():
    model = torchvision_any("vit_b_32", 7, [3, 64, 64])
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 7)
    with pytest.raises(ValueError, match="28 x 28"):
        torchvision_any("vit_b_32", 7, [3, 28, 28])


@pytest.mark.parametrize(
    ("name", "close"), [("resnet20", "resnet50"), ("mobilenet", "mobilenet_v2")]
)
def test_unknown_name_lists_close_ones(name, close):
    with pytest.raises(ValueError, match=close):
        torchvision_any(name, 7, [3, 64, 64])


@pytest.mark.parametrize("name", ["fcn_resnet50", "r3d_18", "raft_small"])
def test_only_classification_models(name):
    with pytest.raises(ValueError, match="no classification model"):
        torchvision_any(name, 7, [3, 64, 64])
