"""Collators of one's own: what they are given, where they run, and what they may not do."""

import random
import signal

import numpy as np
import pytest
import torch
from items import CPU, Batches, Items, X, Y
from tiny_models import word_tokenizer
from torch.utils.data import TensorDataset

from runner.core.base.errors import ConfigError
from runner.core.base.stop_signals import Stopped
from runner.core.loop.batch_layout import BatchLayout
from runner.data.collate import CollateFailure, Collator, makes_batches
from runner.data.loader import Loader, LoaderOptions

# torch's own, from Python 3.12 on
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Rows(Items):
    """As Hugging Face's datasets, whose batch() groups rows."""

    def batch(self, batch_size, drop_last_batch=False):
        raise AssertionError


def doubled(pairs):
    return torch.stack([x * 2 for x, _ in pairs]), torch.stack([y for _, y in pairs])


def noisy(pairs):
    return torch.rand(len(pairs)), torch.stack([y for _, y in pairs])


def failing(pairs):
    return pairs[0]["input_ids"]


def forgetful(pairs):
    doubled(pairs)


def loader(dataset, function, workers=0, **options):
    options = LoaderOptions(workers, collator=Collator("lab.own", function), **options)
    return Loader(dataset, 4, shuffle=True, seed=3, device=CPU, options=options)


def drawn(loading, epoch, start=0):
    return [x.tolist() for x, _ in loading.epoch(epoch, 4 * start)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Items(), TensorDataset(X, Y), Rows()])
def test_a_collator_gets_the_examples_of_each_batch(dataset, workers):
    loading = loader(dataset, doubled, workers)
    found = list(loading.epoch(2, 4))
    loading.close()
    for (x, y), chosen in zip(found, loading.order(2).split(4)[1:], strict=True):
        assert torch.equal(x, X[chosen] * 2)
        assert torch.equal(y, Y[chosen])


def test_what_a_collator_draws_depends_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = drawn(loader(Items(), noisy), 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert drawn(loader(Items(), noisy), 1, 1) == first[1:]
    assert drawn(loader(Items(), noisy), 2) != first
    in_processes = loader(Items(), noisy, workers=2)
    assert drawn(in_processes, 1) == first
    in_processes.close()


class Masking:
    """Draws from a generator of its own, which it makes at its first batch."""

    def __init__(self, make):
        self.make = make
        self.generator = None

    def __call__(self, pairs):
        if self.generator is None:
            self.generator = self.make(3)
        ys = torch.stack([y for _, y in pairs])
        if isinstance(self.generator, torch.Generator):
            return torch.rand(len(pairs), generator=self.generator), ys
        drawn = [self.generator.random() for _ in pairs]
        return torch.tensor(drawn, dtype=torch.float64), ys


@pytest.mark.parametrize(
    "make",
    [torch.Generator().manual_seed, np.random.default_rng, np.random.RandomState, random.Random],
)
def test_a_generator_of_the_collators_own_is_seeded_for_each_batch(make):
    first = loader(Items(), Masking(make))
    epoch = drawn(first, 1)
    assert drawn(first, 1) == epoch
    assert drawn(loader(Items(), Masking(make)), 1, 1) == epoch[1:]
    assert drawn(first, 2) != epoch
    assert epoch[0] != epoch[1]
    in_processes = loader(Items(), Masking(make), workers=2)
    assert drawn(in_processes, 1) == epoch
    in_processes.close()


def test_masks_of_transformers_with_a_seed_follow_from_the_batch():
    transformers = pytest.importorskip("transformers")
    words = ["[MASK]", "[PAD]", *map(str, range(2, 20))]
    tokenizer = word_tokenizer(words, mask_token="[MASK]", pad_token="[PAD]")
    rows = [{"input_ids": list(range(2, 18))} for _ in range(8)]

    def masked(start):
        made = transformers.DataCollatorForLanguageModeling(tokenizer, seed=3)
        loading = loader(rows, made)
        loading.layout = BatchLayout(("input_ids",), "labels")
        batches = [target.tolist() for _, target in loading.epoch(1, 4 * start)]
        assert [target.tolist() for _, target in loading.epoch(1, 4 * start)] == batches
        return batches

    assert masked(1) == masked(0)[1:]


def changing(pairs):
    """Draws from the operating system, which nobody can seed."""
    return torch.tensor([random.SystemRandom().random() for _ in pairs]), torch.zeros(len(pairs))


def popping(pairs):
    """Changes the examples that it is given."""
    return torch.stack([pairs.pop()[0] for _ in range(4)]), torch.zeros(4)


def with_objects(pairs):
    """Returns an array of objects, whose bytes are addresses."""
    return np.array([{"size": len(pairs)} for _ in pairs]), torch.eye(len(pairs)).to_sparse()


@pytest.mark.parametrize("function", [popping, with_objects])
def test_a_collator_may_change_its_examples_and_return_objects(function):
    assert len(next(loader(Rows(), function).epoch(1))[0]) == 4


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (changing, r"lab\.own makes another batch when it is called a second time .* `generator`"),
        (failing, r"lab\.own fails on 4 examples: TypeError: .* \(test_collate\.py, line \d+"),
        (forgetful, r"data\.collate=lab\.own fails on 4 examples: it returns None"),
    ],
)
def test_a_collator_that_fails_is_named(function, message, workers):
    with pytest.raises(ConfigError, match=message):
        next(loader(Items(), function, workers).epoch(1))


class Odd:
    @property
    def dtype(self):
        raise RuntimeError("it has none")


@pytest.mark.parametrize(
    ("values", "is_same"),
    [
        (["a", "b", "c"], True),
        (torch.tensor([0.0, 0.0, -0.0]), True),
        (np.full((3, 1), np.nan), True),
        (np.arange(3)[:, None], False),
    ],
)
def test_tensors_and_arrays_alone_are_compared(values, is_same):
    made = iter(values)
    batch = Collator("lab.own", lambda examples: [Odd(), {"part": next(made)}])([1, 2])
    assert isinstance(batch, CollateFailure) != is_same


def test_a_signal_is_no_failure_of_a_collator():
    def stopped(pairs):
        raise Stopped(signal.SIGTERM)

    with pytest.raises(Stopped):
        next(loader(Items(), stopped).epoch(1))


def test_a_collator_beside_another_way_to_make_batches_is_refused():
    with pytest.raises(ConfigError, match=r"a Batches, makes its own batches by batch\(indices\)"):
        loader(Batches(), doubled)
    with pytest.raises(ConfigError, match=r"train\.data_on_device=true .* data\.collate=lab\.own"):
        loader(TensorDataset(X, Y), doubled, on_device=True)
    held = loader(TensorDataset(X, Y), doubled, on_device="auto")
    assert held.device_dataset is None


def test_rows_of_another_library_make_no_batches():
    assert [makes_batches(kind()) for kind in (Items, Batches, Rows)] == [False, True, False]
