"""TransformerEngine's recipes where its hardware is not, and Hopper's narrow sums: by hand, against
a plain reference, and in emulated layers."""

import copy
import math

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
from runner.precision.emulation import te_emulation
from runner.precision.emulation.formats import (
    E4M3,
    E5M2,
    BlockQuantizer,
    amax_scale,
    power_of_two_scale,
)
from runner.precision.emulation.te_emulation import quantizers_of_recipe, scaled_product
from runner.precision.te_recipes import complete_recipe

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


@pytest.mark.parametrize("update", [False, True])
def test_an_evaluation_changes_the_scales_only_where_it_is_asked_to(update):
    precision = load_precision("transformer-engine", update_in_eval=update)
    layer, _ = precision.convert(nn.Linear(32, 32))
    x = torch.ones(16, 32, dtype=torch.bfloat16)
    with precision.eval_context(layer), torch.no_grad(), precision.forward(CPU):
        layer(x)
    assert bool(precision.state_dict(layer)) == update
    with precision.forward(CPU):
        layer(x).sum().backward()
    before = precision.state_dict(layer)
    with precision.eval_context(layer), torch.no_grad(), precision.forward(CPU):
        layer(99 * x)
    after = precision.state_dict(layer)
    assert (str(before) == str(after)) == (not update)
    assert before["(model)"]["forward_amax_history"].shape == (1024, 3)
    assert before["(model)"]["backward_scale"][0] == 57344


@pytest.mark.parametrize(
    ("length", "history", "amax"),
    [
        (4, [0, 1, 2, 3], 3),
        (3, [0, 2, 3], 3),
        (6, [0, 0, 0, 1, 2, 3], 3),
        (1, [0], 448 / 2 / 8),  # of a history of one step, the amax follows from the scale
    ],
)
def test_a_resume_with_another_history_keeps_the_latest_amaxes(length, history, amax):
    recipe = {"kind": "delayed", "amax_history_len": length, "margin": 1}
    precision = load_precision("transformer-engine", recipe=recipe)
    layer, _ = precision.convert(nn.Linear(32, 32))
    steps = torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None]
    saved = {"forward_scale": torch.full((3,), 8.0), "forward_amax_history": steps.expand(4, 3)}
    saved |= {"backward_scale": torch.ones(2), "backward_amax_history": steps.expand(4, 2)}
    precision.load_state_dict(layer, {"(model)": saved})
    state = precision.state_dict(layer)["(model)"]
    assert state["forward_amax_history"][:, 0].tolist() == history
    assert state["backward_amax_history"][:, 1].tolist() == history
    gauges = {name: value.item() for name, value in precision.gauges(layer).items()}
    assert gauges == {"fp8/amax/(model)": amax, "fp8/scale/(model)": 8}
    precision.load_state_dict(layer, {})
    assert precision.state_dict(layer) == {}


@pytest.mark.parametrize("name", [name for name in TE if name not in DELAYED_SCALING])
def test_recipes_without_past_steps_have_no_state(name):
    precision = load_precision(name)
    layer, _ = precision.convert(nn.Linear(32, 32))
    run_forward(precision, layer, torch.ones(16, 32)).sum().backward()
    assert precision.state_dict(layer) == precision.gauges(layer) == {}
    precision.load_state_dict(layer, {"(model)": {}})


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


# Sums


def unscaled(rows):
    codes = torch.tensor(rows)
    return torch.stack((codes, torch.ones_like(codes)))


@pytest.mark.parametrize(
    ("products", "expected"),
    [
        ([1.0, 2.0**-13], 1 + 2.0**-13),
        ([1.0, 2.0**-14, 2.0**-14], 1.0),  # each is cut off before the sum
        ([-1.0, -(2.0**-14)], -1.0),  # towards zero
        ([1.0] * 8 + [2.0**-12, 2.0**-13], 8.0),  # the sum is cut off, too
        ([1.0] + [0.0] * 31 + [2.0**-14] * 40, 1.0),  # so is what is added to the accumulator
    ],
)
def test_sums_by_hand(products, expected):
    ones = [1.0] * len(products)
    for a, b in ((products, ones), (ones, products)):
        assert scaled_product(unscaled([a]), unscaled([b]), False).item() == expected


def test_a_products_exponent_is_the_sum_of_its_operands_exponents():
    """1.5 * 1.5 has exponent 0, so that 2**-13 is added to it; to 2.25 it would not be."""
    a = unscaled([[1.5, -1.5, 2.0**-6]])
    b = unscaled([[1.5, 1.5, 2.0**-7]])
    assert scaled_product(a, b, False).item() == 2.0**-13


def reference_dot(a, b):
    """One sum in Python's own numbers."""

    def exponent(x):
        return math.frexp(x)[1] - 1

    total = 0.0
    for first in range(0, len(a), 32):
        pairs = list(zip(a[first : first + 32], b[first : first + 32], strict=True))
        pairs = [(x, y) for x, y in pairs if x * y]
        exponents = [exponent(x) + exponent(y) for x, y in pairs]
        exponents += [exponent(total)] if total else []
        if not exponents:
            continue
        unit = 2.0 ** (max(exponents) - 13)
        units = sum(math.trunc(x * y / unit) for x, y in pairs) + math.trunc(total / unit)
        total = units * unit
        if total:
            step = 2.0 ** (exponent(total) - 13)
            total = math.trunc(total / step) * step
    return total


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("promotes", [False, True])
def test_products_equal_a_plain_reference(fmt, promotes):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 300, generator=generator) for rows in (5, 7))
    quantizer = BlockQuantizer(fmt, amax_scale, keeps_scales=True)
    left, right = quantizer(a), quantizer(b)
    interval = 128 if promotes else 300
    expected = torch.zeros(5, 7)
    for i in range(5):
        for j in range(7):
            for k in range(0, 300, interval):
                part = slice(k, k + interval)
                found = reference_dot(left[0, i, part].tolist(), right[0, j, part].tolist())
                expected[i, j] += torch.tensor(found) * left[1, i, 0] * right[1, j, 0]
    assert torch.equal(scaled_product(left, right, promotes), expected)


def layer_results(recipe, accumulate="hopper"):
    """A layer's input, weight, output and gradients, in float32 but for the products."""
    torch.manual_seed(0)
    layer = te_emulation.Linear(384, 48, bias=False, params_dtype=torch.float32, device="cpu")
    nn.init.uniform_(layer.weight)
    x = torch.rand(256, 384, requires_grad=True)
    with te_emulation.autocast(complete_recipe(recipe), accumulate):
        y = layer(x)
    y.backward(torch.rand_like(y))
    return x, layer.weight, y, x.grad, layer.weight.grad


@pytest.mark.parametrize("kind", ["delayed", "current", "block"])
def test_a_layer_promotes_the_backwards_sums_and_those_of_blocks(kind):
    *_, output, input_grad, weight_grad = layer_results({"kind": kind})
    *_, wide, wide_input_grad, wide_weight_grad = layer_results({"kind": kind}, "float32")
    errors = [
        ((a - b).norm() / b.norm()).item()
        for a, b in ((output, wide), (input_grad, wide_input_grad), (weight_grad, wide_weight_grad))
    ]
    assert all(1e-5 < error < 1e-3 for error in errors[1:])
    if kind == "block":
        assert 1e-5 < errors[0] < 1e-3
    else:
        assert 3e-3 < errors[0] < 1e-1


def test_a_layers_output_is_the_sum_of_its_quantized_operands():
    x, weight, output, *_ = layer_results({"kind": "current"})
    quantizer = BlockQuantizer(E4M3, amax_scale, keeps_scales=True)
    expected = scaled_product(quantizer(x.detach()), quantizer(weight.detach()), False)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
def test_a_backward_on_plain_operands_sums_in_float32(backward):
    recipe = {"kind": "current", "backward_override": backward}
    narrow, wide = layer_results(recipe), layer_results(recipe, "float32")
    assert not torch.equal(narrow[2], wide[2])
    assert torch.equal(narrow[3], wide[3])
    assert torch.equal(narrow[4], wide[4])


def test_a_run_asks_for_it_by_a_key():
    precision = load_precision("transformer-engine", accumulate="hopper")
    model, _ = precision.convert(nn.Sequential(nn.Linear(64, 32)))
    run_forward(precision, model, torch.randn(16, 64))
    with precision.forward(CPU):
        assert te_emulation.Autocast.active[-1].narrow
