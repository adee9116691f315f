import pytest
import torch
from torch.utils.data import TensorDataset

from runner.data.collate import Collator
from runner.data.loader import Loader, LoaderOptions
from runner.data.step_samples import samples_of_step, targets_of_samples
from runner.training.loop import accumulation_batches

X, Y = torch.arange(10.0), torch.arange(10)


class Items:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], int(Y[index])


class Batches(Items):
    def batch(self, indices):
        return X[indices], Y[indices]


class State:
    """What the loop counts."""

    epoch = position = 0


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_the_samples_of_a_step_are_those_that_the_loop_gives_it(accumulate):
    loader = Loader(TensorDataset(X, Y), 3, shuffle=True, seed=4, device=torch.device("cpu"))
    state = State()
    for step, (micros, _) in enumerate(accumulation_batches(state, loader, accumulate), 1):
        computed = samples_of_step(loader, accumulate, step)
        assert (computed.step, computed.epoch) == (step, state.epoch)
        assert computed.micro_batches == [y.tolist() for _, y in micros]
        if step == 12:
            return


@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Items(), Batches()])
def test_targets_are_those_of_the_data_set(dataset):
    loader = Loader(dataset, 3, shuffle=True, seed=4, device=torch.device("cpu"))
    assert targets_of_samples(loader, [3, 0, 7]).tolist() == [3, 0, 7]


def test_targets_of_a_collator_are_those_that_it_makes():
    options = LoaderOptions(collator=Collator("mine", lambda pairs: (0, [y + 1 for _, y in pairs])))
    device = torch.device("cpu")
    loader = Loader(Items(), 3, shuffle=True, seed=4, device=device, options=options)
    assert targets_of_samples(loader, [3, 0, 7]) == [4, 1, 8]
