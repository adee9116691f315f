"""Define Splits, which a data target returns, and the helpers that several targets share."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from runner.utils.errors import ConfigError

_Set = TypeVar("_Set")


class Splits(NamedTuple):
    """Two data sets of (input, target) pairs, map-style ones or streams (IterableDataset).

    In-memory data are TensorDatasets, which the runner slices a whole batch at a time; a data set
    with a method `batch(indices: Tensor) -> (input, target)` is gathered through that, in loading
    processes too, and on the device where it has `nbytes` and `to(device)`.
    """

    train: Dataset
    val: Dataset


class RunData(NamedTuple):
    """The data sets of a run.

    Attributes:
        splits: the training set, and the validation set whose metrics runs are compared by.
        validation: every validation set by its name, the one of `splits` first; the name of an
            only one is empty.
        test: every test set by its name, which is empty for an only one; none where the data
            target returns none.
    """

    splits: Splits
    validation: Mapping[str, Dataset]
    test: Mapping[str, Dataset]

    @property
    def labelled(self) -> dict[str, Dataset]:
        """Return every data set, by the labels of set_labels."""
        evaluated = {**set_labels("val", self.validation), **set_labels("test", self.test)}
        return {"train": self.splits.train, **evaluated}


def set_labels(kind: str, sets: Mapping[str, _Set]) -> dict[str, _Set]:
    """Return sets by the text that messages and metrics name them by: `val`, or `val/<name>`."""
    return {f"{kind}/{name}" if name else kind: found for name, found in sets.items()}


def image_tensors(
    pixels: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float]
) -> TensorDataset:
    """Normalise images channel by channel: (pixels / 255 - mean) / std.

    Args:
        pixels: uint8 [N, C, H, W].
        labels: integers [N].
        mean, std: C numbers each, in units of the full range.

    Returns:
        float32 [N, C, H, W] and int64 [N].
    """
    images = pixels.to(torch.float32, memory_format=torch.contiguous_format)
    # In place: CIFAR's 50,000 images are 0.6 GB in float32, and one copy is enough.
    images.sub_(torch.tensor(mean).view(-1, 1, 1) * 255).div_(
        torch.tensor(std).view(-1, 1, 1) * 255
    )
    return TensorDataset(images, labels.to(torch.int64))


def held_out(count: int, fraction: float, name: str) -> int:
    """Return how many of `count` examples are for validation.

    Args:
        count: number of examples.
        fraction: share for validation, between 0 and 1.
        name: the data config's name, for the message.

    Raises:
        ConfigError: the fraction leaves either side empty.
    """
    val = round(count * fraction) if 0 < fraction < 1 else 0
    if not 0 < val < count:
        raise ConfigError(
            f"data={name}: val_fraction={fraction} of {count} examples leaves an empty split; "
            "allowed is a fraction between 0 and 1 that leaves examples on both sides. "
            "Type data.val_fraction=0.1, or use more examples."
        )
    return val


def require_at_least(name: str, **limits: tuple[int, int]) -> None:
    """Check sizes of a data config, given as keyword=(value, smallest allowed).

    Args:
        name: the data config's name, for the messages.
        limits: by the config's key.

    Raises:
        ConfigError: one line for each size that is too small.
    """
    problems = [
        f"data={name}: {key}={value} is below {smallest}. Type data.{key}={smallest} or more."
        for key, (value, smallest) in limits.items()
        if value < smallest
    ]
    if problems:
        raise ConfigError(*problems)
