"""Iterate over a map-style data set in batches, in an order that the seed and the epoch determine.

Any batch of any epoch can be loaded alone, with the same examples and the same random augmentation:
resume and replay rely on it. So the order never depends on the global random state, and a loading
process draws its random numbers from a seed of the batch. With data.collate the main process does
so, too: what a collator draws (masked tokens) depends neither on the number of processes nor on
dropout, and a validation batch is the same in each evaluation.

Data that fit are held on the device, so that an epoch copies indices only. Other batches are copied
on a stream of their own while the previous batch is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from runner.core import (
    Batch,
    ConfigError,
    RunnerError,
    RunSpec,
    batch_layout,
    random_streams,
    torchrun,
)
from runner.data.collate import CollateFailure, Collator, collate, makes_batches
from runner.data.workers import init_worker, wait_for_batch


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Restore the states of the host's random generators on exit."""
    random_state = random_streams.host_rng_state()
    try:
        yield
    finally:
        random_streams.set_host_rng_state(random_state)


class SamplerOrder:
    """The indices that a sampler yields in each epoch, determined by seed and epoch alone.

    The sampler is iterated anew for each epoch, with torch's, numpy's and Python's generators and
    the sampler's own `generator` seeded. The process's random streams stay as they were.

    Args:
        name: dotted path that data.sampler names.
        sampler: yields indices of the training set, one at a time.
        examples: of the training set.

    Raises:
        ConfigError: the sampler has no length, yields something else than indices, or other ones
            for the same seed and epoch.

    Attributes:
        length: indices in an epoch, which may be fewer or more than the training set has.
    """

    def __init__(self, name: str, sampler: Any, examples: int) -> None:
        self.name = name
        self.sampler = sampler
        self.examples = examples
        if isinstance(sampler, DistributedSampler):
            raise self._error("it is a DistributedSampler. Name a sampler of all examples")
        if not (isinstance(sampler, Iterable) and hasattr(sampler, "__len__")):
            kind = type(sampler).__name__
            raise self._error(f"it is a {kind}. Return a torch.utils.data.Sampler with __len__")
        try:
            self.length = len(sampler)  # type: ignore[arg-type]
        except Exception as error:  # of whatever type its __len__ raises
            raise self._error(f"len() of it raises {type(error).__name__}: {error}") from error
        if not self.length:
            raise self._error("it is empty. Have it yield at least one index")
        if not torch.equal(self.indices(0, 1), self.indices(0, 1)):
            raise self._error(
                "it yields other indices when it is iterated a second time for the same seed and "
                "epoch, so that no run could be resumed. Draw them from torch's, numpy's or "
                "Python's global generators, which are seeded, or from an attribute `generator`"
            )

    def indices(self, seed: int, epoch: int) -> Tensor:
        """Return the indices of an epoch, int64 [length].

        Args:
            seed: determines them together with the epoch.
            epoch: its number, for samplers with `set_epoch`.

        Raises:
            ConfigError: the sampler raises, or yields something else than `length` indices.
        """
        try:
            with restored_random_state():
                random_streams.seed_host(seed)
                random_streams.seed_generator(getattr(self.sampler, "generator", None), seed)
                if hasattr(self.sampler, "set_epoch"):
                    self.sampler.set_epoch(epoch)
                # One more than there should be: a sampler may be endless.
                drawn = list(islice(iter(self.sampler), self.length + 1))
                numbers = [self._index(value) for value in drawn]
        except RunnerError:
            raise
        except Exception as error:
            raise self._error(f"{type(error).__name__}: {error}") from error
        if len(drawn) != self.length:
            count = "more" if len(drawn) > self.length else str(len(drawn))
            raise self._error(
                f"its length is {self.length}, and it yields {count}. Yield as many as len() says"
            )
        return torch.tensor(numbers)

    def _index(self, value: Any) -> int:
        """Return a value as a number; raise ConfigError if it is no index of the training set."""
        if isinstance(value, list | tuple):
            kind = type(value).__name__
            raise self._error(f"it yields a {kind}. Yield one index at a time, not batches")
        try:
            number = index(value)
        except TypeError as error:
            kind = type(value).__name__
            raise self._error(f"it yields a {kind}. Yield indices, whole numbers") from error
        if not 0 <= number < self.examples:
            raise self._error(f"it yields {number}. Yield indices from 0 to {self.examples - 1}")
        return number

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"data.sampler={self.name} cannot be used: {reason}.")


@dataclass(frozen=True)
class LoaderOptions:
    """Place and way in which a loader's batches are loaded, and how they are split.

    Attributes:
        workers: loading processes, which stay until Loader.close(); see Loader.uses_workers.
        rank: of this process, which loads its part of each batch. A process without a part, where a
            batch has fewer examples than there are processes, gets the batch's first example.
        on_device: true, false or auto: hold data that are in memory on the device; see
            hold_on_device.
        layout: splits each batch into the inputs of the model and the target.
        collator: makes the batches of lists of examples; None stacks them.
        sampler: decides which examples an epoch has and in which order; None takes each once.
    """

    workers: int = 0
    rank: torchrun.ProcessRank = torchrun.SINGLE_PROCESS
    on_device: bool | str = False
    layout: batch_layout.BatchLayout = batch_layout.PAIRS
    collator: Collator | None = None
    sampler: SamplerOrder | None = None


DEFAULT_OPTIONS = LoaderOptions()
MAX_MEMORY_SHARE = 0.1  # of a GPU's free memory that train.data_on_device=auto takes

WaitContext = Callable[[], AbstractContextManager[object]]
"""Makes the context around each wait for a loading process."""


@dataclass(eq=False, repr=False)
class Loader:
    """Micro-batches of a data set on the run's device; the last of an epoch may be smaller.

    A TensorDataset, data held on the device and, without loading processes, a data set with
    `batch(indices)` are gathered in whole batches here; anything else goes through torch's
    DataLoader, whose processes call `batch(indices)` where the data set has it. With a collator
    every data set is loaded example by example.

    Attributes:
        dataset: yields (input, target), or what its batches' layout says.
        batch_size: examples in a micro-batch.
        shuffle: a new order in each epoch, where no sampler decides it.
        seed: determines the orders, together with the epoch's number.
        device: where batches go.
        options: how many processes load, which part, and what is held on the device.
        wait_context: makes the context around each wait for a loading process, which a signal may
            interrupt.
        has_failed: whether the last wait for a loading process raised an error.
        start: where the run begins to train on these data.

    Raises:
        ConfigError: the data set cannot be held, or makes batches beside a collator.
    """

    dataset: Dataset[Any]
    batch_size: int
    _: KW_ONLY
    shuffle: bool
    seed: int
    device: torch.device
    options: LoaderOptions = DEFAULT_OPTIONS
    wait_context: WaitContext = field(default=nullcontext, init=False)
    has_failed: bool = field(default=False, init=False)
    start: batch_layout.StartingPoint = field(default=batch_layout.FIRST_STEP, init=False)

    def __post_init__(self) -> None:
        self.examples = len(self.dataset)  # type: ignore[arg-type]
        collator = self.options.collator
        self.device_dataset = None
        if collator is None:
            on_device = self.options.on_device
            self.device_dataset = hold_on_device(self.dataset, self.device, on_device)
        elif makes_batches(self.dataset):
            raise ConfigError(
                f"data.collate={collator.name}: the data set, a {type(self.dataset).__name__}, "
                "makes its own batches by batch(indices). Leave data.collate out, or that method."
            )
        elif self.options.on_device is True:
            raise ConfigError(
                f"train.data_on_device=true slices batches on the device, and data.collate="
                f"{collator.name} makes them on the host. Type train.data_on_device=auto."
            )
        self._make_batch = collator or collate
        self._worker_batches: list[list[int]] = []  # of the epoch that the processes load
        self._worker_loader: DataLoader[Any] | None = None

    def __len__(self) -> int:
        """Return the number of micro-batches in an epoch."""
        return -(-self.epoch_examples // self.batch_size)

    @property
    def epoch_examples(self) -> int:
        """Return the number of examples in an epoch: those of the data set, or of the sampler."""
        return self.examples if self.options.sampler is None else self.options.sampler.length

    @property
    def uses_workers(self) -> bool:
        """Return whether processes load the data; False where tensors are only sliced."""
        return self.options.workers > 0 and not self.slices_tensors and self.device_dataset is None

    @property
    def slices_tensors(self) -> bool:
        """Return whether batches are slices of a TensorDataset's tensors."""
        # A subclass may change the examples in its __getitem__.
        return type(self.dataset) is TensorDataset and self.options.collator is None

    def order(self, epoch: int) -> Tensor:
        """Return the indices of an epoch's examples, int64 [epoch_examples]."""
        seed = batch_layout.epoch_seed(self.seed, epoch)
        if self.options.sampler is not None:
            return self.options.sampler.indices(seed, epoch)
        if not self.shuffle:
            return torch.arange(self.examples)
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.examples, generator=generator)

    def examples_in(self, first: int) -> int:
        """Return how many examples, in all processes, a batch has that begins with an epoch's
        example of this number, from 0."""
        return min(self.batch_size, self.epoch_examples - first)

    def epoch(self, epoch: int, taken: int = 0) -> Iterator[Batch]:
        """Return this process's part of each batch of an epoch, of whose examples the first
        `taken` are left out."""
        batches = self.order(epoch)[taken:].split(self.batch_size)
        # An empty tensor is split into one batch without an example.
        batches = [indices for indices in batches if len(indices)]
        if self.options.rank.world_size > 1:
            batches = [self._process_part(indices) for indices in batches]
        return self.batches(batches, epoch, taken // self.batch_size)

    def _process_part(self, indices: Tensor) -> Tensor:
        """Return the indices that this process loads of a batch's."""
        part = indices[self.options.rank.batch_slice(len(indices))]
        # Collectives need every process to run a step, with one example at least.
        return part if len(part) else indices[:1]

    def batches(self, chosen: Sequence[Tensor], epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Return a batch of each of these tensors of indices, on the device.

        Args:
            chosen: int64 [examples of a batch], one tensor for each batch.
            epoch: that the batches belong to.
            start: number of the first batch in its epoch. Loading processes seed what they draw at
                random by it and by the epoch.
        """
        if self.device_dataset is not None and chosen:
            # One copy of all indices, in place of one for each batch.
            chosen = torch.cat([*chosen]).to(self.device).split([len(i) for i in chosen])
        batches = map(self.options.layout.split, self._load(chosen, epoch, start))
        held_on_gpu = self.device_dataset is not None and self.device.type == "cuda"
        if self.device.type == "cpu" or held_on_gpu:
            return batches
        return move_batches(batches, self.device)

    def batch_in_this_process(self, indices: Tensor, epoch: int, number: int) -> Batch:
        """Return a batch on the host, without the loading processes, which may be loading others.

        What a collator or the data set draws at random is what a loading process draws for it. The
        process's random streams stay as they were.

        Args:
            indices: int64 [examples of the batch].
            epoch: that the batch belongs to.
            number: of the batch in its epoch, from 0.

        Raises:
            ConfigError: the batch cannot be made of its examples.
        """
        (batch,) = self._load_seeded([indices], epoch, number)
        return self.options.layout.split(batch)

    def close(self) -> None:
        """End the loading processes; call it when no epoch is being iterated."""
        self._worker_loader = None

    def _load(self, chosen: Sequence[Tensor], epoch: int, start: int) -> Iterator[Any]:
        """Return the batches of these indices, where the data set is."""
        dataset: Any = self.dataset if self.device_dataset is None else self.device_dataset
        if self.slices_tensors:
            return (
                tuple(tensor.index_select(0, indices) for tensor in dataset.tensors)
                for indices in chosen
            )
        if makes_batches(dataset) and not self.uses_workers:
            return (dataset.batch(indices) for indices in chosen)
        if self.options.workers:
            return self._load_in_workers(chosen, epoch, start)
        if self.options.collator is not None:
            return self._load_seeded(chosen, epoch, start)
        return (checked_batch(collate(_examples(dataset, i.tolist()))) for i in chosen)

    def _seeded(self, chosen: Sequence[Tensor], epoch: int, start: int) -> list[list[int]]:
        """Return of each batch its seed, then its indices; see batches for the arguments."""
        return [
            [
                batch_layout.batch_seed(self.seed, epoch, number, self.options.rank.index),
                *indices.tolist(),
            ]
            for number, indices in enumerate(chosen, start)
        ]

    def _load_seeded(self, chosen: Sequence[Tensor], epoch: int, start: int) -> Iterator[Any]:
        """Yield batches as a loading process makes them, in this process; see batches for the
        arguments."""
        batches = _SeededBatches(self.dataset, self._make_batch)
        for seeded_batch in self._seeded(chosen, epoch, start):
            with restored_random_state():
                batch = batches.__getitems__(seeded_batch)
            yield checked_batch(batch)

    def _load_in_workers(self, chosen: Sequence[Tensor], epoch: int, start: int) -> Iterator[Any]:
        """Yield batches from the loading processes, which load those of one epoch at a time; see
        batches for the arguments."""
        if self._worker_loader is None:
            self._worker_loader = DataLoader(
                _SeededBatches(self.dataset, self._make_batch),
                batch_sampler=self._worker_batches,
                num_workers=self.options.workers,
                persistent_workers=True,
                pin_memory=self.device.type == "cuda",
                collate_fn=unchanged,
                # Without a generator, each epoch draws from the stream that dropout uses.
                generator=torch.Generator().manual_seed(self.seed),
                worker_init_fn=init_worker,
            )
        # The list changes in place: persistent processes' DataLoader holds it as its batch sampler.
        self._worker_batches[:] = self._seeded(chosen, epoch, start)
        try:
            yield from map(checked_batch, wait_for_batch(self._worker_loader, self.wait_context))
        except Exception:
            self.has_failed = True
            self.close()  # the next epoch needs other processes: those of this one have ended
            raise


def checked_batch(batch: Any) -> Any:
    """Return a batch.

    Raises:
        ConfigError: it could not be made of its examples.
    """
    if isinstance(batch, CollateFailure):
        raise ConfigError(batch.problem)
    return batch


def hold_on_device(dataset: Any, device: torch.device, on_device: bool | str) -> Any:
    """Return a copy of an in-memory data set on the device, or None where it stays on the host.

    Args:
        dataset: a TensorDataset, or one with `batch(indices)`, `nbytes` and `to(device)`.
        device: of the run.
        on_device: train.data_on_device: true, false, or auto, which holds data on a GPU where they
            take less than MAX_MEMORY_SHARE of its free memory.

    Raises:
        ConfigError: on_device is true, and the data are not in memory.
    """
    # A subclass of TensorDataset may override __getitem__, so only the class itself is sliced.
    is_tensors = type(dataset) is TensorDataset
    size = getattr(dataset, "nbytes", None)
    if is_tensors:
        size = sum(tensor.nbytes for tensor in dataset.tensors)
    if on_device is True and size is None:
        raise ConfigError(
            "train.data_on_device=true needs data that are in memory, a TensorDataset; this is a "
            f"{type(dataset).__name__}. Type train.data_on_device=auto."
        )
    if on_device == RunSpec.AUTO:
        on_device = False
        # On a CPU there is nothing to gain, and other accelerators do not report free memory.
        if size is not None and device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(device)
            on_device = size < MAX_MEMORY_SHARE * free_bytes
    if not on_device:
        return None
    if is_tensors:
        return TensorDataset(*(tensor.to(device) for tensor in dataset.tensors))
    return dataset.to(device)


def move_batches(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches, nested or not, with their tensors on the device."""
    if device.type != "cuda":
        for batch in batches:
            yield tree_map_only(Tensor, lambda value: value.to(device, non_blocking=True), batch)
        return
    # A batch is copied from pinned memory while the GPU computes the previous one.
    copy_stream = torch.cuda.Stream(device)

    for batch in batches:
        compute_stream = torch.cuda.current_stream(device)

        def copied(value: Tensor, reader: torch.cuda.Stream = compute_stream) -> Tensor:
            on_gpu = value.pin_memory().to(device, non_blocking=True)
            # The allocator must not reuse the memory before the computation has read it.
            on_gpu.record_stream(reader)
            return on_gpu

        with torch.cuda.stream(copy_stream):
            batch_on_gpu = tree_map_only(Tensor, copied, batch)
        compute_stream.wait_stream(copy_stream)
        yield batch_on_gpu


@dataclass(frozen=True, eq=False)
class _SeededBatches(Dataset[Any]):
    """The batches of a data set, for which the host's random generators are seeded one by one.

    What is drawn at random for a batch depends on the batch alone, not on the process that loads it
    or on what that process has loaded before.
    """

    dataset: Any
    make_batch: Callable[[list[Any]], Any]

    def __getitems__(self, seeded_batch: list[int]) -> Any:
        """Return a batch, or a CollateFailure, given its seed followed by its indices."""
        seed, *indices = seeded_batch
        random_streams.seed_host(seed)
        if makes_batches(self.dataset):
            return self.dataset.batch(torch.tensor(indices))
        return self.make_batch(_examples(self.dataset, indices))


def _examples(dataset: Any, indices: list[int]) -> list[Any]:
    """Return the examples of these indices."""
    get_items = getattr(dataset, "__getitems__", None)
    return get_items(indices) if get_items else [dataset[index] for index in indices]


def unchanged(batch: Any) -> Any:
    """Return a batch as it is, where torch's DataLoader would collate or convert it."""
    return batch
