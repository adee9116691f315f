"""Batches of a map-style dataset, in an order that the seed and the epoch alone decide."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset

from runner.errors import ConfigError

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

    Raises:
        ConfigError: the dataset is empty.
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
    ) -> None:
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.device, self.workers = device, workers
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

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch."""
        return self.batches(self.order(epoch).split(self.batch_size))

    def batches(self, chosen: Sequence[Tensor]) -> Iterator[Batch]:
        """A batch of each of these sets of indices."""
        batches = self._batches(chosen)
        if self.device.type == "cpu":
            return batches
        return (self._move(batch) for batch in batches)

    def _batches(self, chosen: Sequence[Tensor]) -> Iterator[Any]:
        dataset = self.dataset
        if type(dataset) is TensorDataset:
            return (tuple(t[i] for t in dataset.tensors) for i in chosen)
        if hasattr(dataset, "batch"):
            return (dataset.batch(i) for i in chosen)  # type: ignore[attr-defined]
        return iter(self._dataloader([i.tolist() for i in chosen]))

    def _dataloader(self, batches: list[list[int]]) -> DataLoader[Any]:
        return DataLoader(
            self.dataset,
            batch_sampler=batches,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            # Seeds the workers; without it each epoch draws from the stream that dropout uses.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _move(self, batch: Batch) -> Batch:
        def move(value: Any) -> Any:
            return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value

        inputs, target = batch
        return tree_map(move, inputs), tree_map(move, target)
