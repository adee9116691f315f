"""Read a data set without indices, an IterableDataset, in the batches of one pass over it, and
refuse the settings that it cannot obey.

The random generators of the host are seeded for each batch, by the seed, the number of the pass and
that of the batch. So what a stream or a collator draws from them depends neither on dropout nor on
the batch that a resumed run begins with, and a validation pass is the same in each evaluation.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from runner.config.loading_keys import target_name
from runner.config.schema import RunSpec
from runner.distributed.torchrun import SINGLE_PROCESS, ProcessRank
from runner.utils.errors import DataError, RunnerError
from runner.utils.reproducibility import host_rng_state, seed_host, set_host_rng_state
from runner.utils.stop_signals import Stopped

# A prime above the number of passes and of a pass's batches: no two of them share a seed.
_SEED_STRIDE = 1_000_003


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
        number: of the batch in its pass, from 0.
        size: examples in all processes.
        content: this process's part, collated.
    """

    number: int
    size: int
    content: Any


class StreamPass(IterableDataset[StreamBatch]):
    """The batches of one pass over a stream, from one of them on.

    Every process reads the whole stream, and collates its part of each batch.

    Args:
        stream: the data set.
        batch_size: examples in a batch of all processes; the last of a pass may have fewer.
        collate: makes a batch of a list of examples.
        seed: of the run.
        number: of the pass.
        start: number of the first batch that is collated; those before it are read and dropped.
        place: this process.
    """

    def __init__(  # noqa: PLR0913 - what a loading process needs
        self,
        stream: Any,
        batch_size: int,
        collate: Callable[[list[Any]], Any],
        seed: int,
        number: int,
        start: int = 0,
        place: ProcessRank = SINGLE_PROCESS,
    ) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.collate = collate
        self.seed = seed
        self.number = number
        self.start = start
        self.place = place

    def __iter__(self) -> Iterator[StreamBatch]:
        """Yield the batches of the pass."""
        stream: Iterator[Any] | None = None
        for number in count():
            batch = None
            # Around both: to save and restore numpy's state takes longer than a small batch.
            with _restored_random_state():
                seed_host(self._batch_seed(number))
                if stream is None:
                    stream = begin_pass(self.stream, self.number)
                examples = list(islice(stream, self.batch_size))
                if examples and number >= self.start:
                    batch = StreamBatch(number, len(examples), self._content(number, examples))
            if batch is not None:
                yield batch
            if len(examples) < self.batch_size:
                return

    def _content(self, number: int, examples: list[Any]) -> Any:
        """Return this process's part of a batch; at least one example, for collectives need every
        process to run a step."""
        part = examples[self.place.batch_slice(len(examples))] or examples[:1]
        seed_host(self._batch_seed(number, self.place.rank + 1))
        return self.collate(part)

    def _batch_seed(self, number: int, use: int = 0) -> int:
        """Return the seed of a batch: of its reading (use 0), or of its collation by a process."""
        # 2**40: no pass shares a seed with a pass of another use.
        pass_seed = self.seed * _SEED_STRIDE + self.number + use * 2**40
        return (pass_seed * _SEED_STRIDE + number) % 2**63


@contextmanager
def _restored_random_state() -> Iterator[None]:
    """Return a context that restores the states of the host's random generators on exit."""
    random_state = host_rng_state()
    try:
        yield
    finally:
        set_host_rng_state(random_state)


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
    except (RunnerError, Stopped, MemoryError):
        raise  # these have messages of their own
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"data: the stream, a {type(stream).__name__}, fails: {type(error).__name__}: {text} "
            f"({Path(place.filename).name}, line {place.lineno})."
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
    # An evaluation reads no training examples.
    if is_stream(train) and spec.mode != "evaluate":
        streams.insert(0, "train")
        yield from _training_problems(spec)
    if not streams:
        return
    name = f"the {streams[0]} set is a stream"
    if spec.train.num_workers > 1:
        yield (
            f"train.num_workers={spec.train.num_workers}: {name}, and each process would read all "
            "of it. Type train.num_workers=1, which reads ahead in one process."
        )
    if spec.train.data_on_device is True:
        yield (
            f"train.data_on_device=true: {name}, which is not in memory. Type "
            "train.data_on_device=auto."
        )


def example_problem(example: Any) -> str:
    """Return why examples of a stream cannot be stacked as they are meant; empty where they can.

    Args:
        example: the first one. Rows of Hugging Face's datasets hold lists where no format is set.
    """
    fields = example if isinstance(example, Mapping) else {}
    lists = [name for name, value in fields.items() if isinstance(value, list)]
    if not lists:
        return ""
    return (
        f"data: the train set is a stream whose examples hold lists, not tensors, in "
        f"{', '.join(map(str, lists))}; stacked, these would be lists of columns. Return "
        'stream.with_format("torch") of a stream of Hugging Face\'s datasets, or type '
        "data.collate=runner.data.padding.pad."
    )


def _training_problems(spec: RunSpec) -> Iterator[str]:
    """Yield a message for each setting that a training set without length cannot obey."""
    if spec.train.max_steps is None:
        yield (
            f"train.epochs={spec.train.epochs}: the train set is a stream, whose length is not "
            "known. Type train.max_steps=<steps>; the stream is begun anew where it ends before."
        )
    sampler = spec.data.get("sampler")
    if sampler is not None:
        yield (
            f"data.sampler={target_name(sampler)}: the train set is a stream, which gives no "
            "example by its index. Leave data.sampler out, and choose the examples in the stream."
        )
