"""Layers of TransformerEngine, imitated in plain torch: which are converted, and which are fused.

What holds for every kind of converted layer is in test_layer_contract.py.
"""

import copy

import imitated_te
import pytest
import torch
from precision_models import ResidualBlock, skip_reasons
from torch import nn
from torch.nn import functional as F

from runner.core.base.errors import ConfigError
from runner.precision.conversion import ConversionRules
from runner.precision.layers.te_layers import convert_layers, find_pairs, te_obstacle

MULTIPLE = 16


def convert(model, fuse=False, **rules):
    """Convert a model in place; return why each layer was not converted, or how it was fused."""

    def find_obstacle(module):
        return te_obstacle(module, MULTIPLE)

    rules = ConversionRules("x", find_obstacle=find_obstacle, **rules)
    return skip_reasons(convert_layers(model, imitated_te, MULTIPLE, rules, fuse))


# Which layers are converted


def test_both_widths_are_multiples():
    for into, out, multiple in ((48, 1024, 16), (64, 32, 32)):
        assert te_obstacle(nn.Linear(into, out), multiple) == ""
    for into, out, multiple in ((8, 16, 16), (16, 24, 16), (48, 64, 32)):
        assert f"multiples of {multiple}" in te_obstacle(nn.Linear(into, out), multiple)


def test_each_layer_is_converted_or_has_a_reason():
    model = nn.ModuleDict(
        {
            "good": nn.Linear(32, 16),
            "norm": nn.LayerNorm(7),
            "odd": nn.Linear(16, 24),
            "flat": nn.LayerNorm((2, 16)),
            "bare": nn.LayerNorm(16, elementwise_affine=False),
            "biasless": nn.LayerNorm(16, bias=False),
        }
    )
    assert convert(model) == {
        "good": "",
        "norm": "",
        "odd": "its shape 16 -> 24 is not in multiples of 16",
        "flat": "normalises over 2 dimensions",
        "bare": "has no weight",
        "biasless": "has no bias",
    }


def test_norms_alone_are_refused_before_anything_changes():
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 3))
    with pytest.raises(ConfigError, match=r"would convert nothing.*16 -> 3 is not in multiples"):
        convert(model)
    assert [type(module) for module in model] == [nn.LayerNorm, nn.Linear]


@pytest.mark.parametrize("shape", [(16, 32), (5, 32), (2, 3, 32), (32,), (2, 8, 32)])
def test_the_library_gets_rows_in_multiples(shape):
    layer = nn.Linear(32, 16)
    convert(layer)
    x = torch.randn(shape)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    is_multiple = shape[:-1] in ((16,), (2, 8))
    assert layer.input_shapes == [shape if is_multiple else (16, 32)]


# Fusing


@pytest.mark.parametrize("shape", [(16, 32), (3, 5, 32)])
def test_a_fused_model_computes_what_an_unfused_one_does(shape):
    plain = nn.Sequential(ResidualBlock(), nn.LayerNorm(32), nn.Linear(32, 16))
    unfused, fused = copy.deepcopy(plain), copy.deepcopy(plain)
    convert(unfused)
    assert convert(fused, fuse=True) == {
        "0.norm1": "computed in 0.into",
        "0.into": "computes 0.norm1 too",
        "0.out": "",
        "0.norm2": "not fused: its output is not for one converted linear layer alone",
        "0.gate": "",
        "1": "computed in 2",
        "2": "computes 1 too",
    }
    x, results = torch.randn(shape), []
    for model in (unfused, fused):
        output = model(x)
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert list(fused.state_dict()) == list(plain.state_dict())
    twin = copy.deepcopy(fused)
    twin[1].weight.data.zero_()  # its norm is its own
    assert torch.equal(fused(x), results[1][0])
    assert not torch.equal(twin(x), results[1][0])


def test_layers_of_an_ignored_block_are_not_fused():
    model = nn.Sequential(ResidualBlock(), ResidualBlock())
    reasons = convert(model, fuse=True, ignore=["0"])
    assert reasons["1.norm1"] == "computed in 1.into"
    ignored = {why for name, why in reasons.items() if name.startswith("0.")}
    assert ignored == {"named by precision.ignore_modules"}
    assert type(model[0].norm1) is nn.LayerNorm


def linear_by_norm(model, **changes):
    """Return the linear layer that each norm can be fused with, and why others cannot."""
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return find_pairs(model, **{"norms": norms, "linears": linears, **changes})


def model_with_forward(forward, **modules):
    """Return a model of these modules, by default a norm, a linear layer and another norm."""
    if not modules:
        modules = {"norm": nn.LayerNorm(4), "linear": nn.Linear(4, 4), "other": nn.LayerNorm(4)}
    model = type("Model", (nn.Module,), {"forward": forward})()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def chained(self, x):
    return self.linear(self.norm(x))


def test_pairs_are_found_through_lists_and_dropout_stops_them():
    def forward(self, x):
        return self.parts[1](self.parts[0](x))

    parts = nn.ModuleList([nn.LayerNorm(4), nn.Linear(4, 4)])
    model = nn.Sequential(model_with_forward(forward, parts=parts))
    assert linear_by_norm(model)[0] == {"0.parts.0": "0.parts.1"}
    model = nn.Sequential(nn.LayerNorm(4), nn.Dropout(), nn.Linear(4, 4))
    assert linear_by_norm(model)[0] == {}
    assert linear_by_norm(nn.LayerNorm(4), norms=["(model)"])[0] == {}


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda self, x: self.linear(self.norm(x)) + self.norm(x), "it is called 2 times"),
        (lambda self, x: self.linear(self.norm(x)) + self.linear(x), "alone"),
        (lambda self, x: self.linear(self.norm(x) + 1), "alone"),
        (lambda self, x: (self.linear(n := self.norm(x)), n), "alone"),
        (lambda self, x: self.linear(input=self.norm(x)), "linear takes more than its output"),
        (lambda self, x: self.linear(self.norm(x)) if x.sum() > 0 else x, "cannot be traced"),
        (lambda self, x: self.linear(x), "it is called 0 times"),
    ],
)
def test_norms_without_exactly_one_linear_layer_are_not_fused(forward, why):
    pairs, reasons = linear_by_norm(model_with_forward(forward))
    assert pairs == {}
    assert why in reasons["norm"]


def test_tracing_does_not_change_the_model():
    def forward(self, x):
        self.count = self.count + 1
        self.saved_input = x
        torch.rand(1)
        return chained(self, x)

    model = model_with_forward(forward)
    model.count, before = 0, torch.get_rng_state()
    assert linear_by_norm(model)[0] == {"norm": "linear"}
    assert (model.count, hasattr(model, "saved_input")) == (0, False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["norm", "linear"])
def test_layers_with_hooks_or_second_names_are_not_fused(name):
    model = model_with_forward(chained)
    model.alias = getattr(model, name)
    assert linear_by_norm(model, norms=["norm"])[0] == {}
    model = model_with_forward(chained)
    getattr(model, name).register_forward_hook(lambda *_: None)
    _, reasons = linear_by_norm(model)
    assert reasons["norm"] == "not fused: it or its linear layer has hooks or two names"
    assert linear_by_norm(model, linears=[])[0] == {}


def test_a_call_of_a_fused_layer_without_its_norm_raises():
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    convert(model, fuse=True)
    x = torch.randn(2, 16)
    with pytest.raises(RuntimeError, match=r"without its norm.*precision\.fuse=false"):
        model[1](x)
    model(x)
    model[0](x)
    with pytest.raises(RuntimeError, match="called twice in a row"):
        model(x)
