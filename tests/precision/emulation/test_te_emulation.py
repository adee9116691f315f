"""TransformerEngine's recipes where its hardware is not."""

import copy

import pytest
import torch
from precision_models import (
    CPU,
    DELAYED_SCALING,
    load_precision,
    run_forward,
    values_of_many_magnitudes,
)
from torch import nn

from runner.precision import registry
from runner.precision.emulation.formats import E4M3, E5M2
from runner.precision.emulation.quantizers import BlockQuantizer, amax_scale, power_of_two_scale
from runner.precision.emulation.te_emulation import quantizers_of_recipe

TE = [name for name in registry.precision_names() if name.startswith("transformer-engine")]


def products(name, rows=40, into=64, out=96, **changes):
    """Output and gradients of one layer, and float32's."""
    torch.manual_seed(0)
    plain = nn.Linear(into, out)
    precision = load_precision(name, **changes)
    layer, _ = precision.convert(copy.deepcopy(plain))
    x = torch.randn(2, rows // 2, into)
    found = []
    for one, inputs in ((layer, precision.cast(x)), (plain, x)):
        inputs = inputs.clone().requires_grad_()
        context = precision.forward(CPU) if one is layer else torch.enable_grad()
        with context:
            y = one(inputs)
        (y.float() * torch.linspace(-1, 1, out)).sum().backward()
        found.append((y, inputs.grad, one.weight.grad, one.bias.grad))
    return precision, *found


@pytest.mark.parametrize("name", TE)
def test_errors_are_those_of_the_format(name):
    precision, low, exact = products(name)
    bound = 0.25 if "nvfp4" in name else 0.06
    for a, b in zip(low, exact, strict=True):
        assert a.dtype is precision.storage
        error = ((a.float() - b).norm() / b.norm()).item()
        assert 1e-4 < error < bound or b is exact[3]


@pytest.mark.parametrize("name", TE)
def test_rows_that_are_not_a_multiple_are_computed(name):
    low = products(name, rows=14)[1]
    assert low[0].shape == (2, 7, 96)
    assert low[1].shape == (2, 7, 64)


@pytest.mark.parametrize("name", ["transformer-engine-current", "transformer-engine-block"])
def test_a_high_precision_backward(name):
    recipe = load_precision(name).recipe
    errors = {}
    for how in (None, "dequantized", "high_precision"):
        _, low, exact = products(name, recipe={**recipe, "backward_override": how})
        errors[how] = ((low[1].float() - exact[1]).norm() / exact[1].norm()).item()
    assert errors["high_precision"] < 0.01 < errors["dequantized"] < errors[None]


def test_gradients_are_in_e5m2_only_where_the_recipe_says():
    hybrid = quantizers_of_recipe({"kind": "current"})
    plain = quantizers_of_recipe({"kind": "current", "format": "E4M3"})
    x = values_of_many_magnitudes(16, 16)
    assert torch.equal(hybrid.grad.along_columns(x), BlockQuantizer(E5M2, amax_scale)(x))
    assert torch.equal(plain.grad.along_columns(x), BlockQuantizer(E4M3, amax_scale)(x))
    assert torch.equal(hybrid.input.along_columns(x), plain.input.along_columns(x))


def test_blocks_run_along_what_a_product_contracts():
    x = values_of_many_magnitudes(256, 256)
    how = quantizers_of_recipe({"kind": "block"})
    line = BlockQuantizer(E4M3, power_of_two_scale, (1, 128))
    along, across = how.input.quantize(x)
    assert torch.equal(along, line(x))
    assert torch.equal(across, line(x.t()).t())
    along, across = how.weight.quantize(x)
    assert torch.equal(along, across)
    assert torch.equal(along, BlockQuantizer(E4M3, power_of_two_scale, (128, 128))(x))


def test_delayed_scaling_takes_the_largest_of_past_steps():
    precision = load_precision(
        "transformer-engine", recipe={"kind": "delayed", "amax_history_len": 3}
    )
    layer, _ = precision.convert(nn.Linear(32, 32))
    scales, sizes = [], [1.0, 8.0, 2.0, 2.0, 2.0]
    for size in sizes:
        x = torch.full((16, 32), size, dtype=torch.bfloat16)
        with precision.forward(CPU):
            layer(x)
        scales.append(448 / precision.gauges(layer)["fp8/scale/(model)"].item())
    # Of the current step and the two before it, as the library's own update has it.
    assert scales == [1, 8, 8, 8, 2]


@pytest.mark.parametrize("name", [name for name in TE if name not in DELAYED_SCALING])
def test_recipes_without_past_steps_have_no_state(name):
    precision = load_precision(name)
    layer, _ = precision.convert(nn.Linear(32, 32))
    run_forward(precision, layer, torch.ones(16, 32)).sum().backward()
    assert precision.state_dict(layer) == precision.gauges(layer) == {}
    precision.load_state_dict(layer, {"(model)": {}})


def test_an_evaluation_does_not_change_the_scales():
    precision = load_precision("transformer-engine")
    layer, _ = precision.convert(nn.Linear(32, 32))
    with precision.eval_context(layer), torch.no_grad(), precision.forward(CPU):
        layer(torch.ones(16, 32, dtype=torch.bfloat16))
    assert not precision.state_dict(layer)
    with precision.forward(CPU):
        layer(torch.ones(16, 32, dtype=torch.bfloat16)).sum().backward()
    before = precision.state_dict(layer)
    with precision.eval_context(layer), torch.no_grad(), precision.forward(CPU):
        layer(torch.full((16, 32), 99, dtype=torch.bfloat16))
    after = precision.state_dict(layer)
    assert str(before) == str(after)
    assert before["(model)"]["forward_amax_history"].shape == (1024, 3)
    assert before["(model)"]["backward_scale"][0] == 57344


def test_fused_computes_what_unfused_does():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64))
    outputs = []
    for fuse in (False, True):
        precision = load_precision("transformer-engine-current", fuse=fuse)
        model, report = precision.convert(copy.deepcopy(plain))
        assert ("computes 0 too" in str(report.to_list())) == fuse
        with precision.forward(CPU):
            outputs.append(model(torch.ones(16, 32, dtype=torch.bfloat16).cumsum(1)))
    assert torch.equal(*outputs)
