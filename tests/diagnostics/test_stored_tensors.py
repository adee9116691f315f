"""The tensors of a module, with what packed ones hold."""

import pytest
import torch
from torch import nn

from runner.diagnostics.stored_tensors import stored_tensors
from runner.precision.registry import load_precision


def test_each_tensor_once_with_buffers_and_frozen_ones_named():
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3))
    model[1].bias = model[1].weight
    model[0].weight.requires_grad_(False)
    rows = {row.name: row for row in stored_tensors(model)}
    assert rows["0.weight"] == ("0.weight", "float32", [3, 2], 24, "frozen")
    assert rows["1.running_mean"].note == "buffer"
    assert "1.bias" not in rows


@pytest.mark.parametrize(
    ("precision", "notes"),
    [
        ("bnb-nf4-dq", ["nf4, uint8 scale per 64, float32 scale per 256 scales, frozen", ""]),
        ("bnb-int8", ["int8 codes, scaled by SCB / 127, frozen", "", "buffer"]),
        ("int4", ["int4-32 codes, frozen", "", "buffer"]),
        ("qat-int4", ["int4-32 rounded in each forward", ""]),
    ],
)
def test_a_packed_weight_says_how_it_is_packed(precision, notes):
    model, _ = load_precision(precision).convert(nn.Sequential(nn.Linear(64, 32)))
    rows = list(stored_tensors(model[0]))
    assert [row.note for row in rows] == notes
    assert sum(row.size for row in rows) < 64 * 32 * torch.float32.itemsize + 4 * 33
