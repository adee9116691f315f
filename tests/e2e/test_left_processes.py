"""Loading processes that an error leaves do not keep the command from ending."""

import pytest
from refusals import check_refused

SETS = """
import torch
from torch.utils.data import Dataset, IterableDataset


def example(i):
    return torch.full((4,), float(i)), i % 2


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return example(i)


class Lines(IterableDataset):
    def __iter__(self):
        return map(example, range(32))


def rows():
    return Rows(), Rows()


def lines():
    return Lines(), Lines()
"""


@pytest.mark.parametrize("name", ["rows", pytest.param("lines", marks=pytest.mark.extended)])
def test_a_model_that_fails_on_the_first_batch_ends_the_command(fresh_cli, tmp_path, name):
    (tmp_path / "mysets.py").write_text(SETS)
    model = "~model +model._target_=torch.nn.Linear +model.in_features=5 +model.out_features=2"
    data = f"~data +data._target_=mysets.{name} task=classification"
    rest = "train.max_steps=3 train.num_workers=1 tracking=none"
    done = fresh_cli(*model.split(), *data.split(), *rest.split(), timeout=120)
    check_refused(done, "fails on the first batch")
