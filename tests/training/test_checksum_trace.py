import pytest
import torch
from torch import nn

from runner.training.checksum_trace import ChecksumTrace, checksum

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [8, 7, 0])
def test_a_flipped_bit_changes_the_checksum_wherever_it_is(dtype, count):
    values = torch.arange(count).to(dtype)
    for index in range(count * values.itemsize):
        for bit in (0, 7):
            changed = values.clone()
            changed.view(torch.uint8)[index] ^= 1 << bit
            assert checksum(changed) != checksum(values)
    assert checksum(values.clone()) == checksum(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (3, 5, 7, 1)])
def test_the_checksum_depends_on_the_values_alone(dtype, shape):
    values = torch.randn(shape).to(dtype)
    shifted = torch.cat([torch.zeros(1, dtype=dtype), values.flatten()])[1:].view(shape)
    layouts = [values, shifted, values.to(memory_format=torch.channels_last)]
    assert len({int(checksum(layout)) for layout in layouts}) == 1


def test_nan_of_the_same_bits_is_equal():
    values = torch.tensor([float("nan"), -0.0])
    assert checksum(values) == checksum(values.clone())
    assert checksum(values) != checksum(torch.tensor([float("nan"), 0.0]))


class Branches(nn.Module):
    """A residual block, whose activation writes in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x, *, shift):
        return x + self.rest(self.first(x)) + shift


def test_outputs_and_gradients_are_in_the_order_in_which_they_are_made():
    model = Branches()
    x = torch.randn(3, 4, requires_grad=True) * 1
    with ChecksumTrace(model) as trace:
        model(x, shift=torch.ones(4)).sum().backward()
    assert trace.places == [
        "the output of first",
        "the output of rest.0",
        "the output of rest.1",  # that of rest, too
        "the output of the model",
        "the gradient of the model's output",
        "the gradient of the input of rest.1",
        "the gradient of the input of rest",  # where rest.0 has written to it
        "the gradient of the input of first",
        "the gradient of the input of the model",
    ]
    assert len(trace.sums) == len(trace.places)
    assert not any(module._forward_hooks for module in model.modules())


def test_untraced_modules_get_no_hook():
    model = Branches()
    with ChecksumTrace(model, {"", "first", "rest.0", "rest.1"}) as trace:
        model(torch.randn(3, 4), shift=torch.ones(4)).sum().backward()
    assert trace.places == ["the output of rest", "the gradient of the input of rest"]
