import pytest
import torch

from runner.models.vit import patches, vit


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_any_channels(channels):
    model = vit([channels, 8, 8], 10, layers=1)
    torch.nn.init.normal_(model.heads.head.weight)  # torchvision's zero head hides the rest
    output = model(torch.randn(2, channels, 8, 8))
    output.sum().backward()
    assert output.shape == (2, 10)
    assert model.conv_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(("side", "patch"), [(8, 2), (28, 4), (32, 4), (64, 8), (224, 16)])
def test_patch_size_is_chosen(side, patch):
    assert patches(side) == patch
    assert vit([3, side, side], 10, layers=1, hidden_dim=8).patch_size == patch


def test_replaced_projection_starts_as_torchvisions():
    grey, colour = (vit([c, 64, 64], 10, layers=1, patch_size=8).conv_proj for c in (1, 3))
    assert grey.weight.std().item() == pytest.approx(colour.weight.std().item() * 3**0.5, rel=0.05)
    assert grey.bias.abs().max() == 0


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"input_shape": [3, 8, 9]}, "square"),
        ({"patch_size": 3}, "does not divide"),
        ({"heads": 3}, "not a multiple"),
        ({"input_shape": [3, 31, 31]}, "no patch size"),
    ],
)
def test_refuses_bad_arguments(keywords, message):
    with pytest.raises(ValueError, match=message):
        vit(**{"input_shape": [3, 8, 8], "classes": 10} | keywords)
