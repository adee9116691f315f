"""torchao's float8 training, emulated, so that a CPU shows all but the hardware's kernels.

What holds for every kind of converted layer is in layers/test_layer_contract.py.
"""

import subprocess
import sys

import pytest
import torch
from precision_models import (
    CPU,
    load_precision,
    relative_error,
    run_forward,
    skip_reasons,
    train_state,
)
from torch import nn
from torch.nn import functional as F

from runner.core.loop.step import train_step
from runner.core.policy.loss_scale import LossScale
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.models.mlp import MLP
from runner.precision import float8
from runner.precision.layers.backward_checks import pad_rows

TENSORWISE, ROWWISE, HIGH_PRECISION = NAMES = (
    "float8-tensorwise float8-rowwise float8-rowwise-hp".split()
)
# e4m3 has 3 mantissa bits, so rounding moves a value by 2**-4 of it at most (Micikevicius et al.
# 2022, "FP8 Formats for Deep Learning"). Weights and inputs are rounded independently, and the
# sum of a product averages: 0.045 to 0.049 was measured for these recipes.
E4M3 = 2**-4


def converted_layer(name, rows=32, **options):
    """Return a precision, a converted layer, inputs and the gradient of its outputs."""
    torch.manual_seed(0)
    precision = load_precision(name, **options)
    layer, _ = precision.convert(nn.Linear(64, 32))
    return precision, layer, torch.randn(rows, 64), torch.randn(rows, 32)


# The recipes


@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_rounded_as_e4m3_is(name):
    precision, layer, x, _ = converted_layer(name)
    error = relative_error(run_forward(precision, layer, x), F.linear(x, layer.weight, layer.bias))
    assert E4M3 / 4 < error < E4M3


def gradients(name):
    """Return a layer's output, its gradients of input and weight, and those without rounding."""
    precision, layer, x, gradient = converted_layer(name, weights="bfloat16")
    x, gradient = x.bfloat16().requires_grad_(), gradient.bfloat16()
    output = run_forward(precision, layer, x)
    output.backward(gradient)
    exact = (gradient @ layer.weight, gradient.t() @ x)
    return output.detach(), (x.grad, layer.weight.grad), exact


@pytest.mark.parametrize("name", NAMES)
def test_the_weight_gradient_is_bfloat16s_in_the_hp_recipe_only(name):
    _, (input_grad, weight_grad), (exact_input_grad, exact_weight_grad) = gradients(name)
    assert torch.equal(weight_grad, exact_weight_grad) == (name == HIGH_PRECISION)
    # Output gradients have e5m2's 2 bits under tensorwise, so twice the rounding.
    assert 0.01 < relative_error(input_grad, exact_input_grad) < 2 * E4M3
    assert relative_error(weight_grad, exact_weight_grad) < 2 * E4M3


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_per_row_spares_the_others_an_outlier(name):
    """A row that is 2**18 smaller than another falls below e4m3's range (448 to 2**-9) where they
    share a scale."""
    precision, layer, x, _ = converted_layer(name)
    layer.bias.data.zero_()
    x[0] *= 2**18
    small_rows = run_forward(precision, layer, x)[1:]
    error = relative_error(small_rows, F.linear(x, layer.weight)[1:])
    assert (error < E4M3) == (name != TENSORWISE)


# The contexts


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_dtypes_flow_as_in_bfloat16(weights):
    precision = load_precision(TENSORWISE, weights=weights)
    model, _ = precision.convert(MLP([8, 8], 16, [64, 32]))
    assert (precision.storage, precision.compute) == (getattr(torch, weights), torch.bfloat16)
    batch = torch.randn(24, 8, 8), torch.randint(16, (24,))
    with DtypeProbe(model) as probe:
        train_step(train_state(precision, model), [batch])
    rows = {row["module"]: row for row in probe.table()}
    for part in ("layers.0", "layers.1", "head"):
        row = rows[part]
        assert (row["stores"], row["gradients"], row["outputs"]) == (weights, weights, "bfloat16")
    assert type(precision.scale(CPU)) is LossScale
    assert precision.loss_dtype is torch.float32
    assert precision.forward(CPU) is precision.forward(CPU)
    with precision.forward(CPU):
        assert torch.get_default_dtype() is precision.storage


def test_torchao_is_imported_late_and_prints_nothing():
    script = """
import sys
import torch
from torch import nn
from runner.precision import registry
precisions = [registry.load_precision(name) for name in ("qat-int4", "int4", "qat-int8", "int8")]
precisions.append(registry.load_precision("float8-rowwise", emulate=True))
assert "torchao" not in sys.modules
for precision in precisions:
    layer, _ = precision.convert(nn.Linear(32, 16))
    layer(torch.randn(2, 32))
assert "torchao" in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Which layers are converted


def test_each_layer_is_converted_or_has_a_reason():
    def reasons(**options):
        layers = {
            "narrow": nn.Linear(16, 16),
            "odd": nn.Linear(16, 24),
            "wide": nn.Linear(24, 64),
            "head": nn.Linear(64, 64),
            "parent": nn.Linear(64, 64),
        }
        layers["parent"].child = nn.Linear(1, 1)
        precision = load_precision(TENSORWISE, **options)
        return skip_reasons(precision.convert(nn.ModuleDict(layers))[1])

    assert reasons() == {
        "narrow": "",
        "odd": "its shape 16 -> 24 is not in multiples of 16",
        "wide": "its shape 24 -> 64 is not in multiples of 16",
        "head": "",
        "parent": "holds modules of its own",
        "parent.child": "its shape 1 -> 1 is not in multiples of 16",
    }
    whys = reasons(min_features=32)
    assert whys["narrow"] == "its shape 16 -> 16 is below precision.min_features=32"


# Padding of rows. Whole numbers up to 7 are exact in both formats, scales of 448/7 and 57344/7 are
# powers of two, and so every sum is exact in float32, whatever its order.


def whole_numbers(*shape):
    numbers = torch.randint(-7, 8, shape).float()
    numbers[..., 0] = 7.0
    return numbers


def products(layer, forward, x, gradient):
    """Return a layer's output and its gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = forward(x)
    output.backward(gradient)
    return output.detach(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("rows", [1, 16, 17])
@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_neither_outputs_nor_gradients(name, rows):
    _, layer, *_ = converted_layer(name)
    with torch.no_grad():
        layer.weight.copy_(whole_numbers(32, 64))
    unpadded = super(float8.Float8Layer, layer).forward
    x, gradient = whole_numbers(rows, 64), whole_numbers(rows, 32)
    found = products(layer, layer, x, gradient)
    for one, other in zip(found, products(layer, unpadded, x, gradient), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        ((16, 3), (16, 3)),
        ((2, 8, 3), (2, 8, 3)),  # unchanged
        ((5, 3), (16, 3)),
        ((2, 3, 3, 3), (32, 3)),
        ((3,), (16, 3)),
        ((0, 3), (16, 3)),
        ((2, 0, 3), (16, 3)),
    ],
)
def test_rows_are_padded_to_the_multiple(shape, padded):
    def forward(x):
        assert x.shape == padded
        return x @ torch.ones(3, 2)

    x = torch.randn(shape)
    torch.testing.assert_close(pad_rows(forward, x, 16), x @ torch.ones(3, 2))
