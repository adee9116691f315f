"""Load scikit-learn's handwritten digits: real data that need no download.

Source: UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998), its test part,
as scikit-learn ships it.
"""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from runner.data.splits import Splits, split_by_class


def digits(val_fraction: float = 0.2, seed: int = 0) -> Splits:
    """Load 1797 images of 8 x 8 pixels in ten classes, and split them stratified by class.

    No files are read outside the installed scikit-learn.

    Args:
        val_fraction: share for validation, between 0 and 1.
        seed: of the split alone; the run's seed does not change it.

    Returns:
        float32 [N, 1, 8, 8], zero mean and unit variance over the training pixels; int64 [N].

    Raises:
        ConfigError: val_fraction leaves fewer than ten images on one side.
    """
    parts = split_by_class(*_pixels_and_labels(), val_fraction, seed, "digits")
    train_pixels, val_pixels, train_labels, val_labels = parts
    # Statistics of the training part alone: the validation part must not leak into them.
    mean = train_pixels.mean()
    std = train_pixels.std()

    def dataset(flat: torch.Tensor, targets: torch.Tensor) -> TensorDataset:
        images = ((flat - mean) / std).float().view(-1, 1, 8, 8)
        return TensorDataset(images, targets.to(torch.int64))

    return Splits(dataset(train_pixels, train_labels), dataset(val_pixels, val_labels))


@cache
def _pixels_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """Return float64 [N, 64] and int64 [N], parsed from scikit-learn's text file once."""
    pixels, labels = load_digits(return_X_y=True)
    return np.asarray(pixels), np.asarray(labels)
