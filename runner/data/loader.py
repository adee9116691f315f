"""Batches of a map-style dataset, in an order that the seed and the epoch alone decide."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from runner.data.collate import CollateFailure, WholeBatch, collate
from runner.data.device_transfer import hold_on_device, move_batches
from runner.data.workers import keep_alive, wait_for_batch
from runner.distributed.torchrun import SINGLE_PROCESS, ProcessRank
from runner.utils.errors import ConfigError

Batch = tuple[Any, Any]


class Loader:
    """Micro-batches of a dataset on the run's device; the last of an epoch may be smaller.

    A TensorDataset, data held on the device and, without loading processes, a dataset with
    `batch(indices)` are gathered in whole batches here; anything else goes through torch's
    DataLoader, whose processes call `batch(indices)` where the dataset has it.

    Args:
        dataset: yields (input, target).
        batch_size: examples in a micro-batch.
        shuffle: a new order in each epoch.
        seed: decides the orders, together with the epoch's number.
        device: where batches go.
        workers: loading processes, which stay until close(); see uses_workers.
        place: this process, which loads its part of each batch; of one with fewer examples than
            processes those that get none are lent the first.
        on_device: hold data that is in memory on the device; see transfer.hold.

    Raises:
        ConfigError: the dataset is empty, or cannot be held.

    Attributes:
        waiting: context around each wait for a loading process, which a signal may cut.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        device: torch.device,
        workers: int = 0,
        place: ProcessRank = SINGLE_PROCESS,
        on_device: bool | str = False,
    ) -> None:
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.device, self.workers, self.place = device, workers, place
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        self.examples = len(dataset)  # type: ignore[arg-type]
        if not self.examples:
            raise ConfigError(
                "The data set is empty: it yields no example to train or evaluate on."
            )
        self.held = hold_on_device(dataset, device, on_device)
        self._loaded: list[list[int]] = []  # what the processes load in this epoch
        self._processes: DataLoader[Any] | None = None

    def __len__(self) -> int:
        return -(-self.examples // self.batch_size)

    @property
    def uses_workers(self) -> bool:
        """Whether processes load the data: not where tensors in memory or held are sliced."""
        in_memory = self.held is not None or type(self.dataset) is TensorDataset
        return self.workers > 0 and not in_memory

    def order(self, epoch: int) -> Tensor:
        """Indices of an epoch's examples, int64, shape [examples]."""
        if not self.shuffle:
            return torch.arange(self.examples)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.examples, generator=generator)

    def examples_in(self, number: int) -> int:
        """Examples of an epoch's batch in all processes."""
        return min(self.batch_size, self.examples - number * self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from a batch's number on: this process's part of each."""
        whole = self.order(epoch).split(self.batch_size)[start:]
        if self.place.world > 1:
            whole = [
                indices[self.place.part(len(indices))]
                if self.place.examples(len(indices))
                else indices[:1]
                for indices in whole
            ]
        return self.batches(whole, epoch, start)

    def batches(self, chosen: Sequence[Tensor], epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """A batch of each of these sets of indices.

        Args:
            chosen: int64, one tensor for each batch.
            epoch: that they are of, and start: the number of the first of them there, by which
                loading processes seed what they draw at random.
        """
        if self.held is not None and chosen:
            chosen = torch.cat([*chosen]).to(self.device).split([len(i) for i in chosen])
        batches = self._batches(chosen, epoch, start)
        here = self.device.type == "cpu" or (self.held is not None and self.device.type == "cuda")
        return batches if here else move_batches(batches, self.device)

    def close(self) -> None:
        """Ends the loading processes, once no epoch is under way."""
        self._processes = None

    def _batches(self, chosen: Sequence[Tensor], epoch: int, start: int) -> Iterator[Any]:
        dataset: Any = self.dataset if self.held is None else self.held
        if type(dataset) is TensorDataset:
            return (tuple(t.index_select(0, i) for t in dataset.tensors) for i in chosen)
        if hasattr(dataset, "batch") and not self.uses_workers:
            return (dataset.batch(i) for i in chosen)  # type: ignore[attr-defined]
        if not self.workers:
            batches = [indices.tolist() for indices in chosen]
            return _checked(self._dataloader(dataset, batches))
        first = (self.seed * 1_000_003 + epoch + self.place.rank * 2**40) * 1_000_003 + start
        seeds = (seed % 2**63 for seed in range(first, first + len(chosen)))
        return self._loading([[seed, *i.tolist()] for seed, i in zip(seeds, chosen, strict=True)])

    def _loading(self, seeded: list[list[int]]) -> Iterator[Any]:
        """Batches from processes, which load those of one epoch at a time."""
        if self._processes is None:
            self._processes = self._dataloader(_Seeded(self.dataset), self._loaded)
        self._loaded[:] = seeded
        yield from _checked(wait_for_batch(self._processes, self.waiting))

    def _dataloader(self, dataset: Any, batches: list[list[int]]) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=self.device.type == "cuda",
            collate_fn=collate,
            # Seeds the workers; without it each epoch draws from the stream that dropout uses.
            generator=torch.Generator().manual_seed(self.seed),
            worker_init_fn=keep_alive,
        )


def _checked(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches.

    Raises:
        ConfigError: the examples of one do not make a batch.
    """
    for batch in batches:
        if isinstance(batch, CollateFailure):
            raise ConfigError(batch.problem)
        yield batch


class _Seeded(Dataset[Any]):
    """A dataset in a loading process: what it draws at random for a batch depends on the batch
    alone, not on the process that loads it or on what that has loaded before."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, seeded: list[int]) -> Any:
        """The examples of a batch, whose seed comes before their indices."""
        seed, *indices = seeded
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if hasattr(self.dataset, "batch"):
            return WholeBatch(self.dataset.batch(torch.tensor(indices)))
        if together := getattr(self.dataset, "__getitems__", None):
            return together(indices)
        return [self.dataset[index] for index in indices]
