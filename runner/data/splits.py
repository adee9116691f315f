"""Define Splits, which a data target returns, and what several targets share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from runner.core import ConfigError, refuse

_Set = TypeVar("_Set")


class Splits(NamedTuple):
    """Two data sets of (input, target) pairs, map-style ones or streams (IterableDataset).

    In-memory data are TensorDatasets, which the runner slices a whole batch at a time; a data set
    with a method `batch(indices: Tensor) -> (input, target)` is gathered through that, in loading
    processes too, and on the device where it has `nbytes` and `to(device)`.
    """

    train: Dataset
    val: Dataset


class RunSets(NamedTuple, Generic[_Set]):
    """The data sets of a run, or their loaders.

    Attributes:
        train: the training set.
        validation: every validation set by its name, first the one whose metrics runs are compared
            by; the name of an only one is empty.
        test: every test set by its name, which is empty for an only one; none where the data
            target returns none.
    """

    train: _Set
    validation: Mapping[str, _Set]
    test: Mapping[str, _Set]

    @property
    def val(self) -> _Set:
        """Return the validation set that runs are compared by, the first."""
        return next(iter(self.validation.values()))

    def train_and_val(self) -> "RunSets[_Set]":
        """Return the training set and the first validation set alone."""
        return RunSets(self.train, {"": self.val}, {})

    @property
    def labelled(self) -> dict[str, _Set]:
        """Return every set, by the labels of set_labels."""
        evaluated = set_labels("val", self.validation) | set_labels("test", self.test)
        return {"train": self.train, **evaluated}


RunData = RunSets[Dataset]


def label_remedy(label: int, is_mask: bool) -> str:
    """Return the keys to type where the largest label is no class of data.meta.classes.

    Args:
        label: the largest.
        is_mask: each example has a label for every pixel.
    """
    # VOC and Cityscapes mark the borders of objects with 255.
    ignored = f"task.ignore_index={label} where {label} marks pixels that do not count, else "
    return f"{ignored if is_mask else ''}data.meta.classes={label + 1}"


def set_labels(kind: str, sets: Mapping[str, _Set]) -> dict[str, _Set]:
    """Return sets by the text that messages and metrics name them by: `val`, or `val/<name>`."""
    return {f"{kind}/{name}" if name else kind: part for name, part in sets.items()}


class TensorFields(Dataset):
    """A data set of examples that are dicts of tensors, gathered a whole batch at a time.

    Args:
        fields: tensors [N, ...] by name, all of the same N.
        facts: see runner.data.fingerprint.learned_facts.

    Raises:
        ValueError: there is no field, or they differ in N.
    """

    def __init__(self, fields: Mapping[str, Tensor], facts: Mapping[str, Any] = {}) -> None:
        if len({len(tensor) for tensor in fields.values()}) != 1:
            sizes = ", ".join(f"{name}: {len(tensor)}" for name, tensor in fields.items())
            raise ValueError(f"fields need one number of examples, got {sizes or 'no field'}")
        self.fields = dict(fields)
        self.learned_facts = facts

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one example: the fields' tensors [...] by name."""
        return {name: tensor[index] for name, tensor in self.fields.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the fields in memory."""
        return sum(tensor.nbytes for tensor in self.fields.values())

    def to(self, device: torch.device) -> "TensorFields":
        """Return a copy on a device; its `batch` takes indices on that device."""
        return TensorFields({name: tensor.to(device) for name, tensor in self.fields.items()})

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Return many examples, indices int64 [B]: tensors [B, ...] by name."""
        return {name: tensor.index_select(0, indices) for name, tensor in self.fields.items()}


class TextPairs(TensorFields):
    """Tokens of texts, and of others as labels, which an encoder-decoder takes, too."""


def split_rows(count: int, val: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the rows of training and those of `val` examples for validation, drawn at random.

    Args:
        count: rows of the data.
        val: examples for validation.
        seed: of the split alone.

    Returns:
        Two parts of the numbers below count, int64, each in ascending order.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[val:].sort().values, order[:val].sort().values


def split_fields(
    fields: Mapping[str, Tensor],
    val: int,
    seed: int,
    kind: Callable[..., TensorFields] = TensorFields,
) -> Splits:
    """Split examples at random.

    Args:
        fields: tensors [N, ...] by name.
        val: examples for validation.
        seed: of the split alone.
        kind: class of the data sets, or a partial one.

    Raises:
        ValueError: the fields differ in N.
    """
    dataset = TensorFields(fields)
    rows, val_rows = split_rows(len(dataset), val, seed)
    return Splits(kind(dataset.batch(rows)), kind(dataset.batch(val_rows)))


def first_for_validation(inputs: Tensor, targets: Tensor, val: int) -> Splits:
    """Return data sets of tensors [N, ...], whose first `val` examples are for validation."""
    return Splits(
        TensorDataset(inputs[val:], targets[val:]), TensorDataset(inputs[:val], targets[:val])
    )


def split_by_class(
    pixels: np.ndarray, labels: np.ndarray, val_fraction: float, seed: int, name: str
) -> list[Tensor]:
    """Split images at random, each class in the same proportion.

    Args:
        pixels: [N, ...].
        labels: integers [N], of ten classes.
        val_fraction: share for validation, between 0 and 1.
        seed: of the split alone.
        name: the data config's name, for the messages.

    Returns:
        Pixels for training and for validation, then labels for training and for validation.

    Raises:
        ConfigError: the fraction leaves fewer than ten images on one side.
    """
    from sklearn.model_selection import train_test_split

    val = held_out(len(labels), val_fraction, name)
    if min(val, len(labels) - val) < 10:
        raise ConfigError(
            f"data={name}: val_fraction={val_fraction} leaves fewer than 10 images on one side. "
            "Type data.val_fraction=0.2."
        )
    parts = train_test_split(pixels, labels, test_size=val, random_state=seed, stratify=labels)
    return [torch.from_numpy(part) for part in parts]


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
    # Operations are in place: CIFAR's 50,000 images are 0.6 GB in float32; one copy is enough.
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
            f"data={name}: val_fraction={fraction} of {count} examples leaves an empty split. "
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
    refuse(
        f"data={name}: {key}={value} is below {smallest}. Type data.{key}={smallest} or more."
        for key, (value, smallest) in limits.items()
        if value < smallest
    )
