"""The bnb-* precisions on the library's CPU kernels: values, errors and gradients.

What holds for every kind of converted layer is in layers/test_layer_contract.py.
"""

import copy
import math

import pytest
import torch
from precision_models import CPU, load_precision, relative_error, skip_reasons
from torch import nn
from torch.nn import functional as F

from runner.models.gpt import GPT

pytest.importorskip("runner.precision.layers.bnb_linear")

FOUR_BITS = ("nf4", "nf4-dq", "fp4", "fp4-dq")
FROZEN = (*FOUR_BITS, "int8")
MODES = (*FROZEN, "int8-training")
# One mode for each way through the code.
PATHS = ("nf4", "fp4-dq", "int8", "int8-training")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A number rounds by 2**-9 or 2**-12 of it at most; inputs, weights and outputs do.
ROUNDING = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}


def load(mode, compute="float32", **options):
    return load_precision(f"bnb-{mode}", compute_dtype=compute, **options)


def converted_layer(mode, compute="float32", widths=(64, 48), train=True):
    """Return a converted layer and its weight before the conversion."""
    torch.manual_seed(0)
    layer = nn.Linear(*widths)
    nn.init.normal_(layer.weight)
    weight = layer.weight.detach().clone()
    load(mode, compute).convert(layer)
    return layer.train(train), weight


def represented_weight(layer):
    """Return the weight that a layer's codes stand for, by the formats' own definition: a code's
    value times its block's or row's largest magnitude."""
    from bitsandbytes.functional import dequantize_blockwise

    codes = layer._parameters["weight"]
    if codes.dtype is torch.int8:
        return codes.float() * layer.SCB[:, None] / 127
    if codes.dtype is torch.float32:
        weight = layer.weight.detach()
        largest = weight.abs().amax(1, keepdim=True)
        return (weight * (127 / largest)).round() * largest / 127
    state = codes.quant_state
    pairs, count = codes.data.flatten().long(), math.prod(state.shape)
    codes = torch.stack([pairs >> 4, pairs & 15], -1).flatten()[:count]
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    scales = scales.float().repeat_interleave(state.blocksize)[:count]
    return (state.code[codes] * scales).view(state.shape)


# The contexts


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_that_of_its_name(mode):
    precision = load_precision(f"bnb-{mode}")
    trains = mode == "int8-training"
    assert (precision.mode, precision.compute) == (mode, torch.bfloat16)
    assert (precision.freezes, precision.layout) == (not trains, "" if trains else f"bnb-{mode}")


@pytest.mark.parametrize("compute", DTYPES)
def test_the_rest_of_the_model_is_under_autocast(compute):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = load("int8", compute, ignore_modules=["1"])
    precision.convert(model)
    for _ in range(2):
        with precision.forward(CPU):
            output = model(precision.cast(torch.ones(1, 4)))
        assert output.dtype is DTYPES[compute]
        assert not torch.is_autocast_enabled("cpu")
    assert model[1].weight.dtype is torch.float32


# The function


# On normal weights, of the library's own quantise and dequantise.
ERRORS = {"nf4": 0.093, "fp4-dq": 0.122, "int8": 0.008, "int8-training": 0.008}


def library_weight(weight, mode):
    """Return a weight after the library's own quantise and dequantise."""
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_quant, quantize_4bit

    if mode.startswith("int8"):
        codes, largest, _ = int8_vectorwise_quant(weight.half())
        return codes.float() * largest[:, None] / 127
    quant_type, _, nested = mode.partition("-")
    packed, state = quantize_4bit(weight, quant_type=quant_type, compress_statistics=bool(nested))
    return dequantize_4bit(packed, state)


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("mode", PATHS)
def test_the_error_at_initialisation_is_that_of_the_format(mode, compute):
    layer, weight = converted_layer(mode, compute, (256, 128))
    x = torch.randn(64, 256)
    wanted = F.linear(x, weight, layer.bias)
    found = relative_error(layer(x), wanted)
    library = relative_error(F.linear(x, library_weight(weight, mode), layer.bias), wanted)
    assert library == pytest.approx(ERRORS[mode], rel=0.25)
    assert found <= math.hypot(library * 1.001, ROUNDING[compute] / 2)
    assert found > 0.95 * library  # it was quantised
    with torch.no_grad():
        evaluated = relative_error(layer.eval()(x), wanted)
    assert evaluated < 2 * ERRORS[mode]  # int8 rounds the inputs, too


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("mode", PATHS)
def test_outputs_and_gradients_are_those_of_the_weight_that_the_codes_stand_for(mode, compute):
    rounding = ROUNDING[compute]
    for train in (True, False):
        layer, _ = converted_layer(mode, compute, train=train)
        weight = represented_weight(layer)
        x = torch.randn(2, 3, 64).requires_grad_()
        output = layer(x)
        gradient = torch.randn_like(output)
        output.backward(gradient)
        rows = gradient.flatten(0, 1)
        input_rounding = 0.01 if "int8" in mode and not train else 0.0
        wanted = F.linear(x, weight, layer.bias)
        assert output.dtype is x.grad.dtype is layer.bias.grad.dtype is torch.float32
        assert relative_error(output, wanted) < rounding + input_rounding
        assert relative_error(x.grad, gradient @ weight) < rounding
        assert relative_error(layer.bias.grad, rows.sum(0)) < rounding
        if mode == "int8-training":
            assert relative_error(layer.weight.grad, rows.T @ x.flatten(0, 1)) < rounding


# On a CPU the library's own Linear4bit returns garbage at the first four: its kernel counts the
# blocks of 64 row by row, where the packing counts them through the whole weight.
@pytest.mark.parametrize("width", [16, 48, 80, 784, 128, 1, 7, 33, 100])
@pytest.mark.parametrize(("mode", "compute"), [("nf4", "float32"), ("fp4-dq", "bfloat16")])
def test_weights_of_every_width_are_unpacked_correctly(mode, width, compute):
    layer, weight = converted_layer(mode, compute, (width, 5))
    represented, rounding = represented_weight(layer), ROUNDING[compute]
    for train in (True, False):
        with torch.no_grad():
            found = layer.train(train)(torch.eye(width)) - layer.bias
        torch.testing.assert_close(found, represented.T, rtol=rounding * 2, atol=rounding * 4)
        assert relative_error(found.T, weight) < 0.2
    x = torch.zeros(2, width, requires_grad=True)
    layer(x).sum().backward()
    assert relative_error(x.grad, represented.sum(0).expand(2, -1)) < 4 * rounding


@pytest.mark.parametrize("mode", ["int8", "int8-training"])
@pytest.mark.parametrize(
    ("width", "size"), [*((width, 1) for width in (2, 7, 16, 48, 100)), (64, 1e6)]
)
def test_every_width_and_inputs_beyond_float16_work_in_int8(mode, width, size):
    """The library quantises by way of float16, whose largest number is 65504."""
    layer, weight = converted_layer(mode, widths=(width, 5))
    x = size * torch.randn(8, width)
    wanted = F.linear(x, weight, layer.bias)
    for train in (True, False):
        assert relative_error(layer.train(train)(x), wanted) < 0.03


@pytest.mark.parametrize("mode", PATHS)
def test_an_output_has_the_dtype_of_its_input(mode):
    layer, _ = converted_layer(mode, "bfloat16")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(2, 64, dtype=dtype, requires_grad=True)
        output = layer(x)
        output.sum().backward()
        assert (output.dtype, x.grad.dtype) == (dtype, dtype)


@pytest.mark.parametrize("mode", PATHS)
def test_float64_weights_are_quantised_to_the_right_numbers(mode):
    torch.manual_seed(0)
    layer = nn.Linear(64, 48).double()
    x = torch.randn(4, 64, dtype=torch.float64)
    wanted = layer(x)
    load(mode).convert(layer)
    output = layer(x)
    assert output.dtype is torch.float64
    assert relative_error(output, wanted) < 1.3 * ERRORS[mode]
    assert layer.bias.dtype is torch.float64


@pytest.mark.parametrize("mode", ["int8", "int8-training"])
def test_a_threshold_spares_the_other_columns_an_outlier(mode):
    """Without it the outlier sets the scale of its row, and the others round to steps of 1.6."""
    torch.manual_seed(0)
    plain, x = nn.Linear(64, 48), torch.randn(8, 64)
    plain.weight.data[:, 3] = 0.0
    x[:, 3] = 200.0
    errors = []
    for threshold in (0.0, 6.0):
        layer = copy.deepcopy(plain)
        load(mode, threshold=threshold).convert(layer)
        with torch.no_grad():
            errors.append(relative_error(layer.eval()(x), plain(x)))
    assert errors[1] < 0.02 < 0.2 < errors[0]


# Models


def test_a_gpt_is_converted_but_for_its_tied_head():
    model = GPT(11, 8, layers=2, heads=2, width=16)
    _, report = load("nf4").convert(model)
    layers = ("attention.qkv", "attention.projection", "expand", "contract")
    names = [f"blocks.{block}.{layer}" for block in (0, 1) for layer in layers]
    assert list(report.lines()) == [
        f"converted 8 of 10 layers, 6,144 of 6,448 matrix weights (95 %): {', '.join(names)}",
        "  skipped token_embedding, position_embedding (Embedding, 304 weights): an embedding is a "
        "lookup without a product",
        "  skipped head (Linear, counted with token_embedding): shares a parameter with "
        "token_embedding",
    ]
    model = GPT(11, 8, layers=2, heads=2, width=16)
    _, report = load("int8-training").convert(model)
    assert str(report) == "9/10"
    assert report.weight_counts == (6320, 6448)


@pytest.mark.parametrize("mode", ["int8", "int8-training"])
def test_a_layer_of_one_input_is_skipped_by_the_int8_modes(mode):
    model = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8))
    _, report = load(mode).convert(model)
    assert skip_reasons(report) == {"0": "has one input only", "1": ""}


# int8-training


def test_every_forward_sees_the_weight_of_its_step():
    layer, _ = converted_layer("int8-training")
    x = torch.randn(8, 64)
    # The library keeps its copy as long as there is a gradient.
    for set_to_none in (True, False, False):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
        optimizer.zero_grad(set_to_none=set_to_none)
        layer(x).sum().backward()
        before = layer.weight.detach().clone()
        optimizer.step()
        assert relative_error(before, layer.weight) > 0.1
        wanted = F.linear(x, represented_weight(layer), layer.bias)
        assert relative_error(layer.train()(x), wanted) < 1e-3  # a tie may round to either side
        layer.eval()
        with torch.no_grad():
            assert relative_error(layer(x), wanted) < 0.02
        assert relative_error(layer(x), wanted) < 0.02
        layer.train()


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_gradients_beyond_float16_pass(size):
    layer, _ = converted_layer("int8-training")
    x = torch.randn(8, 64, requires_grad=True)
    (size * layer(x)).sum().backward()
    columns = x.detach().sum(0).expand(48, 64)
    assert relative_error(layer.weight.grad / size, columns) < 1e-5
    assert relative_error(x.grad / size, represented_weight(layer).sum(0).expand(8, 64)) < 1e-5


def test_rows_of_very_different_size_keep_their_digits():
    layer = nn.Linear(64, 4, bias=False)
    layer.weight.data *= torch.tensor([1e-9, 1.0, 1e6, 0.0])[:, None]
    weight = layer.weight.detach().clone()
    load("int8").convert(layer)
    error = (represented_weight(layer) - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 253).all()


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("rows", [3, 8])
def test_the_gradient_of_a_weight_that_trains_is_not_quantised(rows, size):
    layer, _ = converted_layer("int8-training")
    x = torch.randn(rows, 64)
    grad = size * torch.randn(rows, layer.out_features)
    layer(x).backward(grad)
    assert torch.equal(layer.weight.grad, (x.t() @ grad).t())
