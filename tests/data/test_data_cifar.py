import hashlib
import pickle

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, CIFAR100

from runner.data.datasets.cifar import cifar10, cifar100
from runner.utils.errors import ConfigError

# Planes of red, green and blue, each row by row, as CIFAR stores them; red grows downwards.
IMAGE = np.concatenate([np.repeat(np.arange(32), 32) * 8, np.repeat([0, 51], 1024)]).astype("uint8")


def write_files(folder, kind, key, monkeypatch):
    """Write small files in CIFAR's format, and let torchvision know their checksums."""
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


@pytest.mark.parametrize(
    ("load", "kind", "folder", "count"),
    [(cifar10, CIFAR10, "cifar-10-batches-py", 10), (cifar100, CIFAR100, "cifar-100-python", 2)],
)
def test_reads_the_real_format(tmp_path, monkeypatch, load, kind, folder, count):
    key = "labels" if kind is CIFAR10 else "fine_labels"
    write_files(tmp_path / folder, kind, key, monkeypatch)
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


def test_normalised_by_the_published_statistics(tmp_path, monkeypatch):
    write_files(tmp_path / "cifar-10-batches-py", CIFAR10, "labels", monkeypatch)
    pixel = cifar10(root=str(tmp_path)).train.tensors[0][0, :, 31, 0]
    expected = [(248 / 255 - 0.4914) / 0.2470, -0.4822 / 0.2435, (0.2 - 0.4465) / 0.2616]
    assert pixel.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("load", "folder", "file"),
    [(cifar10, "cifar-10-batches-py", "data_batch_5"), (cifar100, "cifar-100-python", "train")],
)
def test_missing_files_name_folder_files_and_remedy(tmp_path, load, folder, file):
    with pytest.raises(ConfigError) as error:
        load(root=str(tmp_path))
    for part in (str(tmp_path / folder), file, "data.download=true"):
        assert part in str(error.value)


def test_a_wrong_checksum_is_refused_before_unpickling(tmp_path, monkeypatch):
    write_files(tmp_path / "cifar-10-batches-py", CIFAR10, "labels", monkeypatch)
    (tmp_path / "cifar-10-batches-py/data_batch_3").write_bytes(b"not what it was")
    with pytest.raises(ConfigError, match="damaged"):
        cifar10(root=str(tmp_path))


def test_a_failed_download_is_a_config_error(tmp_path, monkeypatch):
    def offline(self):
        raise OSError("no route to host")

    monkeypatch.setattr(CIFAR10, "download", offline)
    with pytest.raises(ConfigError, match=r"did not succeed.*no route to host"):
        cifar10(root=str(tmp_path), download=True)
