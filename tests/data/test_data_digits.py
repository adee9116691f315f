import subprocess
import sys

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

from runner.data.datasets.digits import digits, stratified_rows
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


@pytest.mark.parametrize("fraction", [0.2, 0.1, 0.05, 0.5, 0.333, 0.99])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_the_split_is_that_of_scikit_learn(fraction, seed):
    pixels, labels = load_digits(return_X_y=True)
    rows = [*range(len(labels))]
    val = round(fraction * len(labels))
    wanted = train_test_split(rows, test_size=val, random_state=seed, stratify=labels)
    found = stratified_rows(labels, val, seed)
    assert [part.tolist() for part in found] == wanted
    train, held = digits(fraction, seed)
    raw = torch.from_numpy(pixels[wanted[0]])
    images = ((raw - raw.mean()) / raw.std()).float().view(-1, 1, 8, 8)
    assert torch.equal(train.tensors[0], images)
    assert torch.equal(train.tensors[1], torch.from_numpy(labels[wanted[0]]))
    assert held.tensors[1].tolist() == labels[wanted[1]].tolist()
    assert held.tensors[1].dtype == torch.int64


def test_scikit_learn_is_not_imported(root):
    """Its import takes a third of the time in which a run starts."""
    script = "import sys; from runner.data.datasets.digits import digits; digits(); " + (
        "assert not {'sklearn', 'scipy', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=100)


def test_the_seed_moves_the_split():
    assert not torch.equal(digits(seed=0).val.tensors[0], digits(seed=1).val.tensors[0])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 0.004, 0.998])
def test_refuses_an_empty_split(fraction):
    with pytest.raises(ConfigError, match=r"data\.val_fraction="):
        digits(val_fraction=fraction)
