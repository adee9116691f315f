"""Iterate over a stream in batches, pass after pass, as Loader does over a map-style data set.

A stream has no indices: a batch is reached by reading the pass up to it. Resume and replay do that,
and compare a hash, so that a stream that yields other examples the second time is noticed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from runner.data.batch_layout import Batch, BatchLayout
from runner.data.collate import CollateFailure, Collator, collate
from runner.data.device_transfer import move_batches
from runner.data.loader import DEFAULT_OPTIONS, Loader, LoaderOptions
from runner.data.stream import StreamBatch, StreamPass, digest_of, explain_stream_errors
from runner.data.workers import init_stream_reader, wait_for_batch
from runner.distributed.torchrun import SINGLE_PROCESS
from runner.utils.errors import ConfigError


class StreamPlace(NamedTuple):
    """Where in a stream a step begins.

    Attributes:
        epoch: number of the pass, from 1.
        position: number of the micro-batch in the pass, from 0.
    """

    epoch: int
    position: int


class _Resume(NamedTuple):
    """The batch at which the stream was left, and what to do if it is another one now."""

    place: StreamPlace
    digest: str
    report: Callable[[], None]


class StreamLoader:
    """Micro-batches of a stream on the run's device; the last of a pass may be smaller.

    Args:
        dataset: an IterableDataset, which yields examples of any layout.
        batch_size: examples in a micro-batch, in all processes.
        seed: of what is drawn at random from torch's, numpy's and Python's generators.
        device: where batches go.
        options: how batches are loaded and split; `workers` is 0, or 1 to read ahead.

    Attributes:
        wait_context: makes the context around each wait for the loading process, which a signal may
            interrupt.
        examples: of the pass that ended last; 0 before.
        has_failed: whether the last wait for the loading process raised an error.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int,
        device: torch.device,
        options: LoaderOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.device = device
        self.options = options
        self.wait_context: Callable[[], AbstractContextManager[object]] = nullcontext
        self.examples = 0
        self.has_failed = False
        self._last: StreamBatch | None = None  # read last, without its content
        self._pass_examples: dict[int, int] = {}  # by the number of a pass that has ended
        self._resume: tuple[int, StreamPlace, _Resume | None] = (0, StreamPlace(1, 0), None)

    @property
    def workers(self) -> int:
        """Return the number of loading processes."""
        return self.options.workers

    @property
    def layout(self) -> BatchLayout:
        """Return what splits a batch into inputs and target."""
        return self.options.layout

    @property
    def collator(self) -> Collator | None:
        """Return what makes a batch of examples; None where they are stacked."""
        return self.options.collator

    @property
    def last_digest(self) -> str:
        """Return the hash of the batch that was read last; empty before the first."""
        return self._last.digest if self._last else ""

    def examples_in(self, number: int) -> int:
        """Return how many examples a batch that has been read has in all processes.

        Args:
            number: of the batch in the pass that is being read, from 0.
        """
        if self._last is not None and self._last.number == number:
            return self._last.size
        return self.batch_size  # only the last batch of a pass is smaller

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return this process's part of each batch of a pass, from batch `start` (from 0) on.

        The batches before it are read and dropped.

        Raises:
            ConfigError: the stream is empty, or a batch cannot be made of its examples.
            DataError: the stream fails in this process.
        """
        batches = map(self.layout.split, self._read(epoch, start))
        return batches if self.device.type == "cpu" else move_batches(batches, self.device)

    def first_batches(self, count: int | None = None) -> Iterator[tuple[torch.Tensor, Batch]]:
        """Yield the places in the stream, int64 [B], and the content of the first whole batches.

        Args:
            count: of the batches; None for those of a whole pass.
        """
        stream_pass = self._pass(1)
        batches = islice(stream_pass.examples(), count)
        while True:
            with explain_stream_errors(self.dataset):
                number, examples = next(batches, (0, []))
            if not examples:
                return
            first = number * self.batch_size
            content = _checked(stream_pass.collated(number, examples))
            yield torch.arange(first, first + len(examples)), self.layout.split(content)

    def first_digest(self) -> int:
        """Return a hash of the first batch's last example, of 31 bits."""
        with explain_stream_errors(self.dataset):
            _, examples = next(self._pass(1).examples(), (0, []))
        return int(digest_of(examples[-1]) or "0", 16) % 2**31 if examples else 0

    def batch_at(self, epoch: int, places: Sequence[int]) -> Batch:
        """Return the batch of places of a pass, in order and of one micro-batch."""
        examples = self.examples_at(epoch, places)
        number = places[0] // self.batch_size
        return self.layout.split(_checked(self._pass(epoch).collated(number, examples)))

    def examples_at(self, epoch: int, places: Sequence[int]) -> list[Any]:
        """Return the examples at places of a pass, counted from 0, by reading it up to them."""
        wanted = {*places}
        found: list[Any] = []
        for number, examples in self._pass(epoch).examples():
            first = number * self.batch_size
            found += [one for i, one in enumerate(examples, first) if i in wanted]
            if first + len(examples) > max(wanted):
                break
        return found

    def place_of_step(self, step: int, accumulate: int) -> StreamPlace:
        """Return where a step of this process began, from 1."""
        first_step, place, _ = self._resume
        place = self._begun_at(place)
        for _ in range(step - first_step - 1):
            place = self._begun_at(StreamPlace(place.epoch, place.position + accumulate))
        return place

    def micro_batches(self, place: StreamPlace, count: int) -> list[list[int]]:
        """Return the places in the pass of the examples of some micro-batches, a list for each."""
        end = self._pass_examples.get(place.epoch, (place.position + count) * self.batch_size)
        first = place.position * self.batch_size
        last = min(end, first + count * self.batch_size)
        places = range(first, last)
        return [[*places[i : i + self.batch_size]] for i in range(0, len(places), self.batch_size)]

    def resume_at(
        self, step: int, place: StreamPlace, digest: str, report: Callable[[], None]
    ) -> None:
        """Take note of where a resumed run stood.

        Args:
            step: that the run is resumed at.
            place: of the next micro-batch.
            digest: of the micro-batch before it; empty compares nothing.
            report: called where that batch is another one now.
        """
        expected = _Resume(place, digest, report) if digest and place.position else None
        self._resume = (step, place, expected)

    def close(self) -> None:
        """Do nothing: a loading process ends with its pass."""

    def _begun_at(self, place: StreamPlace) -> StreamPlace:
        """Return a place, or the beginning of the next pass where the place is the pass's end."""
        examples = self._pass_examples.get(place.epoch)
        if examples is None or place.position * self.batch_size < examples:
            return place
        return StreamPlace(place.epoch + 1, 0)

    def _pass(self, epoch: int, start: int = 0, alone: bool = True) -> StreamPass:
        place = SINGLE_PROCESS if alone else self.options.place
        make = self.collator or collate
        return StreamPass(self.dataset, self.batch_size, make, self.seed, epoch, start, place)

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield this process's part of the batches of a pass, as they are collated."""
        read = None
        for read in self._received(self._pass(epoch, start, alone=False)):
            self._last = read._replace(content=None)
            self._compare(epoch, read)
            if read.size < self.batch_size:
                self._note_end(epoch, read)
            if read.number >= start:
                yield _checked(read.content)
        if read is not None:
            self._note_end(epoch, read)
        elif start == 0:
            raise ConfigError(
                f"data: the stream, a {type(self.dataset).__name__}, yields no example"
                f"{' when it is begun anew' if epoch > 1 else ''}. Have its __iter__ return a new "
                "iterator over all examples each time (docs/own-code.md)."
            )
        else:
            self._compare(epoch, None)

    def _note_end(self, epoch: int, last: StreamBatch) -> None:
        """Take note of the last batch of a pass, which is known by its size or after it."""
        self.examples = last.number * self.batch_size + last.size
        self._pass_examples[epoch] = self.examples

    def _received(self, batches: StreamPass) -> Iterator[StreamBatch]:
        """Yield batches, which a process of its own reads with one worker."""
        if not self.workers:
            with explain_stream_errors(self.dataset):
                yield from batches
            return
        loader = DataLoader(
            batches,
            batch_size=None,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            collate_fn=_unchanged,
            generator=torch.Generator().manual_seed(self.seed),
            worker_init_fn=init_stream_reader,
        )
        try:
            yield from wait_for_batch(loader, self.wait_context)
        except Exception:
            self.has_failed = True
            raise

    def _compare(self, epoch: int, read: StreamBatch | None) -> None:
        """Compare the batch at which a resumed run stood with the one that is read now, once."""
        step, place, expected = self._resume
        if expected is None or epoch != place.epoch:
            return
        if read is not None and read.number != place.position - 1:
            return
        self._resume = (step, place, None)
        if read is None or read.digest != expected.digest:
            expected.report()


BatchLoader = Loader | StreamLoader
"""What yields the batches of a data set: of a map-style one, or of a stream."""


def _unchanged(batch: Any) -> Any:
    """Return a batch as it is, where torch's DataLoader would convert it."""
    return batch


def _checked(content: Any) -> Any:
    """Return a batch; raise ConfigError where it could not be made of its examples."""
    if isinstance(content, CollateFailure):
        raise ConfigError(content.problem)
    return content
