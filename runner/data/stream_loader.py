"""Iterate over a data set without indices, an IterableDataset, in batches, pass after pass.

A batch is reached by reading the pass up to it. A resumed run counts and skips batches; that the
stream repeats itself is the user's word.

The random generators of the host are seeded for each batch, by the seed, the number of the pass and
that of the batch. So what a stream or a collator draws from them depends neither on dropout nor on
the batch that a resumed run begins with, and a validation pass is the same in each evaluation.

Which samples an optimizer step trains on, here and with indices, is computed from the seed and the
step's number. Nothing is recorded while training: a loader's order can be computed again at any
time. A stream has no such order, and its samples no indices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from runner.core import (
    Batch,
    ConfigError,
    Mode,
    RunnerError,
    RunSpec,
    batch_layout,
    errors,
    random_streams,
    stop_signals,
    targets,
    torchrun,
)
from runner.data.collate import collate, error_with_line
from runner.data.loader import (
    DEFAULT_OPTIONS,
    Loader,
    LoaderOptions,
    WaitContext,
    checked_batch,
    move_batches,
    restored_random_state,
    unchanged,
)
from runner.data.value_hash import value_digest
from runner.data.workers import init_worker, wait_for_batch


def is_stream(dataset: Any) -> bool:
    """Return whether a data set is iterated, as torch's and Hugging Face's IterableDataset are."""
    # datasets.IterableDataset takes torch's class as a base once torch is there.
    return isinstance(dataset, IterableDataset)


def begin_pass(stream: Any, number: int) -> Iterator[Any]:
    """Return the examples of a pass over a stream, whose `set_epoch(number)` is called if it has
    that."""
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(number)
    return iter(stream)


class StreamBatch(NamedTuple):
    """A batch of a stream.

    Attributes:
        first: number of its first example in the pass, from 0.
        size: examples in all processes.
        content: this process's part, collated.
    """

    first: int
    size: int
    content: Any


@dataclass(frozen=True, eq=False)
class StreamPass(IterableDataset[StreamBatch]):
    """The batches of one pass over a stream, from one of them on.

    Every process reads the whole stream, and collates its part of each batch.

    Attributes:
        stream: the data set.
        batch_size: examples in a batch of all processes; the last of a pass may have fewer.
        collate: makes a batch of a list of examples.
        seed: of the run.
        number: of the pass.
        reads: examples that are read and dropped first, and in batches of which size. A stream may
            draw from the generators, which are seeded for each batch.
        rank: of this process.
    """

    stream: Any
    batch_size: int
    collate: Callable[[list[Any]], Any]
    seed: int
    number: int
    reads: tuple[tuple[int, int], ...] = ()
    rank: torchrun.ProcessRank = torchrun.SINGLE_PROCESS

    def __iter__(self) -> Iterator[StreamBatch]:
        """Yield the batches of the pass."""
        stream: Iterator[Any] | None = None
        first = 0
        for number, (size, is_new) in enumerate(self._sizes()):
            batch = None
            # Around both: to save and restore numpy's state takes longer than a small batch.
            with restored_random_state():
                random_streams.seed_host(batch_layout.batch_seed(self.seed, self.number, number))
                if stream is None:
                    stream = begin_pass(self.stream, self.number)
                examples = list(islice(stream, size))
                if examples and is_new:
                    # Collectives need every process to run a step, with one example at least.
                    part = examples[self.rank.batch_slice(len(examples))] or examples[:1]
                    random_streams.seed_host(
                        batch_layout.batch_seed(self.seed, self.number, number, self.rank.index + 1)
                    )
                    batch = StreamBatch(first, len(examples), self.collate(part))
            if batch is not None:
                yield batch
            if len(examples) < size:
                return
            first += size

    def _sizes(self) -> Iterator[tuple[int, bool]]:
        """Yield the size of each batch, and whether it is collated."""
        for taken, size in self.reads:
            for begun in range(0, taken, size):
                yield min(size, taken - begun), False
        while True:
            yield self.batch_size, True


def first_examples(stream: Any, count: int) -> list[Any]:
    """Return the first examples of a stream, fewer where it has no more.

    Raises:
        DataError: the stream fails.
    """
    with explain_stream_errors(stream):
        return list(islice(begin_pass(stream, 1), count))


@contextmanager
def explain_stream_errors(stream: Any) -> Iterator[None]:
    """Return a context in which an error that a stream raises is a DataError.

    A connection that is lost is such an error, so that the message suffices without a traceback.
    """
    try:
        yield
    except (RunnerError, stop_signals.Stopped, MemoryError):
        raise  # these have messages of their own
    except Exception as error:
        kind = type(stream).__name__
        raise errors.DataError(
            f"data: the stream, a {kind}, fails: {error_with_line(error)}."
        ) from error


def stream_problems(spec: RunSpec, train: Any, evaluated: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each setting that streams among the data sets cannot obey.

    Args:
        spec: of the run.
        train: the training set.
        evaluated: the validation and test sets, by their labels in messages.
    """
    if spec.debug.overfit:
        return  # a list of a few training examples takes the place of all sets
    streams = [label for label, dataset in evaluated.items() if is_stream(dataset)]
    if is_stream(train) and Mode.named(spec.mode).reads_training_data:
        streams.insert(0, "train")
        sampler = spec.data.get("sampler")
        if spec.train.max_steps is None:
            key = f"train.epochs={spec.train.epochs}"
            yield f"{key}: the train set is a stream without length. Type train.max_steps=<steps>."
        if sampler is not None:
            key = f"data.sampler={targets.target_name(sampler)}"
            yield f"{key}: the train set is a stream, without indices. Leave data.sampler out."
    if not streams:
        return
    name = f"the {streams[0]} set is a stream"
    if spec.train.num_workers > 1:
        yield (
            f"train.num_workers={spec.train.num_workers}: {name}, and each process would read all "
            "of it. Type train.num_workers=1, which reads ahead in one process."
        )
    if spec.train.data_on_device is True:
        yield f"train.data_on_device=true: {name}, not in memory. Type train.data_on_device=auto."


@dataclass(eq=False, repr=False)
class StreamLoader:
    """Micro-batches of a stream on the run's device; the last of a pass may be smaller.

    Attributes:
        dataset: an IterableDataset, which yields examples of any layout.
        batch_size: examples in a micro-batch, in all processes.
        seed: of what is drawn at random from torch's, numpy's and Python's generators.
        device: where batches go.
        options: how batches are loaded and split; `workers` is 0, or 1 to read ahead.
        wait_context: makes the context around each wait for the loading process, which a signal may
            interrupt.
        examples: of the pass that ended last; 0 before.
        has_failed: whether the last wait for the loading process raised an error.
        start: where the run begins to train on these data.
    """

    dataset: Any
    batch_size: int
    _: KW_ONLY
    seed: int
    device: torch.device
    options: LoaderOptions = DEFAULT_OPTIONS
    examples: int = field(default=0, init=False)
    wait_context: WaitContext = field(default=nullcontext, init=False)
    has_failed: bool = field(default=False, init=False)
    start: batch_layout.StartingPoint = field(default=batch_layout.FIRST_STEP, init=False)
    _last_batch: tuple[int, int] = field(default=(-1, 0), init=False)
    """First example and size of the batch that was read last."""

    @property
    def epoch_examples(self) -> None:
        """Return None: the length of a pass is not known."""

    def examples_in(self, first: int) -> int:
        """Return how many examples a batch that has been read has in all processes.

        Args:
            first: number of its first example in the pass that is being read, from 0.
        """
        last_first, last_size = self._last_batch
        # Only the last batch of a pass is smaller.
        return last_size if first == last_first else self.batch_size

    def epoch(self, epoch: int, taken: int = 0) -> Iterator[Batch]:
        """Return this process's part of each batch of a pass, of whose examples the first `taken`
        are read and dropped.

        Raises:
            ConfigError: the stream is empty, or a batch cannot be made of its examples.
            DataError: the stream fails in this process.
        """
        batches = map(self.options.layout.split, self._read(epoch, taken))
        return batches if self.device.type == "cpu" else move_batches(batches, self.device)

    def first_batches(self, count: int | None = None) -> Iterator[tuple[torch.Tensor, Batch]]:
        """Yield the places in the stream, int64 [B], and the content of the first whole batches.

        Args:
            count: of the batches; None for those of a whole pass.
        """
        with explain_stream_errors(self.dataset):
            for read in islice(self._pass(1), count):
                places = torch.arange(read.first, read.first + read.size)
                yield places, self.options.layout.split(checked_batch(read.content))

    def first_digest(self) -> int:
        """Return a hash of the first whole batch, of 31 bits; 0 where it cannot be hashed."""
        with explain_stream_errors(self.dataset):
            return int.from_bytes(value_digest(next(iter(self._pass(1)), None))[:4]) >> 1

    def close(self) -> None:
        """Do nothing: a loading process ends with its pass."""

    def _pass(
        self, epoch: int, taken: int = 0, rank: torchrun.ProcessRank = torchrun.SINGLE_PROCESS
    ) -> StreamPass:
        make = self.options.collator or collate
        reads = reads_of(self, epoch, taken)
        return StreamPass(self.dataset, self.batch_size, make, self.seed, epoch, reads, rank)

    def _read(self, epoch: int, taken: int) -> Iterator[Any]:
        """Yield this process's part of the batches of a pass, as they are collated."""
        read = None
        for read in self._received(self._pass(epoch, taken, self.options.rank)):
            self._last_batch = (read.first, read.size)
            yield checked_batch(read.content)
        if read is not None:
            self.examples = read.first + read.size
        elif taken == 0:
            raise ConfigError(
                f"data: the stream, a {type(self.dataset).__name__}, yields no example"
                f"{' when it is begun anew' if epoch > 1 else ''}. Have __iter__ return a new one."
            )

    def _received(self, batches: StreamPass) -> Iterator[StreamBatch]:
        """Yield batches, which a process of its own reads with one worker."""
        if not self.options.workers:
            with explain_stream_errors(self.dataset):
                yield from batches
            return
        loader = DataLoader(
            batches,
            batch_size=None,
            num_workers=self.options.workers,
            pin_memory=self.device.type == "cuda",
            collate_fn=unchanged,
            generator=torch.Generator().manual_seed(self.seed),
            worker_init_fn=init_worker,
        )
        try:
            yield from wait_for_batch(loader, self.wait_context)
        except Exception:
            self.has_failed = True
            raise


DatasetLoader = Loader | StreamLoader
"""Loader of the batches of a map-style data set or of a stream."""


def reads_of(loader: DatasetLoader, epoch: int, taken: int) -> tuple[tuple[int, int], ...]:
    """Return examples that a run has taken of a pass, and in batches of which size.

    Args:
        loader: of the training set.
        epoch: number of the pass.
        taken: examples, in all processes.
    """
    start = loader.start
    if epoch != start.epoch or taken < start.examples:
        return ((taken, loader.batch_size),)
    return (*start.reads, (taken - start.examples, loader.batch_size))


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
