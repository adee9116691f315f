import pytest
import torch
from torch.utils.data import TensorDataset

from runner.data.datasets.digits import digits
from runner.utils.errors import ConfigError


def test_every_image_once_normalised_and_stratified():
    train, val = digits()
    assert type(train) is type(val) is TensorDataset
    assert (len(train), len(val)) == (1438, 359)
    images, labels = train.tensors
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.mean().abs() < 1e-5
    assert images.std().item() == pytest.approx(1, abs=1e-5)
    shares = [labels.bincount() / len(labels), val.tensors[1].bincount() / len(val)]
    assert (shares[0] - shares[1]).abs().max() < 0.005


def test_labels_belong_to_their_images():
    """Class means of the training part recognise most of the validation part."""
    (images, labels), (held, truth) = (split.tensors for split in digits())
    means = torch.stack([images[labels == c].flatten(1).mean(0) for c in range(10)])
    assert (torch.cdist(held.flatten(1), means).argmin(1) == truth).float().mean() > 0.85


def test_the_seed_moves_the_split():
    assert not torch.equal(digits(seed=0).val.tensors[0], digits(seed=1).val.tensors[0])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 0.004, 0.998])
def test_refuses_an_empty_split(fraction):
    with pytest.raises(ConfigError, match=r"data\.val_fraction="):
        digits(val_fraction=fraction)
