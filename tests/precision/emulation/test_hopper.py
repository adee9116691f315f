"""Hopper's narrow sums: by hand, against a plain reference, and in emulated layers."""

import math

import pytest
import torch
from precision_models import CPU, load_precision, run_forward
from torch import nn

from runner.precision.emulation import te_emulation
from runner.precision.emulation.formats import E4M3, E5M2
from runner.precision.emulation.quantizers import BlockQuantizer, amax_scale
from runner.precision.emulation.te_emulation import scaled_product
from runner.precision.te_recipes import complete_recipe


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
    with te_emulation.autocast(True, complete_recipe(recipe), accumulate):
        y = layer(x)
    y.backward(torch.rand_like(y))
    return x, layer.weight, y, x.grad, layer.weight.grad


@pytest.mark.parametrize("kind", ["delayed", "current", "block"])
def test_a_layer_promotes_the_backwards_sums_and_those_of_blocks(kind):
    *_, output, input_grad, weight_grad = layer_results({"kind": kind})
    *_, wide, wide_input_grad, wide_weight_grad = layer_results({"kind": kind}, "float32")
    errors = [
        ((a - b).norm() / b.norm()).item()
        for a, b in (
            (output, wide),
            (input_grad, wide_input_grad),
            (weight_grad, wide_weight_grad),
        )
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
