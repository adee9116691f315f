"""Load CIFAR-10 and CIFAR-100 from their own files (the Python version).

Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from torchvision import datasets

from runner.data.datasets.torchvision_files import TorchvisionDataset
from runner.data.splits import Splits

_CIFAR10 = TorchvisionDataset(
    "cifar10",
    datasets.CIFAR10,
    "cifar-10-batches-py",
    ("batches.meta", *(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
)
_CIFAR100 = TorchvisionDataset(
    "cifar100",
    datasets.CIFAR100,
    "cifar-100-python",
    ("meta", "train", "test"),
    (0.5071, 0.4865, 0.4409),
    (0.2673, 0.2564, 0.2762),
)


def cifar10(root: str = "data", download: bool = False) -> Splits:
    """Load CIFAR-10: photographs in ten classes, 50,000 to train and 10,000 to validate.

    Args:
        root: the folder that holds cifar-10-batches-py/ with batches.meta, data_batch_1 to
            data_batch_5 and test_batch.
        download: let torchvision download missing files (170 MB).

    Returns:
        float32 [N, 3, 32, 32], normalised by the training set's mean and deviation; int64 [N].

    Raises:
        ConfigError: files are missing, or their checksums are wrong.
    """
    return _CIFAR10.load(root, download)


def cifar100(root: str = "data", download: bool = False) -> Splits:
    """Load CIFAR-100: photographs in a hundred classes (the fine labels), 50,000 to train and
    10,000 to validate.

    Args:
        root: the folder that holds cifar-100-python/ with meta, train and test.
        download: let torchvision download missing files (169 MB).

    Returns:
        float32 [N, 3, 32, 32], normalised by the training set's mean and deviation; int64 [N].

    Raises:
        ConfigError: files are missing, or their checksums are wrong.
    """
    return _CIFAR100.load(root, download)
