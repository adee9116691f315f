"""Batches of a map-style dataset, in an order that the seed and the epoch alone decide."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset

from runner.data.workers import awaited, live_on
from runner.errors import ConfigError
from runner.torchrun import ALONE, Place
from runner.tpu import launch

Batch = tuple[Any, Any]


class Loader:
    """Micro-batches of a dataset on the run's device; the last of an epoch may be smaller.

    Data in memory (TensorDataset, or a dataset with `batch(indices)`) is sliced in whole batches;
    any other map-style dataset goes through torch's DataLoader.

    Args:
        dataset: yields (input, target).
        batch_size: examples in a micro-batch.
        shuffle: a new order in each epoch.
        seed: decides the orders, together with the epoch's number.
        device: where batches go.
        workers: loading processes, for data that is not in memory.
        place: this process, which loads its part of each batch; of one with fewer examples than
            processes those that get none are lent the first.

    Raises:
        ConfigError: the dataset is empty.

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
        place: Place = ALONE,
    ) -> None:
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.device, self.workers, self.place = device, workers, place
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        self.examples = len(dataset)  # type: ignore[arg-type]
        if not self.examples:
            raise ConfigError(
                "The data set is empty: it yields no example to train or evaluate on."
            )

    def __len__(self) -> int:
        return -(-self.examples // self.batch_size)

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
            whole = [indices[self.place.part(len(indices))] if self.place.examples(len(indices))
                     else indices[:1] for indices in whole]  # fmt: skip
        return self.batches(whole, epoch, start)

    def batches(self, chosen: Sequence[Tensor], epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """A batch of each of these sets of indices.

        Args:
            chosen: int64, one tensor for each batch.
            epoch: that they are of, and start: the number of the first of them there, by which
                loading processes seed what they draw at random.
        """
        batches = self._batches(chosen, epoch, start)
        if self.device.type == "cpu":
            return batches
        return (self._move(batch) for batch in batches)

    def _batches(self, chosen: Sequence[Tensor], epoch: int, start: int) -> Iterator[Any]:
        dataset: Any = self.dataset
        if type(dataset) is TensorDataset:
            return (tuple(t[i] for t in dataset.tensors) for i in chosen)
        if hasattr(dataset, "batch"):
            return (dataset.batch(i) for i in chosen)  # type: ignore[attr-defined]
        batches = [indices.tolist() for indices in chosen]
        if not self.workers:
            return iter(self._dataloader(dataset, batches))
        seed = self.seed * 1_000_003 + epoch
        dataset = _Seeded(dataset, seed + self.place.rank * 2**40)
        batches = [[number, *batch] for number, batch in enumerate(batches, start)]
        return awaited(iter(self._dataloader(dataset, batches)), self.waiting)

    def _dataloader(self, dataset: Any, batches: list[list[int]]) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            # Seeds the workers; without it each epoch draws from the stream that dropout uses.
            generator=torch.Generator().manual_seed(self.seed),
            worker_init_fn=live_on,
        )

    def _move(self, batch: Batch) -> Batch:
        launch(self.device)  # what was asked of the batch before this one

        def move(value: Any) -> Any:
            return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value

        inputs, target = batch
        return tree_map(move, inputs), tree_map(move, target)


class _Seeded(Dataset[Any]):
    """A dataset in a loading process: what it draws at random for a batch depends on the batch
    alone, not on the process that loads it or on what that has loaded before."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, numbered: list[int]) -> Any:
        """The examples of a batch, whose number comes before their indices."""
        number, *indices = numbered
        seed = (self.seed * 1_000_003 + number) % 2**63
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if together := getattr(self.dataset, "__getitems__", None):
            return together(indices)
        return [self.dataset[index] for index in indices]
