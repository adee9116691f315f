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


def advice_on(fails, model, chosen, **more):
    """Return what is said against the error of a function that fails."""
    with pytest.raises((RuntimeError, NotImplementedError, AttributeError)) as raised:
        fails()
    return precision_advice(Failure(raised.value, model, chosen, **more))


@pytest.mark.parametrize(
    ("kind", "precision", "message"),
    [
        (Layer, "bf16-mixed", r"fails in body \(Layer\), test_error_rules\.py.*keep_fp32=\[body\]"),
        (Layer, "16-mixed", r"custom_fwd\(device_type='cpu'\).* of Product"),
        (Cuts, "32-true", r"inference_mode\(\) computes has no gradient"),
        (Distances, "bf16-true", "type precision=bf16-mixed"),
        (
            Double,
            "32-true",
            "two dtypes meet there.* type precision=64-true; or leave out \\.float",
        ),
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

    advice = advice_on(step, model, chosen)
    assert re.search(message, advice, re.IGNORECASE), advice


def test_layers_of_one_class_are_named_together():
    parts = {"fc": nn.Linear(8, 8), "conv0": Distances(8, 8), "conv1": Distances(8, 8)}
    chosen = load_precision("bf16-true")
    model, _ = chosen.convert(nn.Sequential(OrderedDict(parts)))
    with chosen.forward(torch.device("cpu")):
        advice = advice_on(lambda: model(chosen.cast(torch.ones(3, 8))), model, chosen)
    assert "keep_fp32=[conv0,conv1]" in advice


def test_a_recurrent_layer_without_a_primitive_is_given_states_of_another_dtype():
    chosen = load_precision("bf16-true")
    model, _ = chosen.convert(nn.Sequential(OrderedDict(body=nn.LSTM(8, 8))))
    states = (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))
    inputs = torch.ones(3, 1, 8, dtype=torch.bfloat16)
    advice = advice_on(lambda: model.body(inputs, states), model, chosen)
    assert "Tensors of two dtypes meet there" in advice
    assert "Type precision.keep_fp32=[body]" in advice


def test_a_size_that_a_model_checks_is_no_matter_of_the_precision():
    error = ValueError("got 8 features, but expected 3")
    assert precision_advice(Failure(error, nn.Linear(3, 1), load_precision("32-true"))) == ""


class Square(nn.Linear):
    """Needs float32, as a layer with an FFT does."""

    def forward(self, x):
        return super().forward(torch.linalg.inv(x).to(x.dtype))


class Blocks(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(kind(4, 4) for kind in kinds)
        self.last = Square(4, 4)

    def forward(self, x):
        x = self.inlet(x.float())
        for block in self.blocks:
            x = block(x) + torch.eye(4)
        return self.last(x)


@pytest.mark.parametrize(
    ("kinds", "typed"),
    [((Square, Square), "inlet,blocks.*,last"), ((Square, nn.Identity), "inlet,blocks.0,last")],
)
def test_every_layer_that_fails_is_named_at_once(kinds, typed):
    chosen = load_precision("bf16-true")
    model, _ = chosen.convert(Blocks(kinds))

    def call():
        model(chosen.cast(torch.eye(4)))

    advice = advice_on(call, model, chosen, call=call)
    assert "in inlet (Linear), test_error_rules.py" in advice
    assert f"precision.keep_fp32=[{typed}]" in advice
    kept = load_precision("bf16-true", keep_fp32=typed.split(","))
    model, _ = kept.convert(Blocks(kinds))
    model(kept.cast(torch.eye(4)))


class Hyper(nn.Module):
    """The weights of a layer are outputs of another one."""

    def __init__(self):
        super().__init__()
        self.target = nn.Linear(32, 32)
        self.make = nn.Linear(32, 32 * 32)

    def forward(self, x):
        weight = self.make(x[:1]).view(32, 32)
        return torch.func.functional_call(self.target, {"weight": weight}, (x,))


@pytest.mark.parametrize("name", ["int8", "nvfp4", "bnb-nf4"])
def test_made_weights_for_a_packed_layer_are_no_fault_of_the_data(name):
    chosen = load_precision(name)
    model, _ = chosen.convert(Hyper())
    advice = advice_on(lambda: model(torch.ones(3, 32)), model, chosen)
    assert f"precision={name} converts, or give it other weights" in advice
    assert "Type precision.ignore_modules=[target]" in advice
    ignores = load_precision(name, ignore_modules=["target"])
    model, _ = ignores.convert(Hyper())
    model(torch.ones(3, 32))
