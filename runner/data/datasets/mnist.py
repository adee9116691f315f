"""Load MNIST and Fashion-MNIST from their own files (IDX format).

Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998; Xiao et al.,
Fashion-MNIST, arXiv:1708.07747.
"""

from torchvision import datasets

from runner.data.datasets.torchvision_files import TorchvisionDataset
from runner.data.splits import Splits

_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MNIST = TorchvisionDataset("mnist", datasets.MNIST, "MNIST/raw", _FILES, (0.1307,), (0.3081,))
_FASHION = TorchvisionDataset(
    "fashion_mnist", datasets.FashionMNIST, "FashionMNIST/raw", _FILES, (0.2860,), (0.3530,)
)


def mnist(root: str = "data", download: bool = False) -> Splits:
    """Load MNIST: handwritten digits in ten classes, 60,000 to train and 10,000 to validate.

    Args:
        root: the folder that holds MNIST/raw/ with train-images-idx3-ubyte,
            train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte.
        download: let torchvision download missing files (12 MB).

    Returns:
        float32 [N, 1, 28, 28], normalised by the training set's mean and deviation; int64 [N].

    Raises:
        ConfigError: files are missing or damaged.
    """
    return _MNIST.load(root, download)


def fashion_mnist(root: str = "data", download: bool = False) -> Splits:
    """Load Fashion-MNIST: clothing in ten classes, 60,000 to train and 10,000 to validate.

    Args:
        root: the folder that holds FashionMNIST/raw/ with the same four files as MNIST/raw/ for
            `mnist`.
        download: let torchvision download missing files (31 MB).

    Returns:
        float32 [N, 1, 28, 28], normalised by the training set's mean and deviation; int64 [N].

    Raises:
        ConfigError: files are missing or damaged.
    """
    return _FASHION.load(root, download)
