"""Samplers of one's own: the order that they give, and what is refused."""

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler as Distributed
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, TensorDataset
from torch.utils.data import WeightedRandomSampler as Weighted

from runner.core.base.errors import ConfigError
from runner.core.base.torchrun import ProcessRank
from runner.data.loader import Loader, LoaderOptions, SamplerOrder
from runner.data.stream_loader import samples_of_step

DATA = TensorDataset(torch.arange(10.0), torch.arange(10))
WEIGHTS = [0.0] * 5 + [1.0] * 5


class Yields(Sampler):
    """Yields what it was given."""

    def __init__(self, *values, length=None):
        self.values = values
        self.length = len(values) if length is None else length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.values)


class Counting(Yields):
    """Remembers what it has yielded."""

    def __iter__(self):
        self.values = self.values[::-1]
        return iter(self.values)


class Turning(Yields):
    """Turns by the epoch, which it is told."""

    def set_epoch(self, epoch):
        self.first = epoch

    def __iter__(self):
        return iter([*self.values[self.first :], *self.values[: self.first]])


class Drawing(Yields):
    """Draws from the generators of Python's libraries."""

    def __iter__(self):
        return iter(np.random.permutation(10)[:4])


def order_of(sampler):
    return SamplerOrder("lab.own", sampler, 10)


def loader(sampler, size=4, seed=0, **options):
    options = LoaderOptions(sampler=order_of(sampler), **options)
    return Loader(DATA, size, shuffle=True, seed=seed, device=torch.device("cpu"), options=options)


def targets(loading, epoch, start=0):
    return [y.tolist() for _, y in loading.epoch(epoch, 4 * start)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Weighted(WEIGHTS, 14),
        lambda: Weighted(WEIGHTS, 14, generator=torch.Generator()),
        lambda: RandomSampler(DATA),
        lambda: Drawing(length=4),
    ],
)
def test_seed_and_epoch_alone_decide_what_a_sampler_draws(make):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = loader(make())
    epochs = [targets(first, epoch) for epoch in (1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = loader(make())
    assert targets(again, 2, 1) == epochs[1][1:]
    assert targets(again, 1) == epochs[0] != epochs[1]
    assert targets(loader(make(), seed=1), 1) != epochs[0]


def test_an_epoch_is_as_long_as_its_sampler():
    loading = loader(Weighted(WEIGHTS, 14))
    assert len(loading) == 4
    assert loading.examples == 10
    assert [loading.examples_in(4 * i) for i in range(4)] == [4, 4, 4, 2]
    batches = targets(loading, 1)
    assert [len(batch) for batch in batches] == [4, 4, 4, 2]
    assert {index for batch in batches for index in batch} <= {5, 6, 7, 8, 9}
    assert samples_of_step(loading, 1, 6).micro_batches == [targets(loading, 2)[1]]


def test_processes_share_the_batches_of_a_sampler():
    parts = [loader(RandomSampler(DATA), rank=ProcessRank(rank, 2)) for rank in range(2)]
    first, second = (targets(part, 1) for part in parts)
    joined = [a + b for a, b in zip(first, second, strict=True)]
    assert joined == targets(loader(RandomSampler(DATA)), 1)


def test_a_sampler_is_told_the_epoch():
    assert targets(loader(Turning(0, 1, 2)), 2) == [[2, 0, 1]]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Yields(1, "a"), "it yields a str. Yield indices, whole numbers"),
        (Yields(1.5), "it yields a float"),
        (Yields([1, 2]), "it yields a list. Yield one index at a time, not batches"),
        (Yields(3, 10), "it yields 10. Yield indices from 0 to 9"),
        (Yields(-1), "it yields -1"),
        (Yields(1, 2, length=3), "its length is 3, and it yields 2"),
        (Yields(1, 2, length=1), "its length is 1, and it yields more"),
        (Yields(), "it is empty"),
        (Yields(1, length="a"), "len() of it raises TypeError: 'str' object cannot be"),
        (Distributed(DATA, 2, 0), "it is a DistributedSampler. Name a sampler of all"),
        (iter([1]), "it is a list_iterator. Return a torch.utils.data.Sampler"),
        (Counting(1, 2), "it yields other indices when it is iterated a second time"),
    ],
)
def test_a_sampler_that_cannot_be_used_is_refused(sampler, message):
    with pytest.raises(ConfigError) as error:
        order_of(sampler)
    assert f"data.sampler=lab.own cannot be used: {message}" in str(error.value)


def test_the_order_of_the_data_set_is_a_sampler_too():
    assert targets(loader(SequentialSampler(DATA)), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
