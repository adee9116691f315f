"""Collators of one's own: what they are given, where they run, and what they may not do."""

import signal
import warnings

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from runner.data.collate import Collator, makes_batches
from runner.data.loader import Loader, LoaderOptions
from runner.utils.errors import ConfigError
from runner.utils.stop_signals import Stopped

CPU = torch.device("cpu")
X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)


class Items(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


class Batches(Items):
    def batch(self, indices):
        return X[indices], Y[indices]


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


@pytest.fixture(autouse=True)
def _without_fork_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # torch's own, from 3.12 on
        yield


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Items(), TensorDataset(X, Y), Rows()])
def test_a_collator_gets_the_examples_of_each_batch(dataset, workers):
    loading = loader(dataset, doubled, workers)
    found = list(loading.epoch(2, 1))
    loading.close()
    for (x, y), chosen in zip(found, loading.order(2).split(4)[1:], strict=True):
        assert torch.equal(x, X[chosen] * 2)
        assert torch.equal(y, Y[chosen])


def test_what_a_collator_draws_depends_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = [x.tolist() for x, _ in loader(Items(), noisy).epoch(1)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert [x.tolist() for x, _ in loader(Items(), noisy).epoch(1, 1)] == first[1:]
    assert [x.tolist() for x, _ in loader(Items(), noisy).epoch(2)] != first
    in_processes = loader(Items(), noisy, workers=2)
    assert [x.tolist() for x, _ in in_processes.epoch(1)] == first
    in_processes.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            failing,
            r"lab\.own fails on 4 examples: TypeError: .* \(test_collate\.py, line \d+",
        ),
        (forgetful, r"data\.collate=lab\.own fails on 4 examples: it returns None"),
    ],
)
def test_a_collator_that_fails_is_named(function, message, workers):
    with pytest.raises(ConfigError, match=message):
        next(loader(Items(), function, workers).epoch(1))


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
