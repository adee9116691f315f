"""Compute which samples an optimizer step trains on from the seed and the step's number.

Nothing is recorded while training: the loader's order can be computed again at any time. A stream
has no such order, and its samples no indices.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from runner.core import Batch, batch_layout
from runner.data.loader import Loader
from runner.data.stream_loader import DatasetLoader, StreamLoader


class StepSamples(NamedTuple):
    """The samples of an optimizer step: indices in the training set, by micro-batch; none of a
    stream.

    Step and epoch count from 1. The number of the first micro-batch in its epoch counts from 0.
    """

    step: int
    epoch: int
    micro_batches: list[list[int]]
    first_batch: int = 0

    @property
    def indices(self) -> list[int]:
        """Return the indices of all micro-batches, in order."""
        return [index for micro_batch in self.micro_batches for index in micro_batch]


def samples_of_step(loader: DatasetLoader, accumulate: int, step: int) -> StepSamples:
    """Return the samples of an optimizer step, in all processes; of a stream no micro-batch.

    Args:
        loader: of the training set.
        accumulate: micro-batches in a step; the last step of an epoch may have fewer.
        step: counted from 1.
    """
    start = loader.start
    if isinstance(loader, StreamLoader) or step <= start.step:
        return StepSamples(step, 0, [])  # the batches of steps before a resume may be others
    epoch = start.epoch
    taken = start.examples
    position = step - start.step - 1
    rest = batch_layout.steps_of_epoch(loader, accumulate, taken)
    if position >= rest:
        later, position = divmod(position - rest, batch_layout.steps_of_epoch(loader, accumulate))
        epoch += 1 + later
        taken = 0
    first = taken + position * accumulate * loader.batch_size
    batches = loader.order(epoch)[first:].split(loader.batch_size)[:accumulate]
    micro_batches = [indices.tolist() for indices in batches]
    return StepSamples(step, epoch, micro_batches, first // loader.batch_size)


def saved_batches(
    loader: Loader, epoch: int, micro_batches: Sequence[Sequence[int]], first_batch: int = 0
) -> list[Batch]:
    """Return the batches of micro-batches of samples, with what the run drew at random for them.

    Args:
        loader: of the training set.
        epoch: of the first of them; those after its end are of the next one.
        micro_batches: indices in the training set.
        first_batch: number of the first micro-batch in its epoch, from 0.
    """
    batches: list[Batch] = []
    for number, indices in enumerate(micro_batches, first_batch):
        later, position = divmod(number, len(loader))
        batches += loader.batches([torch.tensor(indices)], epoch + later, position)
    return batches


def targets_of_steps(
    loader: DatasetLoader, steps: Sequence[StepSamples]
) -> Iterator[tuple[list[int], Any]]:
    """Yield the samples of steps, at most a batch at a time, and their targets [samples, ...].

    Nothing is yielded of a stream.
    """
    if isinstance(loader, StreamLoader):
        return
    for samples in steps:
        for number, indices in enumerate(samples.micro_batches, samples.first_batch):
            yield indices, _targets_of_batch(loader, indices, samples.epoch, number)


def all_targets(loader: DatasetLoader) -> Iterator[tuple[list[int], Any]]:
    """Yield all samples of a data set, a batch at a time, and their targets [samples, ...]."""
    if isinstance(loader, StreamLoader):
        for places, (_, target) in loader.first_batches():
            yield places.tolist(), target
        return
    for number, part in enumerate(torch.arange(loader.examples).split(loader.batch_size)):
        # An evaluation reads epoch 0.
        yield part.tolist(), _targets_of_batch(loader, part.tolist(), 0, number)


def _targets_of_batch(loader: Loader, indices: Sequence[int], epoch: int, number: int) -> Any:
    """Return the targets of the samples of a batch as the run was given them: [samples, ...].

    Args:
        loader: of the data set.
        indices: of the samples.
        epoch: that the batch belongs to.
        number: of the batch in its epoch, from 0.
    """
    dataset: Any = loader.dataset
    chosen = torch.tensor(indices)
    if loader.slices_tensors:
        return dataset.tensors[-1][chosen]
    return loader.batch_in_this_process(chosen, epoch, number)[1]
