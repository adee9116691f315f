import os
import resource
from pathlib import Path

import psutil
import pytest
import torch
from items import CPU, Batches, Items, X, Y, pair
from torch.utils.data import TensorDataset

from runner.core.base.errors import ConfigError
from runner.data.datasets.text import TextWindows
from runner.data.loader import Loader, LoaderOptions, hold_on_device

# torch's own, from Python 3.12 on
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
NESTED = Items(lambda i: ({"a": X[i], "b": [Y[i]]}, Y[i]))
DRAWN = Items(lambda i: (torch.rand(1), Y[i]))
WHO = Items(lambda i: (torch.tensor(os.getpid()), Y[i]))
"""The process that loads an example."""


def loader(dataset, size=4, shuffle=True, seed=0, device=CPU, **options):
    options = LoaderOptions(**options)
    return Loader(dataset, size, shuffle=shuffle, seed=seed, device=device, options=options)


def targets(loader, epoch):
    return [y.tolist() for _, y in loader.epoch(epoch)]


TENSORS = TensorDataset(X, Y)
every_kind = pytest.mark.parametrize(
    "dataset", [TENSORS, Items(), Batches()], ids=["tensors", "items", "batches"]
)


def assert_same_batches(batches, expected):
    for (x, y), (wanted, labels) in zip(batches, expected, strict=True):
        assert torch.equal(x, wanted)
        assert torch.equal(y, labels)


@every_kind
def test_every_kind_gives_the_same_batches(dataset):
    found = list(loader(dataset).epoch(3))
    assert len(found) == len(loader(dataset)) == 3
    assert_same_batches(found, map(pair, loader(TENSORS).order(3).split(4)))
    assert [len(y) for _, y in found] == [4, 4, 2]


def test_an_epoch_holds_each_example_once():
    batches = targets(loader(TENSORS), 1)
    assert sorted(index for batch in batches for index in batch) == list(range(10))


def test_seed_and_epoch_alone_decide_the_order():
    torch.manual_seed(1)
    first = targets(loader(TENSORS, seed=5), 2)
    torch.manual_seed(2)
    assert targets(loader(TENSORS, seed=5), 2) == first
    assert targets(loader(TENSORS, seed=5), 3) != first
    assert targets(loader(TENSORS, seed=6), 2) != first


def test_without_shuffle_the_order_is_the_sets():
    assert targets(loader(TENSORS, shuffle=False), 7) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@every_kind
def test_loading_leaves_the_random_stream_alone(dataset):
    """Else evaluating more often would change dropout's masks."""
    state = torch.get_rng_state()
    list(loader(dataset).epoch(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_nested_inputs_are_collated():
    inputs, _ = next(loader(NESTED, shuffle=False).epoch(0))
    assert inputs["a"].shape == (4, 2)
    assert inputs["b"][0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dataset", [TENSORS, NESTED], ids=["tensors", "nested"])
def test_batches_move_to_the_device(dataset):
    for inputs, target in loader(dataset, device=torch.device("meta")).epoch(0):
        first = inputs["b"][0] if isinstance(inputs, dict) else inputs
        assert first.device.type == target.device.type == "meta"


def pids(batches):
    return {pid for x, _ in batches for pid in x.tolist()}


def test_processes_stay_until_they_are_closed():
    loading = loader(WHO, workers=2)
    first = pids(loading.epoch(1))
    assert len(first) == 2
    assert os.getpid() not in first
    assert pids(loading.epoch(2)) == first
    assert next(loading.epoch(3)) is not None  # and the rest is left
    assert pids(loading.epoch(4, 4)) <= first
    loading.close()
    assert not any(map(psutil.pid_exists, first))
    assert not pids(loading.epoch(5)) & first


def gathered(indices):
    """Whole batches, with the process that gathers them and a number that it draws."""
    assert indices.dtype == torch.int64
    drawn = torch.rand(len(indices))
    return (X[indices], torch.full((len(indices),), os.getpid()), drawn), Y[indices]


def test_processes_gather_whole_batches():
    loading, plain = loader(Batches(gathered), workers=2), loader(Batches(gathered))
    seen = set()
    for epoch, start in ((1, 0), (2, 1)):
        pairs = zip(loading.epoch(epoch, 4 * start), plain.epoch(epoch, 4 * start), strict=True)
        for ((x, pid, _), y), ((wanted, _, _), labels) in pairs:
            assert torch.equal(x, wanted)
            assert torch.equal(y, labels)
            seen |= {*pid.tolist()}
    assert len(seen) == 2
    assert os.getpid() not in seen
    loading.close()


def test_what_a_gathered_batch_draws_depends_on_the_batch_alone():
    drawn = [x[2].tolist() for x, _ in loader(Batches(gathered), workers=2).epoch(2)]
    assert [x[2].tolist() for x, _ in loader(Batches(gathered), workers=1).epoch(2, 4)] == drawn[1:]


def test_processes_share_more_tensors_than_files_may_be_open():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 40, hard))
    try:
        many = Items(lambda i: ({f"{j}": X[i] for j in range(60)}, Y[i]))
        loading = loader(many, shuffle=False, workers=1)
        inputs, _ = next(loading.epoch(0))
        assert torch.equal(inputs["59"], X[: len(inputs["59"])])
        loading.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("dataset", "used"), [(TENSORS, False), (Items(), True), (Batches(), True)]
)
def test_processes_load_what_is_not_sliced_in_memory(dataset, used):
    assert loader(dataset, workers=2).uses_workers is used
    assert not loader(dataset).uses_workers


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda i: ({"ids": torch.zeros(3 + i % 2)}, Y[i]),
            r"inputs\['ids'\] of the shapes \[3\] and \[4\]. Pad .* batch\(indices\)",
        ),
        (lambda i: (range(i), Y[i]), "input is a builtins.range. Return tensors"),
        (
            lambda i: ({f"key{i % 2}": X[i]}, Y[i]),
            r"inputs of different structure \(\['key0'\] and \['key1'\]\)",
        ),
    ],
)
def test_examples_that_cannot_be_stacked_are_refused(make, message, workers):
    with pytest.raises(ConfigError, match=message):
        next(loader(Items(make), shuffle=False, workers=workers).epoch(0))


def broken(index):
    raise ValueError("broken")


def test_processes_of_a_data_set_that_raises_end_while_the_error_is_held():
    before = set(psutil.Process().children())
    with pytest.raises(ValueError, match="broken") as held:
        next(loader(Items(broken), workers=2).epoch(0))
    assert set(psutil.Process().children()) <= before
    assert held.value.__traceback__ is not None


def test_an_epoch_that_was_not_iterated_to_its_end_does_not_reach_the_next():
    loading, plain = loader(Items(), workers=2), loader(Items())
    for start in range(3):
        next(loading.epoch(1))
        assert_same_batches(loading.epoch(2, 4 * start), plain.epoch(2, 4 * start))


def test_what_is_drawn_does_not_depend_on_what_was_loaded_before():
    drawn = loader(DRAWN, workers=2)
    first, second = ([x.tolist() for x, _ in drawn.epoch(epoch)] for epoch in (1, 2))
    assert first != second
    assert [x.tolist() for x, _ in loader(DRAWN, workers=1).epoch(2, 4)] == second[1:]
    assert [x.tolist() for x, _ in drawn.epoch(1)] == first


# Data held on the device.
WINDOWS = TextWindows(torch.arange(41, dtype=torch.uint8), 4)


in_memory = pytest.mark.parametrize("dataset", [TENSORS, WINDOWS], ids=["tensors", "windows"])


@in_memory
def test_data_on_the_device_give_the_same_batches(dataset):
    held, plain = loader(dataset, on_device=True), loader(dataset)
    for start in range(len(plain) + 1):
        assert_same_batches(held.epoch(2, 4 * start), plain.epoch(2, 4 * start))


@in_memory
def test_data_on_the_device_are_sliced_there(dataset):
    there = loader(dataset, device=torch.device("meta"), on_device=True)
    assert all(x.device.type == y.device.type == "meta" for x, y in there.epoch(1))
    assert sum(len(y) for _, y in there.epoch(1)) == 10


def test_auto_holds_what_is_small_on_a_gpu_only(monkeypatch):
    free = {"bytes": 10 * (X.nbytes + Y.nbytes) + 10}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 0))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    gpu = torch.device("cuda", 0)
    assert hold_on_device(TENSORS, gpu, "auto") is not None
    free["bytes"] -= 10
    for dataset, device, on_device in (
        (TENSORS, gpu, "auto"),
        (Items(), gpu, "auto"),
        (TENSORS, CPU, "auto"),
        (TENSORS, gpu, False),
    ):
        assert hold_on_device(dataset, device, on_device) is None


def test_data_that_are_not_in_memory_cannot_be_held():
    with pytest.raises(ConfigError, match=r"this is a Items\. Type train\.data_on_device=auto"):
        loader(Items(), on_device=True)


def test_a_batch_larger_than_the_set():
    assert targets(loader(TENSORS, size=64, shuffle=False), 1) == [list(range(10))]
    assert len(loader(TENSORS, size=64)) == 1
