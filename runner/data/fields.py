"""Hold a data set of named fields in memory, for models that take them as keyword arguments."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED_LABEL = -100
"""The label of padding, which torch's cross entropy leaves out."""


class TensorFields(Dataset):
    """A data set of examples that are dicts of tensors, gathered a whole batch at a time.

    Args:
        fields: tensors [N, ...] by name, all of the same N.

    Raises:
        ValueError: there is no field, or they differ in N.
    """

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        if len({len(tensor) for tensor in fields.values()}) != 1:
            sizes = ", ".join(f"{name}: {len(tensor)}" for name, tensor in fields.items())
            raise ValueError(f"fields need one number of examples, got {sizes or 'no field'}")
        self.fields = dict(fields)

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


def split_fields(fields: Mapping[str, Tensor], val: int, seed: int) -> tuple[Dataset, Dataset]:
    """Split examples at random into two data sets.

    Args:
        fields: tensors [N, ...] by name.
        val: examples of the second data set.
        seed: of the split alone.

    Raises:
        ValueError: the fields differ in N.
    """
    count = len(TensorFields(fields))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = order[val:].sort().values, order[:val].sort().values
    train, validation = (
        TensorFields({name: tensor[part] for name, tensor in fields.items()}) for part in parts
    )
    return train, validation
