"""Iterate over a stream in batches, pass after pass, as Loader does over a map-style data set.

A stream has no indices: a batch is reached by reading the pass up to it. A resumed run counts and
skips batches; that the stream repeats itself is the user's word.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from hashlib import blake2b
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from runner.data.batch_layout import Batch, BatchLayout
from runner.data.collate import CollateFailure, Collator, collate
from runner.data.device_transfer import move_batches
from runner.data.loader import DEFAULT_OPTIONS, Loader, LoaderOptions
from runner.data.stream import StreamBatch, StreamPass, explain_stream_errors
from runner.data.value_hash import hash_value
from runner.data.workers import init_worker, wait_for_batch
from runner.distributed.torchrun import SINGLE_PROCESS, ProcessRank
from runner.utils.errors import ConfigError


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
        self._last_batch = (0, batch_size)  # number and size of the batch that was read last

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

    def examples_in(self, number: int) -> int:
        """Return how many examples a batch that has been read has in all processes.

        Args:
            number: of the batch in the pass that is being read, from 0.
        """
        last_number, last_size = self._last_batch
        # Only the last batch of a pass is smaller.
        return last_size if number == last_number else self.batch_size

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
        with explain_stream_errors(self.dataset):
            for read in islice(self._pass(1), count):
                first = read.number * self.batch_size
                places = torch.arange(first, first + read.size)
                yield places, self.layout.split(_checked(read.content))

    def first_digest(self) -> int:
        """Return a hash of the first whole batch, of 31 bits; 0 where it cannot be hashed."""
        with explain_stream_errors(self.dataset):
            batch = next(iter(self._pass(1)), None)
        content = blake2b(digest_size=4)
        with suppress(Exception):  # of whatever type the examples' own class raises
            hash_value(content, batch)
            return int.from_bytes(content.digest()) >> 1
        return 0

    def close(self) -> None:
        """Do nothing: a loading process ends with its pass."""

    def _pass(self, epoch: int, start: int = 0, place: ProcessRank = SINGLE_PROCESS) -> StreamPass:
        make = self.collator or collate
        return StreamPass(self.dataset, self.batch_size, make, self.seed, epoch, start, place)

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield this process's part of the batches of a pass, as they are collated."""
        read = None
        for read in self._received(self._pass(epoch, start, self.options.place)):
            self._last_batch = (read.number, read.size)
            yield _checked(read.content)
        if read is not None:
            self.examples = read.number * self.batch_size + read.size
        elif start == 0:
            raise ConfigError(
                f"data: the stream, a {type(self.dataset).__name__}, yields no example"
                f"{' when it is begun anew' if epoch > 1 else ''}. Have its __iter__ return a new "
                "iterator over all examples each time (docs/own-code.md)."
            )

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
            worker_init_fn=init_worker,
        )
        try:
            yield from wait_for_batch(loader, self.wait_context)
        except Exception:
            self.has_failed = True
            raise


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
