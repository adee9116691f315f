from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from runner.models.torchvision_any import torchvision_any

SMALL = "mobilenet_v3_small"
DETECTOR = "ssdlite320_mobilenet_v3_large"
ONE = torch.tensor([1])


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "squeezenet1_1", "googlenet"])
@pytest.mark.parametrize("channels", [1, 3])
def test_gives_logits_in_training(name, channels):
    output = torchvision_any(name, 7, [channels, 64, 64])(torch.randn(2, channels, 64, 64))
    assert isinstance(output, torch.Tensor)
    assert output.shape == (2, 7)


def test_adapted_convolution_keeps_its_geometry_and_scale():
    adapted, plain = (torchvision_any("squeezenet1_1", 7, [c, 64, 64]) for c in (2, 3))
    both = (adapted, plain)
    new, old = (next(m for m in net.modules() if isinstance(m, nn.Conv2d)) for net in both)
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


@pytest.mark.parametrize("name", ["raft_small", "quantized_resnet18"])
def test_only_models_with_classes(name):
    with pytest.raises(ValueError, match="no model of images or videos with classes"):
        torchvision_any(name, 7, [3, 64, 64])


@pytest.fixture(scope="module")
def small():
    return torchvision_any(SMALL, 3, [3, 32, 32])


@pytest.fixture
def saved(small, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(small.state_dict(), path)
    return str(path)


def test_weights_of_a_local_file_are_taken(small, saved, tmp_path):
    other = tmp_path / "weights.safetensors"
    save_file(small.state_dict(), other)
    for path in (saved, str(other)):
        found = torchvision_any(SMALL, 3, [3, 32, 32], weights=path).state_dict()
        assert all(torch.equal(value, found[key]) for key, value in small.state_dict().items())


def test_a_head_of_another_size_stays_random_and_is_named(small, saved, caplog):
    found = torchvision_any(SMALL, 5, [3, 32, 32], weights=saved).state_dict()
    head = ("classifier.3.weight", "classifier.3.bias")
    for key, value in small.state_dict().items():
        assert key in head or torch.equal(value, found[key])
    (line,) = caplog.messages
    assert "keeps its random weights" in line
    assert line.endswith("classifier.3.bias, classifier.3.weight")


def test_what_cannot_be_loaded_gets_one_message(small, saved, tmp_path):
    whole, wrapped, cut = (str(tmp_path / f"{name}.pth") for name in ("whole", "wrapped", "cut"))
    torch.save(small, whole)
    torch.save({"model": small.state_dict(), "epoch": 3}, wrapped)
    Path(cut).write_bytes(Path(saved).read_bytes()[:1000])
    table = [
        (SMALL, {"weights": "absent.pth"}, "weights=absent.pth is no file"),
        (SMALL, {"weights": whole}, "cannot be read as tensors alone"),
        (SMALL, {"weights": cut}, "cannot be read as tensors alone"),
        (SMALL, {"weights": wrapped}, "holds a dict with the keys model, epoch, no state dict"),
        ("mobilenet_v2", {"weights": saved}, "it lacks features.0.0.weight|the model has no"),
        (SMALL, {"weights": saved, "options": {"width_mult": 0.5}}, "has the shape"),
        (SMALL, {"options": {"weights": "DEFAULT"}}, "Type model.weights=<a local file>"),
        (SMALL, {"options": {"widthmult": 0.5}}, "takes no options widthmult. It takes"),
        ("resnet18", {"options": {"depth": 3}}, "cannot build resnet18 .*depth"),
        (DETECTOR, {"options": {"minsize": 3}}, "takes no options minsize. It .*topk_candidates"),
        (DETECTOR, {"options": {"trainable_backbone_layers": 3}}, "Type train.freeze="),
        (DETECTOR, {"input_shape": [1, 32, 32]}, "normalises images of 3 channels"),
        (SMALL, {"input_shape": None}, "Type data.meta.input"),
    ]
    for name, keywords, said in table:
        with pytest.raises(ValueError, match=said):
            torchvision_any(name, 3, **{"input_shape": [3, 32, 32], **keywords})


def test_detection_segmentation_and_video_models_are_built_without_a_download():
    losses = torchvision_any(DETECTOR, 3)(
        [torch.rand(3, 32, 32)] * 2, [{"boxes": torch.tensor([[1.0, 2, 9, 9]]), "labels": ONE}] * 2
    )
    assert set(losses) == {"bbox_regression", "classification"}
    segments = torchvision_any("lraspp_mobilenet_v3_large", 3).eval()(torch.rand(1, 3, 32, 32))
    assert segments["out"].shape == (1, 3, 32, 32)
    clips = torch.rand(1, 1, 4, 16, 16)
    assert torchvision_any("r3d_18", 3, [1, 4, 16, 16]).eval()(clips).shape == (1, 3)
