import random
from math import ceil

import pytest
import torch
from items import CPU, Batches, Items, X, Y
from torch.utils.data import IterableDataset, TensorDataset

from runner.core.config.schema import TrainSpec
from runner.core.loop.batch_layout import StartingPoint, ends_epoch
from runner.core.loop.training_loop import accumulation_batches, total_steps
from runner.data.collate import Collator
from runner.data.loader import Loader, LoaderOptions
from runner.data.stream_loader import (
    StepSamples,
    StreamLoader,
    all_targets,
    reads_of,
    samples_of_step,
    saved_batches,
    targets_of_steps,
)


class State:
    """What the loop counts."""

    epoch = position = 0


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_the_samples_of_a_step_are_those_that_the_loop_gives_it(accumulate):
    loader = Loader(TensorDataset(X, Y), 3, shuffle=True, seed=4, device=CPU)
    state = State()
    for step, (micros, _) in enumerate(accumulation_batches(state, loader, accumulate), 1):
        computed = samples_of_step(loader, accumulate, step)
        assert (computed.step, computed.epoch) == (step, state.epoch)
        assert computed.micro_batches == [y.tolist() for _, y in micros]
        if step == 12:
            return


class Shuffled(IterableDataset):
    """A stream that draws its order from the global generator as it is read."""

    def __iter__(self):
        rest = list(range(50))
        while rest:
            yield torch.zeros(1), rest.pop(random.randrange(len(rest)))


NUMBERS = TensorDataset(torch.zeros(50, 1), torch.arange(50))


def taken(state, loader, accumulate, steps=None):
    """Labels of each step up to the end of the epoch, or of some steps, in all processes."""
    found = []
    for micros, sizes in accumulation_batches(state, loader, accumulate):
        if state.epoch > 1:
            break
        found.append([label for _, target in micros for label in target.tolist()])
        assert sizes == [len(target) for _, target in micros]
        if steps is not None and len(found) == steps:
            break
    return found


@pytest.mark.parametrize("dataset", [NUMBERS, Shuffled()])
@pytest.mark.parametrize(("size", "accumulate"), [(4, 1), (16, 1), (5, 2), (8, 3)])
def test_every_batch_size_after_a_resume_takes_each_example_once(dataset, size, accumulate):
    def loader(size):
        if dataset is NUMBERS:
            return Loader(dataset, size, shuffle=True, seed=4, device=CPU)
        return StreamLoader(dataset, size, seed=4, device=CPU)

    state = State()
    begun = loader(8)
    whole = taken(state, begun, 1, 3)
    resumed, third = loader(size), loader(7)
    resumed.start = StartingPoint(3, 1, reads_of(begun, 1, state.position))
    whole += taken(state, resumed, accumulate, 1)
    # Resumed again, at the second step of that size.
    third.start = StartingPoint(4, 1, reads_of(resumed, 1, state.position))
    copied = State()
    copied.position, copied.epoch = state.position, 1
    for last, batches in ((state, third), (copied, resumed)):
        rest = taken(last, batches, accumulate)
        assert sorted(label for labels in whole + rest for label in labels) == list(range(50))
    if dataset is NUMBERS:
        train = TrainSpec(epochs=2, batch_size=size, accumulate=accumulate)
        ends = [step for step in range(3, 40) if ends_epoch(resumed, accumulate, step)]
        assert ends[0] == 4 + len(rest)
        assert (
            total_steps(train, resumed) == ends[1] == ends[0] + ceil(ceil(50 / size) / accumulate)
        )
        found = [samples_of_step(resumed, accumulate, step) for step in range(4, ends[0] + 2)]
        assert [samples.indices for samples in found[:-1]] == [whole[3], *rest]
        assert [samples.epoch for samples in found] == [1] * (ends[0] - 3) + [2]


@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Items(), Batches()])
def test_targets_are_those_of_the_data_set(dataset):
    loader = Loader(dataset, 3, shuffle=True, seed=4, device=CPU)
    ((indices, targets),) = targets_of_steps(loader, [StepSamples(1, 1, [[3, 0, 7]])])
    assert indices == targets.tolist() == [3, 0, 7]


def masking(pairs):
    return torch.stack([x for x, _ in pairs]), torch.rand(len(pairs))


def joined(pairs):
    return 0, [y + 1 for _, y in pairs]


def collating(function, workers=0):
    options = LoaderOptions(workers, collator=Collator("mine", function))
    return Loader(Items(), 3, shuffle=True, seed=4, device=CPU, options=options)


def test_targets_of_a_collator_are_those_that_it_makes():
    step = StepSamples(1, 1, [[3, 0, 7]])
    assert [*targets_of_steps(collating(joined), [step])] == [([3, 0, 7], [4, 1, 8])]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own, from Python 3.12 on
@pytest.mark.parametrize("workers", [0, 1])
def test_targets_of_a_step_and_a_replay_are_those_that_the_step_drew(workers):
    loader = collating(masking, workers)
    expected = [target.tolist() for _, target in [*loader.epoch(1), *loader.epoch(2)]]
    state = torch.get_rng_state()
    steps = [samples_of_step(loader, 2, step) for step in (2, 3)]
    assert [target.tolist() for _, target in targets_of_steps(loader, steps)] == expected[2:6]
    assert torch.equal(torch.get_rng_state(), state)
    first = steps[0]
    assert (first.epoch, first.first_batch) == (1, 2)
    micro_batches = first.micro_batches + steps[1].micro_batches
    again = saved_batches(loader, first.epoch, micro_batches, first.first_batch)
    assert [target.tolist() for _, target in again] == expected[2:6]
    loader.close()


def test_all_targets_are_those_of_an_evaluation():
    loader = collating(masking)
    loader.shuffle = False
    found = [target.tolist() for _, target in all_targets(loader)]
    assert found == [target.tolist() for _, target in loader.epoch(0)]
