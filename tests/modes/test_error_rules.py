import re
from collections import OrderedDict

import pytest
import torch
from precision_models import load_precision
from torch import nn
from torch.nn import functional as F

from runner.modes.error_rules import Failure, precision_advice


class Product(torch.autograd.Function):
    """A product whose backward knows nothing of autocast."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Layer(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight)


class Cuts(nn.Linear):
    def forward(self, x):
        with torch.inference_mode():
            x = x * 2
        return super().forward(x)


class Fails(nn.LSTM):
    def forward(self, x):
        raise RuntimeError("could not create a primitive descriptor for the LSTM forward")


class Distances(nn.Linear):
    def forward(self, x):
        return torch.cdist(x, x)


class Double(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.zeros(8, dtype=torch.double))


class Grad(nn.Linear):
    def forward(self, x):
        def energy(row):
            h = F.layer_norm(F.linear(row[None], self.weight), (8,), torch.ones(8))
            return F.linear(h.tanh(), self.weight).float().square().sum()

        return torch.func.vmap(torch.func.grad(energy))(x)


@pytest.mark.parametrize(
    ("kind", "precision", "message"),
    [
        (Layer, "bf16-mixed", r"fails in body \(Layer\), test_error_rules\.py.*keep_fp32=\[body\]"),
        (Layer, "16-mixed", r"custom_fwd\(device_type='cpu'\).* of Product"),
        (Cuts, "32-true", r"inference_mode\(\) computes has no gradient"),
        (Fails, "bf16-mixed", r"precision\.emulate=true; or type precision\.keep_fp32=\[body\]"),
        (Distances, "bf16-true", "type precision=bf16-mixed"),
        (Double, "32-true", "two dtypes meet there.* type precision=64-true; or leave out"),
        (Grad, "bf16-mixed", r"autocast\('cpu', enabled=False\):` around the call"),
    ],
)
def test_what_fails_is_named_with_what_to_type(kind, precision, message):
    chosen = load_precision(precision)
    parts = {"inlet": nn.Linear(8, 8), "body": kind(8, 8)}
    model, _ = chosen.convert(nn.Sequential(OrderedDict(parts)))

    def step():
        with chosen.forward(torch.device("cpu")):
            output = model(chosen.cast(torch.ones(3, 8)))
        output.float().sum().backward()

    with pytest.raises((RuntimeError, NotImplementedError)) as raised:
        step()
    advice = precision_advice(Failure(raised.value, model, chosen))
    assert re.search(message, advice, re.IGNORECASE), advice


def test_layers_of_one_class_are_named_together():
    parts = {"fc": nn.Linear(8, 8), "conv0": Distances(8, 8), "conv1": Distances(8, 8)}
    chosen = load_precision("bf16-true")
    model, _ = chosen.convert(nn.Sequential(OrderedDict(parts)))
    with pytest.raises(NotImplementedError) as raised, chosen.forward(torch.device("cpu")):
        model(chosen.cast(torch.ones(3, 8)))
    assert "keep_fp32=[conv*]" in precision_advice(Failure(raised.value, model, chosen))
