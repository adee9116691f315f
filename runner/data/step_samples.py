"""Compute which samples an optimizer step trains on from the seed and the step's number.

Nothing is recorded while training: the loader's order can be computed again at any time. Of a
stream, samples are places in a pass, which is read again up to them.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch

from runner.data.batch_layout import Batch
from runner.data.collate import collate, makes_batches
from runner.data.stream_loader import BatchLoader, StreamLoader, StreamPlace
from runner.utils.errors import ConfigError


class StepSamples(NamedTuple):
    """The samples of an optimizer step: indices in the training set, or in a stream's pass, by
    micro-batch.

    Step and epoch count from 1.
    """

    step: int
    epoch: int
    micro_batches: list[list[int]]

    @property
    def indices(self) -> list[int]:
        """Return the indices of all micro-batches, in order."""
        return [index for micro_batch in self.micro_batches for index in micro_batch]


def samples_of_step(loader: BatchLoader, accumulate: int, step: int) -> StepSamples:
    """Return the samples of an optimizer step, in all processes.

    Args:
        loader: of the training set.
        accumulate: micro-batches in a step; the last step of an epoch may have fewer.
        step: counted from 1; of a stream, one that this process has trained.
    """
    if isinstance(loader, StreamLoader):
        place = loader.place_of_step(step, accumulate)
        return StepSamples(step, place.epoch, loader.micro_batches(place, accumulate))
    steps_per_epoch = -(-len(loader) // accumulate)
    epoch = (step - 1) // steps_per_epoch + 1
    position = (step - 1) % steps_per_epoch
    batches = loader.order(epoch).split(loader.batch_size)
    step_batches = batches[position * accumulate : (position + 1) * accumulate]
    return StepSamples(step, epoch, [indices.tolist() for indices in step_batches])


def saved_batches(
    loader: BatchLoader, epoch: int, micro_batches: Sequence[Sequence[int]]
) -> list[Batch]:
    """Return the batches of micro-batches of samples of an epoch.

    Raises:
        ConfigError: a stream ends before them, or they are of another train.batch_size.
    """
    if not isinstance(loader, StreamLoader):
        return list(loader.batches([torch.tensor(micro) for micro in micro_batches]))
    first = micro_batches[0][0] // loader.batch_size
    batches = list(islice(loader.epoch(epoch, first), len(micro_batches)))
    # After they are read: only then it is known where the pass ends.
    read = loader.micro_batches(StreamPlace(epoch, first), len(batches))
    if read != [[*micro] for micro in micro_batches]:
        raise ConfigError(
            f"data: the saved samples {micro_batches[0][0]} to {micro_batches[-1][-1]} are not in "
            f"pass {epoch} of the stream, or not in batches of {loader.batch_size}. Type the data= "
            "and train.batch_size= that they were saved with."
        )
    return batches


def targets_of_steps(
    loader: BatchLoader, steps: Sequence[StepSamples]
) -> Iterator[tuple[list[int], Any]]:
    """Yield the samples of steps, at most a batch at a time, and their targets [samples, ...]."""
    for epoch, group in groupby(steps, key=lambda samples: samples.epoch):
        indices = [index for samples in group for index in samples.indices]
        for part in torch.tensor(indices).split(loader.batch_size):
            yield part.tolist(), targets_of_samples(loader, part.tolist(), epoch)


def all_targets(loader: BatchLoader) -> Iterator[tuple[list[int], Any]]:
    """Yield all samples of a data set, a batch at a time, and their targets [samples, ...]."""
    if isinstance(loader, StreamLoader):
        for places, (_, target) in loader.first_batches():
            yield places.tolist(), target
        return
    for part in torch.arange(loader.examples).split(loader.batch_size):
        yield part.tolist(), targets_of_samples(loader, part.tolist())


def targets_of_samples(loader: BatchLoader, indices: Sequence[int], epoch: int = 1) -> Any:
    """Return the targets of these samples as the data set holds them: [samples, ...].

    Args:
        loader: of the data set.
        indices: of the samples; of a stream, their places in the pass, in order.
        epoch: number of the pass.
    """
    dataset: Any = loader.dataset
    if isinstance(loader, StreamLoader):
        make = loader.collator or collate
        return loader.layout.split(make(loader.examples_at(epoch, indices)))[1]
    chosen = torch.tensor(indices)
    if loader.slices_tensors:
        return dataset.tensors[-1][chosen]
    if makes_batches(dataset):
        return loader.layout.split(dataset.batch(chosen))[1]
    join = loader.collator or collate
    return loader.layout.split(join([dataset[index] for index in indices]))[1]
