"""MNIST and Fashion-MNIST from their own files."""

from torchvision import datasets

from runner.data.datasets.torchvision_files import Source
from runner.data.splits import Splits

_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MNIST = Source("mnist", datasets.MNIST, "MNIST/raw", _FILES, (0.1307,), (0.3081,))
_FASHION = Source(
    "fashion_mnist", datasets.FashionMNIST, "FashionMNIST/raw", _FILES, (0.2860,), (0.3530,)
)


def mnist(root: str = "data", download: bool = False) -> Splits:
    """Handwritten digits (LeCun et al. 1998), 60,000 to train and 10,000 to validate.

    Args:
        root: the folder that holds MNIST/raw.
        download: let torchvision fetch missing files.

    Returns:
        float32 [N, 1, 28, 28], normalised by the training set's mean and deviation; int64 [N].

    Raises:
        ConfigError: files are missing or damaged.
    """
    return _MNIST.load(root, download)


def fashion_mnist(root: str = "data", download: bool = False) -> Splits:
    """Clothing (Xiao et al. 2017, arXiv:1708.07747); shapes and errors as `mnist`.

    Args:
        root: the folder that holds FashionMNIST/raw.
        download: let torchvision fetch missing files.
    """
    return _FASHION.load(root, download)
