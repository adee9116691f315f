"""Compute which samples an optimizer step trains on from the seed and the step's number.

Nothing is recorded while training: the loader's order can be computed again at any time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from runner.data.collate import collate, makes_batches
from runner.data.loader import Loader


class StepSamples(NamedTuple):
    """The samples of an optimizer step: indices in the training set by micro-batch.

    Step and epoch count from 1.
    """

    step: int
    epoch: int
    micro_batches: list[list[int]]

    @property
    def indices(self) -> list[int]:
        """Return the indices of all micro-batches, in order."""
        return [index for micro_batch in self.micro_batches for index in micro_batch]


def samples_of_step(loader: Loader, accumulate: int, step: int) -> StepSamples:
    """Return the samples of an optimizer step, in all processes.

    Args:
        loader: of the training set.
        accumulate: micro-batches in a step; the last step of an epoch may have fewer.
        step: counted from 1.
    """
    steps_per_epoch = -(-len(loader) // accumulate)
    epoch = (step - 1) // steps_per_epoch + 1
    position = (step - 1) % steps_per_epoch
    batches = loader.order(epoch).split(loader.batch_size)
    step_batches = batches[position * accumulate : (position + 1) * accumulate]
    return StepSamples(step, epoch, [indices.tolist() for indices in step_batches])


def targets_of_samples(loader: Loader, indices: Sequence[int]) -> Any:
    """Return the targets of these samples as the data set holds them: [samples, ...]."""
    dataset: Any = loader.dataset
    chosen = torch.tensor(indices)
    if loader.slices_tensors:
        return dataset.tensors[-1][chosen]
    if makes_batches(dataset):
        return loader.layout.split(dataset.batch(chosen))[1]
    join = loader.collator or collate
    return loader.layout.split(join([dataset[index] for index in indices]))[1]
