"""Take the order of training examples from a sampler of the user's, and seed what batches draw."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from runner.core import ConfigError, RunnerError, random_streams


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
