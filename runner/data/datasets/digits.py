"""Load scikit-learn's handwritten digits: real data that need no download.

Source: UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998), its test part,
as scikit-learn ships it.
"""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

from runner.data.splits import Splits, held_out
from runner.utils.errors import ConfigError


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
    pixels, labels = _pixels_and_labels()
    val = held_out(len(labels), val_fraction, "digits")
    if min(val, len(labels) - val) < 10:
        raise ConfigError(
            f"data=digits: val_fraction={val_fraction} leaves fewer than 10 images on one side, "
            "too few for one of each class. Type data.val_fraction=0.2."
        )
    parts = train_test_split(pixels, labels, test_size=val, random_state=seed, stratify=labels)
    train_pixels, val_pixels, train_labels, val_labels = map(torch.from_numpy, parts)
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
