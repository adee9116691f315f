"""Read a data set without indices, an IterableDataset, in the batches of one pass over it.

The random generators of the host are seeded for each batch, by the seed, the number of the pass and
that of the batch. So what a stream or a collator draws from them depends neither on dropout nor on
the batch that a resumed run begins with, and a validation pass is the same in each evaluation.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from runner.data.value_hash import hash_value
from runner.distributed.torchrun import SINGLE_PROCESS, ProcessRank
from runner.utils.errors import DataError, RunnerError
from runner.utils.reproducibility import host_rng_state, seed_host, set_host_rng_state
from runner.utils.stop_signals import Stopped

# A prime above the number of passes and of a pass's batches: no two of them share a seed.
_SEED_STRIDE = 1_000_003
_DIGEST_BYTES = 8


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
    """A batch of a stream, and what is remembered of it.

    Attributes:
        number: of the batch in its pass, from 0.
        size: examples in all processes.
        digest: hash of the batch's last example, 16 hex digits; empty where it cannot be hashed.
        content: this process's part, collated; None of a batch that is skipped.
    """

    number: int
    size: int
    digest: str
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
        start: number of the first batch that is collated. Of those before it, which are read all
            the same, only the last is yielded, without content.
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
        for number, examples, content in self._batches(self._content):
            # Of the skipped ones the last is yielded, for its digest.
            if number >= self.start - 1:
                yield StreamBatch(number, len(examples), digest_of(examples[-1]), content)

    def examples(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the number of each batch, from 0, and its examples in all processes."""
        for number, examples, _ in self._batches(lambda number, examples: None):
            yield number, examples

    def _batches(
        self, make: Callable[[int, list[Any]], Any]
    ) -> Iterator[tuple[int, list[Any], Any]]:
        """Yield the number of each batch, its examples, and what a function makes of them."""
        stream: Iterator[Any] | None = None
        number = 0
        while True:
            # Around both: to save and restore numpy's state takes longer than a small batch.
            with _restored_random_state():
                seed_host(self._batch_seed(number))
                if stream is None:
                    stream = begin_pass(self.stream, self.number)
                examples = list(islice(stream, self.batch_size))
                made = make(number, examples) if examples else None
            if examples:
                yield number, examples, made
            if len(examples) < self.batch_size:
                return
            number += 1

    def collated(self, number: int, examples: list[Any]) -> Any:
        """Return the batch of examples, with what a run in one process draws at random for it.

        Args:
            number: of the batch in the pass, from 0.
            examples: of it.
        """
        with _restored_random_state():
            seed_host(self._batch_seed(number, self.place.rank + 1))
            return self.collate(examples)

    def _content(self, number: int, examples: list[Any]) -> Any:
        """Return this process's part of a batch; at least one example, for collectives need every
        process to run a step. None before the first batch that is wanted."""
        if number < self.start:
            return None
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


def digest_of(example: Any) -> str:
    """Return the hash of an example, 16 hex digits; empty where it cannot be hashed."""
    content = blake2b(digest_size=_DIGEST_BYTES)
    with suppress(Exception):  # of whatever type the example's own class raises
        hash_value(content, example)
        return content.hexdigest()
    return ""


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
