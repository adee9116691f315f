import math
from functools import partial

import pytest
import torch
from one_off_nets import net
from torch import nn

from runner.modes.replay import NonfiniteTrace, describe_tensor, first_nonfinite


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def traced(*middle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), *middle, nn.Linear(4, 2))
    with NonfiniteTrace(model) as trace:
        loss = model(torch.ones(5, 3)).sum()
        trace.rows.append(describe_tensor("forward", "(loss)", "", "loss", loss))
        loss.backward()
    return trace.rows


def test_rows_come_in_the_order_in_which_tensors_are_made():
    rows = traced(nn.ReLU())
    assert [r.phase for r in rows[:5]] == ["forward"] * 5
    assert [r.module for r in rows[:5]] == ["0", "1", "2", "(model)", "(loss)"]
    assert {(r.module, r.tensor) for r in rows if r.phase == "backward"} >= {
        ("2", "gradient of weight"),
        ("0", "gradient of bias"),
        ("1", "gradient of the output"),
    }
    assert first_nonfinite(rows) is None


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_the_first_nonfinite_row_is_the_module_that_makes_it(factor):
    rows = traced(Times(1.0), Times(factor))
    row = rows[first_nonfinite(rows)]
    assert (row.phase, row.module, row.kind, row.dtype) == ("forward", "2", "Times", "float32")
    assert row.nonfinite_share == 1.0


def test_a_gradient_that_is_not_finite_is_found_in_the_backward():
    rows = traced(net(lambda _, x: (x * 0).sqrt()))
    row = rows[first_nonfinite(rows)]
    assert (row.phase, row.module, row.tensor) == ("backward", "0", "gradient of the output")


def test_the_largest_is_that_of_the_finite_elements():
    describe = partial(describe_tensor, "forward", "m", "K", "output")
    row = describe(torch.tensor([1.0, -3.0, math.inf, math.nan]))
    assert (row.largest, row.nonfinite_share) == (3.0, 0.5)
    assert describe(torch.empty(0)).nonfinite_share == 0.0
