"""Load scikit-learn's handwritten digits: real data that need no download.

Source: UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998), its test part,
as scikit-learn ships it. Neither scikit-learn nor SciPy is imported: that takes a third of the time
in which a run starts.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
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
        ConfigError: val_fraction leaves fewer than ten images on one side, or scikit-learn is not
            installed.
    """
    table = _read_table()
    labels = table[:, -1].astype(np.int64)
    val = held_out(len(labels), val_fraction, "digits")
    if min(val, len(labels) - val) < 10:
        raise ConfigError(
            f"data=digits: val_fraction={val_fraction} leaves fewer than 10 images on one side, "
            "too few for one of each class. Type data.val_fraction=0.2."
        )
    train_rows, val_rows = stratified_rows(labels, val, seed)
    pixels = torch.from_numpy(table[:, :-1])
    train_pixels = pixels[train_rows]
    # Statistics of the training part alone: the validation part must not leak into them.
    mean = train_pixels.mean()
    std = train_pixels.std()

    def dataset(rows: NDArray[np.int64]) -> TensorDataset:
        images = ((pixels[rows] - mean) / std).float().view(-1, 1, 8, 8)
        return TensorDataset(images, torch.from_numpy(labels[rows]))

    return Splits(dataset(train_rows), dataset(val_rows))


def _read_table() -> NDArray[np.float64]:
    """Return the digits [1797, 65]: 64 pixels, 0 to 16, and the class of each image."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ConfigError("data=digits is part of scikit-learn. Type pip install scikit-learn.")
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(file, delimiter=",")


def stratified_rows(
    labels: NDArray[np.int64], val: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split rows at random with the same share of each class on both sides.

    The rows are those of sklearn.model_selection.train_test_split(stratify=labels).

    Args:
        labels: class of each row, from 0, [N]; each class has rows.
        val: number of rows for validation.
        seed: of the generator.

    Returns:
        The training and the validation rows.
    """
    generator = np.random.RandomState(seed)
    counts = np.bincount(labels)
    train_counts = _shares(counts, len(labels) - val, generator)
    val_counts = _shares(counts - train_counts, val, generator)
    rows_by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    train_rows = []
    val_rows = []
    for rows, train_count, val_count in zip(rows_by_class, train_counts, val_counts, strict=True):
        shuffled = rows[generator.permutation(len(rows))]
        train_rows.extend(shuffled[:train_count])
        val_rows.extend(shuffled[train_count : train_count + val_count])
    return generator.permutation(train_rows), generator.permutation(val_rows)


def _shares(
    counts: NDArray[np.int64], total: int, generator: np.random.RandomState
) -> NDArray[np.int64]:
    """Return how many of `total` draws fall to each class, in proportion to the classes' counts."""
    exact = counts / counts.sum() * total
    shares = np.floor(exact).astype(np.int64)
    remainders = exact - shares
    # The draws that rounding down leaves go to the largest remainders, at random among equal ones.
    for remainder in np.unique(remainders)[::-1]:
        missing = total - shares.sum()
        if missing == 0:
            break
        (tied,) = np.nonzero(remainders == remainder)
        shares[generator.choice(tied, size=min(len(tied), missing), replace=False)] += 1
    return shares
