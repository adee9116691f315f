"""The bnb-* precisions on the library's CPU kernels: values, errors and gradients.

What holds for every kind of converted layer is in layers/test_layer_contract.py.
"""

import math

import pytest
import torch
from precision_models import CPU, load_precision, relative_error, run_forward, skip_reasons
from torch import nn
from torch.nn import functional as F

from runner.models.gpt import GPT
from runner.precision.loss_scale import NoLossScale
from runner.utils.errors import ConfigError

pytest.importorskip("runner.precision.layers.bnb_library")

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

    if layer.weight.dtype is torch.int8:
        return layer.weight.float() * layer.SCB[:, None] / 127
    if layer.weight.dtype is torch.float32:
        weight = layer.weight.detach()
        largest = weight.abs().amax(1, keepdim=True)
        return (weight * (127 / largest)).round() * largest / 127
    state = layer.weight.quant_state
    pairs, count = layer.weight.data.flatten().long(), math.prod(state.shape)
    codes = torch.stack([pairs >> 4, pairs & 15], -1).flatten()[:count]
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    scales = scales.float().repeat_interleave(state.blocksize)[:count]
    return (state.code[codes] * scales).view(state.shape)


@pytest.mark.parametrize("mode", MODES)
def test_there_is_a_yaml_for_each_mode(mode):
    precision = load_precision(f"bnb-{mode}")
    assert (precision.name, precision.mode) == (f"bnb-{mode}", mode)
    assert (precision.storage, precision.compute) == (torch.float32, torch.bfloat16)
    assert precision.freezes == (mode != "int8-training")
    assert precision.layout == ("" if mode == "int8-training" else f"bnb-{mode}")
    assert isinstance(precision.scale(CPU), NoLossScale)


@pytest.mark.parametrize("mode", ["int8", "int8-training"])
def test_int8_takes_a_threshold(mode):
    assert load(mode, threshold=6.0).threshold == 6.0


# The contexts


@pytest.mark.parametrize("compute", DTYPES)
def test_inputs_stay_as_they_are_but_for_float64(compute):
    batch = {"x": torch.ones(2), "n": torch.ones(2).long(), "wide": torch.ones(2).double()}
    cast = load("nf4", compute).cast(batch)
    dtypes = [value.dtype for value in cast.values()]
    assert dtypes == [torch.float32, torch.int64, torch.float32]
    assert cast["x"] is batch["x"]


@pytest.mark.parametrize("mode", ["nf4", "int8", "int8-training"])
def test_an_island_at_the_front_takes_float32_inputs(mode):
    """A norm of inputs far from 0 is where a rounded input shows: 1000 has steps of 4 in bfloat16,
    and the inputs' own spread is 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    x = 1000 + torch.randn(32, 64)
    with torch.no_grad():
        normed, wanted = model[0](x), model(x)
    precision = load(mode, "bfloat16", keep_fp32=["0"])
    precision.convert(model)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        found = run_forward(precision, model, x)
        rounded = run_forward(precision, model, x.bfloat16())
    assert torch.equal(seen[0], normed)
    assert relative_error(found, wanted) < (0.02 if "int8" in mode else 0.2)
    assert relative_error(rounded, wanted) > 0.5


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
@pytest.mark.parametrize("width", [2, 7, 16, 48, 100])
def test_every_width_works_in_int8(mode, width):
    layer, weight = converted_layer(mode, widths=(width, 5))
    x = torch.randn(3, width)
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


def test_layers_of_another_packing_stay_and_are_named():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    load("nf4", ignore_modules=["1"]).convert(model)
    weight = model[0].weight
    _, report = load("int8").convert(model)
    assert skip_reasons(report) == {"0": "is a Linear4bit already", "1": ""}
    assert model[0].weight is weight
    with pytest.raises(ConfigError, match=r"nothing.*0 \(Linear4bit\): is a Linear4bit already; 1"):
        load("fp4").convert(model)


def test_weights_of_a_dtype_that_no_kernel_takes_are_skipped():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.LazyLinear(4), nn.Linear(4, 4))
    _, report = load("nf4").convert(model)
    assert [row.done for row in report.modules] == [False, False, True]


@pytest.mark.parametrize("mode", ["int8", "int8-training"])
def test_a_layer_of_one_input_is_skipped_by_the_int8_modes(mode):
    model = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8))
    _, report = load(mode).convert(model)
    assert skip_reasons(report) == {"0": "has one input only", "1": ""}


@pytest.mark.parametrize("mode", ["nf4", "int8", "int8-training"])
def test_an_encoder_layer_trains(mode):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    wanted = model(x).detach()
    _, report = load(mode).convert(model)
    assert str(report) == "2/4"
    output = model(x)
    assert 0.0005 < relative_error(output, wanted) < 0.1  # its feed-forward part is quantised
    output.square().sum().backward()
    assert model.self_attn.in_proj_weight.grad.any()


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


def test_an_evaluation_sees_weights_that_were_just_loaded():
    layer, _ = converted_layer("int8-training")
    x = torch.randn(8, 64)
    layer(x).sum().backward()
    layer.eval()
    other = nn.Linear(64, 48)
    layer.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert relative_error(layer(x), other(x)) < 0.02
    assert relative_error(layer(x), other(x)) < 0.02
    assert relative_error(layer.train()(x), other(x)) < 0.02


@pytest.mark.parametrize("mode", ["int8", "int8-training"])
def test_inputs_beyond_float16_pass(mode):
    """The library quantises by way of float16, whose largest number is 65504."""
    layer, weight = converted_layer(mode)
    x = 1e6 * torch.randn(8, 64)
    wanted = F.linear(x, weight, layer.bias)
    for train in (True, False):
        with torch.no_grad():
            assert relative_error(layer.train(train)(x), wanted) < 0.03


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


def test_gradients_accumulate_to_those_of_the_whole():
    halves, _ = converted_layer("int8-training")
    whole, _ = converted_layer("int8-training")
    x = torch.randn(8, 64)
    for part in (x[:4], x[4:]):
        halves(part).square().sum().backward()
    whole(x).square().sum().backward()
    assert relative_error(halves.weight.grad, whole.weight.grad) < 1e-5
    assert relative_error(halves.bias.grad, whole.bias.grad) < 1e-5


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_a_product_within_float16_has_the_gradients_of_the_plain_one(size):
    """On a GPU, where the library quantises gradients by way of float16; here it does not."""
    from runner.precision.layers.bnb_library import bnb
    from runner.precision.layers.bnb_linear import int8_product, pack_int8

    def gradients(product):
        x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        state = bnb.MatmulLtState()
        state.CB, state.SCB = pack_int8(w)
        state.is_training, state.has_fp16_weights = True, False
        output = product(x, w, state)
        (size * output).sum().backward()
        return output, x.grad, w.grad

    rows, weight = torch.randn(8, 64), torch.randn(48, 64)
    scaled = gradients(int8_product)
    plain = gradients(lambda x, w, state: bnb.matmul(x, w, state=state))
    for one, other in zip(scaled, plain, strict=True):
        assert relative_error(one, other) < 1e-6
