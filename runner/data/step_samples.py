"""Which samples a step trains on: the seed and the step's number decide it, nothing is recorded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from runner.data.loader import Loader


class StepSamples(NamedTuple):
    """Indices in the training set, micro-batch by micro-batch; step and epoch count from 1."""

    step: int
    epoch: int
    micro_batches: list[list[int]]

    @property
    def flat(self) -> list[int]:
        """All of them, in order."""
        return [index for micro in self.micro_batches for index in micro]


def samples_of_step(loader: Loader, accumulate: int, step: int) -> StepSamples:
    """The samples of an optimizer step; the last one of an epoch may have fewer micro-batches."""
    per_epoch = -(-len(loader) // accumulate)
    epoch, position = (step - 1) // per_epoch + 1, (step - 1) % per_epoch
    batches = loader.order(epoch).split(loader.batch_size)
    chosen = batches[position * accumulate : (position + 1) * accumulate]
    return StepSamples(step, epoch, [indices.tolist() for indices in chosen])


def targets_of_samples(dataset: Any, indices: Sequence[int]) -> Tensor:
    """The targets of these samples, as the data set holds them."""
    chosen = torch.tensor(indices)
    if type(dataset) is TensorDataset:
        return dataset.tensors[1][chosen]
    if hasattr(dataset, "batch"):
        return dataset.batch(chosen)[1]
    return torch.stack([torch.as_tensor(dataset[index][1]) for index in indices])
