"""Half precision and TF32 emulated on a CPU: products as tensor cores compute them."""

import pytest
import torch
from states import CPU
from torch import nn
from torch.nn import functional as F

from runner.precision import registry
from runner.precision.emulation.formats import round_to_tf32


def load(name, **changes):
    return registry.load_precision(name, emulate=True, **changes)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.into = nn.Conv2d(3, 8, 3), nn.Linear(8, 16)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        x = self.into(F.relu(self.conv(x)).flatten(2).transpose(1, 2))
        x, _ = self.rnn(x)
        return self.attention(x, x, x, need_weights=False)[0]


def grads(name, **changes):
    torch.manual_seed(0)
    precision, x = registry.load_precision(name, **changes), torch.randn(4, 3, 9, 9)
    model, _ = precision.convert(Net())
    with precision.session(model, CPU):
        with precision.forward(CPU):
            y = model(precision.cast(x))
        y.float().square().sum().backward()  # a mean's gradients underflow in float16
    return [y.detach().double(), *(p.grad.double() for p in model.parameters())]


@pytest.mark.parametrize(
    ("name", "bits"), [("tf32", 11), ("16-mixed", 11), ("16-true", 11), ("bf16-mixed", 8)]
)
def test_every_product_has_the_formats_error(name, bits):
    exact, plain = grads("64-true"), grads("32-true")
    low = grads(name, emulate=True)
    for a, b, c in zip(low, exact, plain, strict=True):
        error = ((a - b).norm() / b.norm()).item()
        assert error < 8 * 2.0**-bits
        assert error > 10 * ((c - b).norm() / b.norm()).item()


def test_tf32_rounds_what_a_product_takes_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(40, 40, generator=generator) for _ in range(3))
    layer = nn.Linear(40, 40)
    before = torch.addmm(c, a, b)
    with load("tf32").session(layer, CPU):
        assert torch.equal(a @ b, round_to_tf32(a) @ round_to_tf32(b))
        got = torch.addmm(c, a, b)
        assert torch.equal(a * b, torch.mul(a, b))
        assert torch.equal(torch.mm(a.double(), b.double()), a.double() @ b.double())
        turned = torch.complex(a, b) @ torch.complex(b, c).conj()
    assert torch.equal(got, torch.addmm(c, round_to_tf32(a), round_to_tf32(b)))
    assert torch.equal(torch.addmm(c, a, b), before)
    fine = (
        torch.complex(round_to_tf32(a), round_to_tf32(b))
        @ torch.complex(round_to_tf32(b), round_to_tf32(c)).conj()
    )
    assert torch.allclose(turned, fine, rtol=1e-5, atol=1e-5)
