import struct

import pytest
import torch
from torch.utils.data import TensorDataset

from runner.data.datasets.mnist import fashion_mnist, mnist
from runner.utils.errors import ConfigError


def write_idx(path, array):
    """Write the format of yann.lecun.com/exdb/mnist: magic number, sizes, bytes."""
    header = struct.pack(f">{1 + array.dim()}I", 0x0800 + array.dim(), *array.shape)
    path.write_bytes(header + bytes(array.flatten().tolist()))


def write_files(folder):
    folder.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 3)):
        images = torch.arange(count)[:, None, None].expand(count, 28, 28) * 20
        write_idx(folder / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", torch.arange(count))


@pytest.mark.parametrize(
    ("load", "folder", "mean", "std"),
    [(mnist, "MNIST", 0.1307, 0.3081), (fashion_mnist, "FashionMNIST", 0.2860, 0.3530)],
)
def test_reads_the_real_format(tmp_path, load, folder, mean, std):
    write_files(tmp_path / folder / "raw")
    train, val = load(root=str(tmp_path))
    assert type(train) is TensorDataset
    images, labels = train.tensors
    assert (images.shape, images.dtype) == ((6, 1, 28, 28), torch.float32)
    assert (labels.tolist(), labels.dtype) == (list(range(6)), torch.int64)
    assert images[5, 0, 3, 3].item() == pytest.approx((100 / 255 - mean) / std, rel=1e-5)
    assert len(val) == 3


def test_missing_files_name_folder_files_and_remedy(tmp_path):
    with pytest.raises(ConfigError) as error:
        mnist(root=str(tmp_path))
    for part in (str(tmp_path / "MNIST/raw"), "t10k-labels-idx1-ubyte", "data.download=true"):
        assert part in str(error.value)


def test_damaged_files_are_an_error_of_the_same_kind(tmp_path):
    write_files(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03\0\0")
    with pytest.raises(ConfigError, match="damaged"):
        mnist(root=str(tmp_path))
