import os
import warnings

import psutil
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from runner.data.datasets.text import TextWindows
from runner.data.loader import Loader, LoaderOptions, hold_on_device
from runner.utils.errors import ConfigError

CPU = torch.device("cpu")
X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)


class Items(Dataset):
    """Ten pairs, one at a time."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


class Batches(Items):
    """Ten pairs, gathered in whole batches."""

    def batch(self, indices):
        return X[indices], Y[indices]


class Nested(Items):
    """Inputs that are no tensor."""

    def __getitem__(self, index):
        return {"a": X[index], "b": [Y[index]]}, Y[index]


class Drawn(Items):
    """Examples with randomness of their own."""

    def __getitem__(self, index):
        return torch.rand(1), Y[index]


def loader(dataset, size=4, shuffle=True, seed=0, device=CPU, **options):
    options = LoaderOptions(**options)
    return Loader(dataset, size, shuffle=shuffle, seed=seed, device=device, options=options)


def targets(loader, epoch):
    return [y.tolist() for _, y in loader.epoch(epoch)]


KINDS = [TensorDataset(X, Y), Items(), Batches()]


@pytest.mark.parametrize("dataset", KINDS, ids=["tensors", "items", "batches"])
def test_every_kind_gives_the_same_batches(dataset):
    expected = loader(TensorDataset(X, Y)).order(3).split(4)
    found = list(loader(dataset).epoch(3))
    assert len(found) == len(loader(dataset)) == 3
    for (x, y), chosen in zip(found, expected, strict=True):
        assert torch.equal(x, X[chosen])
        assert torch.equal(y, Y[chosen])
    assert [len(y) for _, y in found] == [4, 4, 2]


def test_an_epoch_holds_each_example_once():
    batches = targets(loader(KINDS[0]), 1)
    assert sorted(index for batch in batches for index in batch) == list(range(10))


def test_seed_and_epoch_alone_decide_the_order():
    torch.manual_seed(1)
    first = targets(loader(KINDS[0], seed=5), 2)
    torch.manual_seed(2)
    assert targets(loader(KINDS[0], seed=5), 2) == first
    assert targets(loader(KINDS[0], seed=5), 3) != first
    assert targets(loader(KINDS[0], seed=6), 2) != first


def test_without_shuffle_the_order_is_the_sets():
    assert targets(loader(KINDS[0], shuffle=False), 7) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("dataset", KINDS, ids=["tensors", "items", "batches"])
def test_loading_leaves_the_random_stream_alone(dataset):
    """Else evaluating more often would change dropout's masks."""
    state = torch.get_rng_state()
    list(loader(dataset).epoch(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_nested_inputs_are_collated():
    inputs, _ = next(loader(Nested(), shuffle=False).epoch(0))
    assert inputs["a"].shape == (4, 2)
    assert inputs["b"][0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dataset", [KINDS[0], Nested()], ids=["tensors", "nested"])
def test_batches_move_to_the_device(dataset):
    for inputs, target in loader(dataset, device=torch.device("meta")).epoch(0):
        first = inputs["b"][0] if isinstance(inputs, dict) else inputs
        assert first.device.type == target.device.type == "meta"


class Who(Items):
    """The process that loads an example."""

    def __getitem__(self, index):
        return torch.tensor(os.getpid()), Y[index]


def pids(batches):
    return {pid for x, _ in batches for pid in x.tolist()}


@pytest.fixture
def without_fork_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # torch's own, from 3.12 on
        yield


def test_processes_stay_until_they_are_closed(without_fork_warnings):
    loading = loader(Who(), workers=2)
    first = pids(loading.epoch(1))
    assert len(first) == 2
    assert os.getpid() not in first
    assert pids(loading.epoch(2)) == first
    assert next(loading.epoch(3)) is not None  # and the rest is left
    assert pids(loading.epoch(4, 1)) <= first
    loading.close()
    assert not any(map(psutil.pid_exists, first))
    assert not pids(loading.epoch(5)) & first


class Gathered(Items):
    """Whole batches, with the process that gathers them and a number that it draws."""

    def batch(self, indices):
        assert indices.dtype == torch.int64
        drawn = torch.rand(len(indices))
        return (X[indices], torch.full((len(indices),), os.getpid()), drawn), Y[indices]


def test_processes_gather_whole_batches(without_fork_warnings):
    loading, plain = loader(Gathered(), workers=2), loader(Gathered())
    seen = set()
    for epoch, start in ((1, 0), (2, 1)):
        pairs = zip(loading.epoch(epoch, start), plain.epoch(epoch, start), strict=True)
        for ((x, pid, _), y), ((wanted, _, _), labels) in pairs:
            assert torch.equal(x, wanted)
            assert torch.equal(y, labels)
            seen |= {*pid.tolist()}
    assert len(seen) == 2
    assert os.getpid() not in seen
    loading.close()


def test_what_a_gathered_batch_draws_depends_on_the_batch_alone(without_fork_warnings):
    drawn = [x[2].tolist() for x, _ in loader(Gathered(), workers=2).epoch(2)]
    assert [x[2].tolist() for x, _ in loader(Gathered(), workers=1).epoch(2, 1)] == drawn[1:]


@pytest.mark.parametrize(
    ("dataset", "used"), [(TensorDataset(X, Y), False), (Items(), True), (Batches(), True)]
)
def test_processes_load_what_is_not_sliced_in_memory(dataset, used):
    assert loader(dataset, workers=2).uses_workers is used
    assert not loader(dataset).uses_workers


class Ragged(Items):
    """Inputs of several lengths."""

    def __getitem__(self, index):
        return {"ids": torch.zeros(3 + index % 2)}, Y[index]


class Foreign(Items):
    """Inputs that torch makes no tensor of."""

    def __getitem__(self, index):
        return range(index), Y[index]


class Changing(Items):
    """Inputs whose keys change."""

    def __getitem__(self, index):
        return {f"key{index % 2}": X[index]}, Y[index]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Ragged(), r"inputs\['ids'\] of the shapes \[3\] and \[4\]. Pad .* batch\(indices\)"),
        (Foreign(), "input is a builtins.range. Return tensors"),
        (Changing(), r"inputs of different structure \(\['key0'\] and \['key1'\]\)"),
    ],
)
def test_examples_that_cannot_be_stacked_are_refused(
    dataset, message, workers, without_fork_warnings
):
    with pytest.raises(ConfigError, match=message):
        next(loader(dataset, shuffle=False, workers=workers).epoch(0))


class Broken(Items):
    """Raises for every index."""

    def __getitem__(self, index):
        raise ValueError("broken")


def test_processes_of_a_data_set_that_raises_end_while_the_error_is_held(without_fork_warnings):
    before = set(psutil.Process().children())
    with pytest.raises(ValueError, match="broken") as held:
        next(loader(Broken(), workers=2).epoch(0))
    assert set(psutil.Process().children()) <= before
    assert held.value.__traceback__ is not None


def test_an_epoch_that_was_not_iterated_to_its_end_does_not_reach_the_next(without_fork_warnings):
    loading, plain = loader(Items(), workers=2), loader(Items())
    for start in range(3):
        next(loading.epoch(1))
        expected = list(plain.epoch(2, start))
        for (x, y), (wanted, labels) in zip(loading.epoch(2, start), expected, strict=True):
            assert torch.equal(x, wanted)
            assert torch.equal(y, labels)


def test_what_is_drawn_does_not_depend_on_what_was_loaded_before(without_fork_warnings):
    drawn = loader(Drawn(), workers=2)
    first, second = ([x.tolist() for x, _ in drawn.epoch(epoch)] for epoch in (1, 2))
    assert first != second
    assert [x.tolist() for x, _ in loader(Drawn(), workers=1).epoch(2, 1)] == second[1:]
    assert [x.tolist() for x, _ in drawn.epoch(1)] == first


# Data held on the device.
WINDOWS = TextWindows(torch.arange(41, dtype=torch.uint8), 4)


@pytest.mark.parametrize("dataset", [KINDS[0], WINDOWS], ids=["tensors", "windows"])
def test_data_on_the_device_give_the_same_batches(dataset):
    held, plain = loader(dataset, on_device=True), loader(dataset)
    for start in range(len(plain) + 1):
        expected = list(plain.epoch(2, start))
        for (x, y), (wanted, labels) in zip(held.epoch(2, start), expected, strict=True):
            assert torch.equal(x, wanted)
            assert torch.equal(y, labels)


@pytest.mark.parametrize("dataset", [KINDS[0], WINDOWS], ids=["tensors", "windows"])
def test_data_on_the_device_are_sliced_there(dataset):
    there = loader(dataset, device=torch.device("meta"), on_device=True)
    assert all(x.device.type == y.device.type == "meta" for x, y in there.epoch(1))
    assert sum(len(y) for _, y in there.epoch(1)) == 10


def test_auto_holds_what_is_small_on_a_gpu_only(monkeypatch):
    free = {"bytes": 10 * (X.nbytes + Y.nbytes) + 10}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 0))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    gpu = torch.device("cuda", 0)
    assert hold_on_device(KINDS[0], gpu, "auto") is not None
    free["bytes"] -= 10
    assert [hold_on_device(KINDS[0], gpu, "auto"), hold_on_device(Items(), gpu, "auto")] == [
        None,
        None,
    ]
    assert [hold_on_device(KINDS[0], CPU, "auto"), hold_on_device(KINDS[0], gpu, False)] == [
        None,
        None,
    ]


def test_data_that_are_not_in_memory_cannot_be_held():
    with pytest.raises(ConfigError, match=r"this is a Items\. Type train\.data_on_device=auto"):
        loader(Items(), on_device=True)


def test_a_batch_larger_than_the_set():
    assert targets(loader(KINDS[0], size=64, shuffle=False), 1) == [list(range(10))]
    assert len(loader(KINDS[0], size=64)) == 1


def test_an_empty_set_is_refused():
    with pytest.raises(ConfigError, match="The data set is empty"):
        loader(TensorDataset(X[:0], Y[:0]))
