"""The bnb-* precisions on the library's CPU kernels: values, errors, gradients, training."""

import logging
import math
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.models.gpt import GPT
from runner.precision import registry
from runner.precision.bitsandbytes import BitsandbytesPrecision
from runner.precision.layers.linear_8bit import pack_int8
from runner.precision.loss_scale import NoLossScale
from runner.utils.errors import ConfigError, Unavailable

pytest.importorskip("runner.precision.layers.bnb_library")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FOUR = ("nf4", "nf4-dq", "fp4", "fp4-dq")
FROZEN = (*FOUR, "int8")
MODES = (*FROZEN, "int8-training")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A number rounds by 2**-9 or 2**-12 of it at most, the inputs and the weights and the outputs do.
ROUNDING = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}


def load(mode, compute="float32", **changes):
    return registry.load_precision(f"bnb-{mode}", compute_dtype=compute, **changes)


def convert(model, mode, compute="float32", **changes):
    load(mode, compute, **changes).convert(model)
    return model


def layer(mode, compute="float32", inside=64, outside=48, bias=True, train=True):
    """A converted layer and its weight before the conversion."""
    torch.manual_seed(0)
    plain = nn.Linear(inside, outside, bias=bias)
    nn.init.normal_(plain.weight)
    weight = plain.weight.detach().clone()
    return convert(plain, mode, compute).train(train), weight


def held(module):
    """The weight that a converted layer stands for, from its state dict by the formats' own
    definition: a code's value times its block's or row's largest magnitude."""
    from bitsandbytes.functional import dequantize_blockwise

    if module.weight.dtype is torch.int8:
        return module.weight.float() * module.SCB[:, None] / 127
    if module.weight.dtype is torch.float32:
        weight = module.weight.detach()
        largest = weight.abs().amax(1, keepdim=True)
        return (weight * (127 / largest)).round() * largest / 127
    state = module.weight.quant_state
    pairs, count = module.weight.data.flatten().long(), math.prod(state.shape)
    codes = torch.stack([pairs >> 4, pairs & 15], -1).flatten()[:count]
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    scales = scales.float().repeat_interleave(state.blocksize)[:count]
    return (state.code[codes] * scales).view(state.shape)


def error(made, want):
    return ((made - want).norm() / want.norm()).item()


# The config


@pytest.mark.parametrize("mode", MODES)
def test_there_is_a_yaml_for_each_mode(mode):
    precision = registry.load_precision(f"bnb-{mode}")
    assert (precision.name, precision.mode) == (f"bnb-{mode}", mode)
    assert (precision.storage, precision.compute) == (torch.float32, torch.bfloat16)
    assert precision.freezes == (mode != "int8-training")
    assert precision.layout == ("" if mode == "int8-training" else f"bnb-{mode}")
    assert isinstance(precision.scale(CPU), NoLossScale)


def refused(**changes):
    with pytest.raises(ConfigError) as error:
        BitsandbytesPrecision("x", **{"mode": "nf4", **changes})
    return error.value.problems


def test_every_value_that_cannot_work_is_named_in_one_error():
    assert refused(compute_dtype="float64") == (
        "precision.compute_dtype=float64: the kernels compute in bfloat16, float16, float32 only. "
        "Type one of them.",
    )
    assert refused(mode="nf8") == (
        "precision.mode=nf8 is not known. Allowed: nf4, nf4-dq, fp4, fp4-dq, int8, int8-training.",
    )
    assert refused(mode="int8", threshold=-1.0) == (
        "precision.threshold=-1.0 is negative. Allowed: 0 (none) and up.",
    )
    assert refused(threshold=6.0) == (
        "precision.threshold=6.0: nf4 has none. Type precision=bnb-int8, or leave it out.",
    )
    assert len(refused(mode="nf8", compute_dtype="int8", threshold=-1.0)) == 4
    assert "float32_matmul=tf32 is not known" in refused(float32_matmul="tf32")[0]
    assert "cpu_float16=fast is not known" in refused(cpu_float16="fast")[0]
    for mode in ("int8", "int8-training"):
        assert load(mode, threshold=6.0).threshold == 6.0


# What it needs


def test_it_runs_on_a_cpu_and_not_on_an_apple_gpu():
    for mode in MODES:
        load(mode).require(CPU)
    with pytest.raises(Unavailable) as error:
        load("nf4").require(torch.device("mps"))
    assert error.value.what == (
        "precision=bnb-nf4 needs a CPU or an NVIDIA GPU of compute capability 6.0 or higher; "
        "this run is on mps."
    )
    assert error.value.remedy == "Type accelerator=cpu, or precision=bf16-true."


def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "runner.precision.layers.bnb_library")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(Unavailable) as error:
        load("nf4").require(CPU)
    assert "precision=bnb-nf4 needs bitsandbytes, which does not import" in error.value.what
    assert error.value.remedy == 'Type pip install "bitsandbytes>=0.50".'


@pytest.mark.parametrize(
    ("mode", "capability", "least"),
    [
        ("nf4", (5, 2), "6.0"),
        ("nf4", (6, 0), ""),
        ("int8", (7, 0), "7.5"),
        ("int8", (7, 5), ""),
        ("int8-training", (7, 0), "7.5"),
        ("fp4-dq", (7, 0), ""),
    ],
)
def test_an_old_gpu_is_refused(monkeypatch, mode, capability, least):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old")
    if not least:
        load(mode).require(CUDA)
        return
    found = ".".join(map(str, capability))
    error = rf"needs compute capability {least} or higher; cuda:0 \(Old\) has {found}\. Nearest"
    with pytest.raises(Unavailable, match=error):
        load(mode).require(CUDA)


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
    with torch.no_grad(), precision.session(model, CPU), precision.forward(CPU):
        made = model(precision.cast(x)).float()
        rounded = model(precision.cast(x.bfloat16())).float()
    assert torch.equal(seen[0], normed)
    assert error(made, wanted) < (0.02 if "int8" in mode else 0.2)
    assert error(rounded, wanted) > 0.5


@pytest.mark.parametrize("compute", DTYPES)
def test_the_rest_of_the_model_is_under_autocast(compute):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = load("int8", compute, ignore_modules=["1"])
    precision.convert(model)
    for _ in range(2):
        with precision.forward(CPU):
            made = model(precision.cast(torch.ones(1, 4)))
        assert made.dtype is DTYPES[compute]
        assert not torch.is_autocast_enabled("cpu")
    assert model[1].weight.dtype is torch.float32


@pytest.mark.parametrize("choice", ["native", "float32_accumulate"])
def test_the_session_sets_the_float16_kernels_and_kernels_returns_them(choice):
    model = nn.Linear(2, 2)
    precision = load("nf4", "float16", cpu_float16=choice, float32_matmul="high")
    before = torch.get_float32_matmul_precision()
    with precision.session(model, CPU):
        assert precision.kernels() == choice
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    other = load("nf4", "bfloat16", cpu_float16=choice)
    with other.session(model, CPU):
        assert other.kernels() == ""


# The function


# On normal weights, of the library's own quantise and dequantise.
ERRORS = {
    "nf4": 0.093,
    "nf4-dq": 0.093,
    "fp4": 0.122,
    "fp4-dq": 0.122,
    "int8": 0.008,
    "int8-training": 0.008,
}


def roundtrip(weight, mode):
    """The library's own quantise and dequantise."""
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_quant, quantize_4bit

    if mode.startswith("int8"):
        codes, largest, _ = int8_vectorwise_quant(weight.half())
        return codes.float() * largest[:, None] / 127
    kind, _, nested = mode.partition("-")
    packed, state = quantize_4bit(weight, quant_type=kind, compress_statistics=bool(nested))
    return dequantize_4bit(packed, state)


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_the_error_at_initialisation_is_that_of_the_format(mode, compute):
    module, weight = layer(mode, compute, 1024, 256)
    x = torch.randn(64, 1024)
    want = F.linear(x, weight, module.bias)
    made = error(module(x), want)
    library = error(F.linear(x, roundtrip(weight, mode), module.bias), want)
    assert library == pytest.approx(ERRORS[mode], rel=0.08)
    assert made <= math.hypot(library * 1.001, ROUNDING[compute] / 2)
    assert made > 0.95 * library  # it was quantised


@pytest.mark.parametrize("mode", MODES)
def test_in_evaluation_the_error_stays_small(mode):
    module, weight = layer(mode, "float32", 1024, 256, train=False)
    x = torch.randn(64, 1024)
    with torch.no_grad():
        made = error(module(x), F.linear(x, weight, module.bias))
    assert made < 1.5 * ERRORS[mode]  # int8: the inputs are rounded, too


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("train", [True, False])
def test_outputs_and_gradients_are_those_of_the_weight_that_it_holds(mode, compute, shape, train):
    module, _ = layer(mode, compute, train=train)
    weight = held(module)
    x = torch.randn(*shape, 64).requires_grad_()
    made = module(x)
    grad = torch.randn_like(made)
    made.backward(grad)
    rough = ROUNDING[compute]
    inputs = 0.01 if "int8" in mode and not train else 0.0  # rounded to int8, too
    assert made.shape == (*shape, 48)
    assert made.dtype is x.grad.dtype is module.bias.grad.dtype is torch.float32
    assert error(made, F.linear(x, weight, module.bias)) < rough + inputs
    assert error(x.grad, grad @ weight) < rough
    assert error(module.bias.grad, grad.flatten(0, -2).sum(0)) < rough
    if mode == "int8-training" and train:
        assert error(module.weight.grad, grad.flatten(0, -2).T @ x.flatten(0, -2)) < rough
    elif mode in FROZEN:
        assert not module.weight.requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_without_a_bias_and_with_a_frozen_one_and_with_frozen_inputs(mode):
    module, _ = layer(mode, bias=False)
    x = torch.randn(3, 64, requires_grad=True)
    module(x).sum().backward()
    assert error(x.grad, held(module).sum(0).expand(3, 64)) < 1e-5
    module, _ = layer(mode)
    module(x.detach()).sum().backward()
    assert torch.equal(module.bias.grad, torch.full((48,), 3.0))
    module, _ = layer(mode)
    module.bias.requires_grad_(False)
    module(x).sum().backward()
    assert module.bias.grad is None


@pytest.mark.parametrize("mode", MODES)
def test_zero_rows_pass(mode):
    for shape in ((0, 64), (2, 0, 64)):
        for train in (True, False):
            module, _ = layer(mode, train=train)
            x = torch.zeros(shape, requires_grad=True)
            made = module(x)
            made.sum().backward()
            assert made.shape == (*shape[:-1], 48)
            assert x.grad.shape == shape
            assert torch.equal(module.bias.grad, torch.zeros(48))


# On a CPU the library's own Linear4bit returns garbage at the first four: its kernel counts the
# blocks of 64 row by row, where the packing counts them through the whole weight.
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("inside", [16, 48, 80, 784, 128, 1, 7, 33, 100])
@pytest.mark.parametrize("mode", FOUR)
def test_every_width_is_unpacked_rightly(mode, inside, compute):
    module, weight = layer(mode, compute, inside, 6)
    for train in (True, False):
        module.train(train)
        with torch.no_grad():
            made = module(torch.eye(inside)) - module.bias
        torch.testing.assert_close(
            made, held(module).T, rtol=ROUNDING[compute] * 2, atol=ROUNDING[compute] * 4
        )
        assert error(made.T, weight) < 0.2
    x = torch.zeros(2, inside, requires_grad=True)
    module(x).sum().backward()
    assert error(x.grad, held(module).sum(0).expand(2, -1)) < 4 * ROUNDING[compute]


def test_an_odd_number_of_weights_is_unpacked_rightly():
    module, _ = layer("nf4-dq", inside=13, outside=5)
    made = module(torch.eye(13)) - module.bias
    torch.testing.assert_close(made, held(module).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["int8", "int8-training"])
@pytest.mark.parametrize("inside", [2, 7, 16, 48, 100])
def test_every_width_works_in_int8(mode, inside):
    module, weight = layer(mode, inside=inside, outside=5)
    x = torch.randn(3, inside)
    want = F.linear(x, weight, module.bias)
    for train in (True, False):
        assert error(module.train(train)(x), want) < 0.03


@pytest.mark.parametrize("mode", MODES)
def test_training_evaluation_and_training_again_agree(mode):
    module, _ = layer(mode)
    x = torch.randn(4, 64)
    first = module(x)
    with torch.no_grad():
        second = module.eval()(x)
    third = module.train()(x)
    assert torch.equal(first, third)
    assert error(second, first) < 0.02
    third.sum().backward()
    assert module.bias.grad is not None


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_a_trainable_bias_keeps_its_dtype_and_its_object(mode, compute):
    module, _ = layer(mode, compute)
    bias, value = module.bias, module.bias.detach().clone()
    for train in (True, False):
        module.train(train)(torch.randn(2, 64))
    assert module.bias is bias
    assert (bias.dtype, bias.requires_grad) == (torch.float32, True)
    assert torch.equal(bias, value)


@pytest.mark.parametrize("mode", MODES)
def test_an_output_has_the_dtype_of_its_input(mode):
    module, _ = layer(mode, "bfloat16")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(2, 64, dtype=dtype, requires_grad=True)
        made = module(x)
        made.sum().backward()
        assert (made.dtype, x.grad.dtype) == (dtype, dtype)


@pytest.mark.parametrize("mode", MODES)
def test_float64_weights_are_quantised_to_the_right_numbers(mode):
    torch.manual_seed(0)
    module = nn.Linear(64, 48).double()
    x = torch.randn(4, 64, dtype=torch.float64)
    want = module(x)
    convert(module, mode)
    made = module(x)
    assert made.dtype is torch.float64
    assert error(made, want) < 1.2 * ERRORS[mode]
    assert module.bias.dtype is torch.float64


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_says_nothing(mode, caplog, capfd):
    module, _ = layer(mode, "bfloat16")
    with caplog.at_level(logging.INFO):
        module(torch.randn(2, 64))
        module.eval()(torch.randn(2, 64))
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


# Models


def test_a_gpt_is_converted_but_for_its_tied_head():
    model = GPT(11, 8, layers=2, heads=2, width=16)
    _, report = load("nf4").convert(model)
    assert list(report.lines()) == [
        "converted 8 of 10 layers, 6,144 of 6,448 matrix weights (95 %): "
        + ", ".join(
            f"blocks.{i}.{n}"
            for i in (0, 1)
            for n in ("attention.qkv", "attention.projection", "expand", "contract")
        ),
        "  skipped token_embedding, position_embedding (Embedding, 304 weights): an embedding is a "
        "lookup without a product",
        "  skipped head (Linear, counted with token_embedding): shares a parameter with "
        "token_embedding",
    ]
    assert model.head.weight is model.token_embedding.weight
    model = GPT(11, 8, layers=2, heads=2, width=16)
    weight = model.head.weight
    _, report = load("int8-training").convert(model)
    assert str(report) == "9/10"
    assert report.weight_counts == (6320, 6448)
    assert model.head.weight is model.token_embedding.weight is weight
    tokens = torch.arange(8)[None]
    model(tokens).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("mode", MODES)
def test_what_trains_is_the_same_but_for_packed_weights(mode):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    model[0].bias.requires_grad_(False)
    before = dict(model.named_parameters())
    convert(model, mode, ignore_modules=["2"])
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    replaced = [name for name in before if before[name] is not after[name]]
    frozen = [name for name in after if not after[name].requires_grad]
    assert replaced == ([] if mode == "int8-training" else ["0.weight"])
    assert frozen == [*replaced, "0.bias"]


@pytest.mark.parametrize("mode", FROZEN)
def test_a_hook_on_a_weight_is_refused_and_on_the_module_it_fires(mode):
    model, seen = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), []
    model[1].weight.register_hook(lambda grad: grad)
    with pytest.raises(ConfigError, match=r"a hook hangs on that of 1\. Type precision\.ign"):
        convert(model, mode)
    assert type(model[0]) is nn.Linear
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    convert(model, mode, ignore_modules=["1"])
    model(torch.ones(1, 16))
    handle.remove()
    model(torch.ones(1, 16))
    assert seen == [1]


def test_a_second_conversion_is_refused_and_a_mixed_model_names_its_converted_layers():
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), "nf4", ignore_modules=["1"])
    before = model[0].weight
    _, report = load("int8").convert(model)
    assert [(r.module, r.done, r.why) for r in report.modules] == [
        ("0", False, "is a Linear4bit already"),
        ("1", True, ""),
    ]
    assert model[0].weight is before
    with pytest.raises(ConfigError, match=r"nothing.*0 \(Linear4bit\): is a Linear4bit already; 1"):
        load("fp4").convert(model)
    other = convert(nn.Sequential(nn.Linear(16, 4)), "int8-training")
    with pytest.raises(ConfigError, match="is a Linear8bitTrained already"):
        load("nf4").convert(other)


@pytest.mark.parametrize("mode", MODES)
def test_islands_compute_in_float32(mode):
    model, seen = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), []
    precision = load(mode, "bfloat16", keep_fp32=["1"])
    _, report = precision.convert(model)
    assert report.modules[1].why == "kept in float32 by precision.keep_fp32"
    weight = model[1].weight.detach().clone()
    with precision.forward(CPU):
        hidden = model[0](torch.randn(2, 16).bfloat16())
        seen.append(hidden.dtype)
        made = model[1](hidden)
    assert seen == [torch.bfloat16]
    assert torch.equal(made, F.linear(hidden.float(), weight, model[1].bias))


def test_weights_of_a_dtype_that_no_kernel_takes_are_skipped():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.LazyLinear(4), nn.Linear(4, 4))
    _, report = load("nf4").convert(model)
    assert [row.done for row in report.modules] == [False, False, True]


@pytest.mark.parametrize("mode", FOUR)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_an_encoder_layer_works_in_training_and_in_evaluation(mode, compute):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    want = model(x).detach()
    precision = load(mode, compute)
    _, report = precision.convert(model)
    assert str(report) == "2/4"
    for train in (True, False):
        model.train(train)
        with precision.forward(CPU):
            made = model(x)
            with torch.no_grad():
                again = model(x)
        assert 0.005 < error(made, want) < 0.1  # its feed-forward part is quantised
        assert error(again, made) < 0.01
    made.sum().backward()
    assert model.self_attn.in_proj_weight.grad is not None


@pytest.mark.parametrize("mode", ["int8", "int8-training"])
def test_an_encoder_layer_works_in_int8_training(mode):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    want = model(x).detach()
    convert(model, mode)
    made = model(x)
    assert 0.0005 < error(made, want) < 0.01
    made.square().sum().backward()
    assert model.self_attn.out_proj.weight.grad is not None


# int8-training


def test_every_forward_sees_the_weight_of_its_step():
    module, _ = layer("int8-training")
    x = torch.randn(8, 64)
    for set_to_none in (True, False, False):  # the library keeps its copy while a gradient is held
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        optimizer.zero_grad(set_to_none=set_to_none)
        module(x).sum().backward()
        before = module.weight.detach().clone()
        optimizer.step()
        assert error(before, module.weight) > 0.1
        want = F.linear(x, held(module), module.bias)
        assert error(module.train()(x), want) < 1e-3  # a tie may round to either side
        module.eval()
        with torch.no_grad():
            assert error(module(x), want) < 0.02
        assert error(module(x), want) < 0.02
        module.train()


def test_an_evaluation_sees_weights_that_were_just_loaded():
    module, _ = layer("int8-training")
    x = torch.randn(8, 64)
    module(x).sum().backward()
    module.eval()
    other = nn.Linear(64, 48)
    module.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert error(module(x), other(x)) < 0.02
    assert error(module(x), other(x)) < 0.02
    assert error(module.train()(x), other(x)) < 0.02


def test_a_layer_that_stays_in_evaluation_mode_trains_too():
    module, _ = layer("int8-training", train=False)
    x = torch.randn(8, 64, requires_grad=True)
    module(x).sum().backward()
    assert error(x.grad, held(module).sum(0).expand(8, 64)) < 1e-5
    assert error(module.weight.grad, x.detach().sum(0).expand(48, 64)) < 1e-5


def test_inputs_weights_and_gradients_beyond_float16_pass():
    """The library quantises by way of float16, whose largest number is 65504."""
    for mode in ("int8", "int8-training"):
        module, weight = layer(mode)
        x = 1e6 * torch.randn(8, 64)
        for train in (True, False):
            with torch.no_grad():
                assert error(module.train(train)(x), F.linear(x, weight, module.bias)) < 0.03
    module, _ = layer("int8-training")
    x = torch.randn(8, 64, requires_grad=True)
    for size in (1e-9, 1e9):
        module.weight.grad = x.grad = None
        (size * module(x)).sum().backward()
        assert error(module.weight.grad / size, x.detach().sum(0).expand(48, 64)) < 1e-5
        assert error(x.grad / size, held(module).sum(0).expand(8, 64)) < 1e-5


def test_rows_of_very_different_size_keep_their_digits():
    plain = nn.Linear(64, 4, bias=False)
    plain.weight.data *= torch.tensor([1e-9, 1.0, 1e6, 0.0])[:, None]
    weight = plain.weight.detach().clone()
    load("int8").convert(plain)
    assert ((held(plain) - weight).abs() <= weight.abs().amax(1, keepdim=True) / 253).all()


def test_gradients_accumulate_to_those_of_the_whole():
    halves, _ = layer("int8-training")
    whole, _ = layer("int8-training")
    x = torch.randn(8, 64)
    for part in (x[:4], x[4:]):
        halves(part).square().sum().backward()
    whole(x).square().sum().backward()
    assert error(halves.weight.grad, whole.weight.grad) < 1e-5
    assert error(halves.bias.grad, whole.bias.grad) < 1e-5


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("rows", [(16,), (4, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_training_lowers_the_loss(mode, rows, compute):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    precision = load(mode, compute)
    precision.convert(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.03)
    x, target, losses = torch.randn(*rows, 16), torch.randn(*rows, 4), []
    for _ in range(30):
        with precision.forward(CPU):
            made = model(precision.cast(x))
        loss = F.mse_loss(made.float(), target)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < (0.2 if mode == "int8-training" else 0.95) * losses[0]


@pytest.mark.parametrize("name", ["bnb-nf4", "float8-rowwise"])
def test_a_refusal_makes_no_island(name):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with pytest.raises(ConfigError, match="zz matches no module"):
        registry.load_precision(name, keep_fp32=["0"], ignore_modules=["zz"]).convert(model)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear]


def test_a_vector_has_a_gradient():
    layer = nn.Linear(8, 6)
    load("nf4").convert(layer)
    layer(torch.ones(8)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.ones(6))


@pytest.mark.parametrize("mode", ["int8", "int8-training"])
def test_a_layer_of_one_input_is_skipped_by_the_int8_modes(mode):
    model = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8))
    _, report = load(mode).convert(model)
    assert [row.why for row in report.modules] == ["has one input only", ""]


def test_a_library_without_its_kernels_is_refused(monkeypatch):
    monkeypatch.setattr("runner.precision.layers.bnb_library.lib", type("LibraryMock", (), {})())
    with pytest.raises(Unavailable, match="does not load") as error:
        load("nf4").require(CPU)
    assert error.value.remedy.startswith("Type python -m bitsandbytes")


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_a_product_within_float16_has_the_gradients_of_the_plain_one(size):
    """On a GPU, where the library quantises gradients by way of float16; here it does not."""
    from runner.precision.layers.bnb_library import bnb
    from runner.precision.layers.linear_8bit import int8_product

    rows, weight = torch.randn(8, 64), torch.randn(48, 64)
    made, gradients = [], []
    for scaled in (True, False):
        x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        state = bnb.MatmulLtState()
        state.CB, state.SCB = pack_int8(w)
        state.is_training, state.has_fp16_weights = True, False
        out = int8_product(x, w, state) if scaled else bnb.matmul(x, w, state=state)
        (size * out).sum().backward()
        made.append(out)
        gradients += [x.grad, w.grad]
    assert error(made[0], made[1]) < 1e-6
    assert error(gradients[0], gradients[2]) < 1e-6
    assert error(gradients[1], gradients[3]) < 1e-6
