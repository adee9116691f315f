"""Outputs that processes join are of single examples."""

import pytest
import torch
from states import make_state
from torch import nn

from runner.core.base.errors import ConfigError
from runner.diagnostics.data_checks import check_joinable


class Compared(nn.Linear):
    """Returns the similarity of each example to each other one of the batch."""

    def forward(self, x):
        made = super().forward(x)
        return made @ made.T


@pytest.mark.parametrize("size", [1, 4])
def test_embeddings_as_wide_as_the_batch_are_joined(size):
    x = torch.randn(size, 4)
    model = nn.Linear(4, 4)
    check_joinable(make_state(model), (x, x), model(x))


def test_what_compares_the_examples_of_one_process_is_refused():
    x = torch.randn(4, 4)
    model = Compared(4, 4)
    with pytest.raises(ConfigError, match=r"returns \[4, 4\], which compares the examples"):
        check_joinable(make_state(model), (x, x), model(x))
