import pytest
import torch
from items import CPU, Batches, Items, X, Y
from torch.utils.data import TensorDataset

from runner.data.collate import Collator
from runner.data.loader import Loader, LoaderOptions
from runner.data.step_samples import (
    StepSamples,
    all_targets,
    samples_of_step,
    saved_batches,
    targets_of_steps,
)
from runner.training.loop import accumulation_batches


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
