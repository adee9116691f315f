"""Take the order of training examples from a sampler of the user's, and seed what batches draw."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from operator import index
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from runner.data.batch_layout import Batch
from runner.utils.errors import ConfigError, RunnerError
from runner.utils.reproducibility import (
    host_rng_state,
    seed_generator,
    seed_host,
    set_host_rng_state,
)

# A prime above the number of epochs and of an epoch's batches: no two of them share a seed.
_SEED_STRIDE = 1_000_003


class StartingPoint(NamedTuple):
    """Point in the training data where a run begins or is resumed.

    Attributes:
        step: optimizer steps that were taken.
        epoch: passes that were begun, from 1.
        reads: examples of this pass that were taken, and in batches of which size, in order.
    """

    step: int = 0
    epoch: int = 1
    reads: tuple[tuple[int, int], ...] = ()

    @property
    def examples(self) -> int:
        """Return the examples of the pass that were taken, in all processes."""
        return sum(taken for taken, _ in self.reads)


FIRST_STEP = StartingPoint()


class BatchLoader(Protocol):
    """What the loop asks of a data set's batches, whether it has indices or is a stream.

    Attributes:
        batch_size: examples in a micro-batch, in all processes.
        seed: of what is drawn at random.
        start: where the run begins to train on these data.
    """

    batch_size: int
    seed: int
    start: StartingPoint

    @property
    def epoch_examples(self) -> int | None:
        """Return the examples of an epoch; None for a stream, whose length is not known."""
        ...

    def epoch(self, epoch: int, taken: int = 0) -> Iterator[Batch]:
        """Return the micro-batches of an epoch after the examples that are taken already."""
        ...

    def examples_in(self, first: int) -> int:
        """Return how many examples the micro-batch from this one on has, in all processes."""
        ...


def steps_of_epoch(loader: BatchLoader, accumulate: int, taken: int = 0) -> int:
    """Return the optimizer steps of an epoch, of whose examples the first `taken` are left out."""
    examples = loader.epoch_examples
    assert examples is not None  # a stream is refused without train.max_steps
    batches = -(-max(0, examples - taken) // loader.batch_size)
    return -(-batches // accumulate)


def ends_epoch(loader: BatchLoader, accumulate: int, step: int) -> bool:
    """Return whether an epoch ends with a step; False for a stream, whose length is not known."""
    if loader.epoch_examples is None:
        return False
    beyond = step - loader.start.step - steps_of_epoch(loader, accumulate, loader.start.examples)
    return beyond >= 0 and beyond % steps_of_epoch(loader, accumulate) == 0


def epoch_seed(seed: int, epoch: int, use: int = 0) -> int:
    """Return the seed of an epoch; epochs of another use share none with it."""
    return seed * _SEED_STRIDE + epoch + use * 2**40


def batch_seed(seed: int, epoch: int, number: int, use: int = 0) -> int:
    """Return the seed of a batch.

    Args:
        seed: of the run.
        epoch: that the batch belongs to.
        number: of the batch in its epoch, from 0.
        use: what is drawn, or which process draws it.
    """
    return (epoch_seed(seed, epoch, use) * _SEED_STRIDE + number) % 2**63


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Restore the states of the host's random generators on exit."""
    random_state = host_rng_state()
    try:
        yield
    finally:
        set_host_rng_state(random_state)


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
                seed_host(seed)
                seed_generator(getattr(self.sampler, "generator", None), seed)
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
