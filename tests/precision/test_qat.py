"""Quantisation-aware training, and the precisions that pack what it trained.

What holds for every kind of converted layer is in layers/test_layer_contract.py, the formats are in
layers/test_weight_formats.py, and whole commands in tests/e2e/test_quantised_runs.py.
"""

import copy

import pytest
import torch
from precision_models import load_precision, run_forward, skip_reasons, train_state
from torch import nn

from runner.core.base.errors import ConfigError
from runner.core.loop.step import train_step
from runner.core.policy.precision import ConversionPlan
from runner.precision.layers.quantized_linear import QuantizedLinear
from runner.training.adapters import Lora

FORMATS = ("int4", "int8", "nvfp4")
every_format = pytest.mark.parametrize("name", FORMATS)


def model_and_inputs(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 10))
    return model, torch.randn(2, 7, 64)


# Training sees what the packed layers compute


@every_format
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_forward_in_training_is_that_of_the_packed_model(name, compute):
    model, inputs = model_and_inputs()
    outputs = []
    for precision_name in (f"qat-{name}", name):
        precision = load_precision(precision_name, compute_dtype=compute)
        converted, _ = precision.convert(copy.deepcopy(model))
        with torch.no_grad():
            outputs.append(run_forward(precision, converted, inputs))
    if name == "int8":  # its products are summed as integers
        bound = {"float32": 1e-5, "bfloat16": 2**-5}[compute]
        assert outputs[0].allclose(outputs[1], rtol=bound, atol=bound)
    else:
        assert torch.equal(*outputs)
    with torch.no_grad():
        assert not torch.equal(outputs[0].float(), model(inputs))


def test_gradients_of_gradients_are_those_of_the_rounded_weights():
    """The second derivative of the forward in training is that of a plain layer whose weights are
    the rounded ones."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    precision = load_precision("qat-int4")
    model, _ = precision.convert(copy.deepcopy(plain))
    with torch.no_grad():
        for layer, rounded in ((plain[0], model[0]), (plain[2], model[2])):
            layer.weight.copy_(rounded.format.round_weight(rounded.weight))
    inputs = torch.randn(5, 32, requires_grad=True)
    grads = []
    for each in (plain, model):
        slope = torch.autograd.grad(each(inputs).sum(), inputs, create_graph=True)[0]
        slope.square().sum().backward()
        grads.append(each[0].weight.grad)
    assert grads[1].allclose(grads[0], rtol=1e-4, atol=1e-6)


# What is converted


def test_the_same_layers_are_rounded_and_packed_each_with_a_reason_where_not():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 64)
            self.odd, self.one = nn.Linear(60, 8), nn.Linear(1, 8)
            self.kept, self.ignored = nn.Linear(64, 8), nn.Linear(64, 8)
            self.body, self.head = nn.Linear(64, 8), nn.Linear(64, 10, bias=False)
            self.head.weight = self.embedding.weight
            self.attention = nn.MultiheadAttention(64, 2)

    wanted = {
        "embedding": "an embedding is a lookup without a product",
        "odd": "its input width 60 is not a multiple of precision.group_size=32",
        "one": "has one input only",
        "kept": "kept in float32 by precision.keep_fp32",
        "ignored": "named by precision.ignore_modules",
        "body": "",
        "head": "shares a parameter with embedding",
        "attention": "its packed in_proj_weight is read by F.multi_head_attention_forward",
        "attention.out_proj": "nn.MultiheadAttention reads its weight and never calls it",
    }
    for name in ("qat-int4", "int4"):
        precision = load_precision(name, keep_fp32=["kept"], ignore_modules=["ignored"])
        model, report = precision.convert(Net())
        assert skip_reasons(report) == wanted
        assert str(report) == "1/8"  # a shared weight counts once
        assert model.head.weight is model.embedding.weight
    assert isinstance(model.body, QuantizedLinear)
    plan = ConversionPlan(bypassed={"body": "the model passes its forward by"})
    _, report = load_precision("qat-int4").convert(Net(), plan=plan)
    assert skip_reasons(report)["body"] == "the model passes its forward by"


@every_format
def test_a_conversion_that_fits_no_layer_is_refused(name):
    if name == "int8":
        pytest.skip("int8 takes every input width but one")
    with pytest.raises(ConfigError, match="is not a multiple of"):
        load_precision(f"qat-{name}").convert(nn.Linear(7, 8))


@every_format
def test_packed_weights_take_the_bytes_of_their_codes_and_scales(name):
    """Of a weight [32, 64] by hand: codes, then scales."""
    layer, _ = load_precision(name).convert(nn.Linear(64, 32, bias=False))
    held = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))
    sizes = {"int4": 1024 + 32 * 2 * 4, "int8": 2048 + 32 * 4, "nvfp4": 1024 + 32 * 4 + 4}
    assert held == sizes[name]


# What others ask of a precision


@every_format
def test_each_precision_names_its_counterpart(name):
    packed, trained = load_precision(name), load_precision(f"qat-{name}")
    assert (trained.trains_for, trained.trained_in) == (name, "")
    assert (packed.trains_for, packed.trained_in) == ("", f"qat-{name}")
    assert (trained.freezes, packed.freezes) == (False, True)
    assert name in packed.storage_format
    assert trained.storage_format == "float32"
    assert name in trained.compute_format
    assert trained.formats == packed.formats == {}
    assert trained.emulated == packed.emulated == (name == "nvfp4")
    bfloat16 = load_precision(f"qat-{name}", compute_dtype="bfloat16")
    assert [*bfloat16.formats] == ["bfloat16"]


@pytest.mark.parametrize("name", ["qat-int4", "int4", "qat-int8", "int8", "qat-nvfp4", "nvfp4"])
def test_an_adapter_trains_over_rounded_and_over_packed_weights(name):
    precision = load_precision(name)
    model, _ = precision.convert(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    Lora(rank=4).add(model, torch.float32)
    frozen = {key: value.clone() for key, value in model.state_dict().items() if "lora" not in key}
    batch = torch.randn(64, 64), torch.randint(10, (64,))
    state = train_state(precision, model)
    losses = [train_step(state, [batch]).loss.item() for _ in range(30)]
    assert losses[-1] < 0.95 * losses[0]
    assert all(torch.equal(model.state_dict()[key], value) for key, value in frozen.items())


# Quality


def network(seed):
    """Return a small network with two hidden layers, of random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )


def batch_of(teacher, count, seed):
    """Return inputs and what another network makes of them."""
    inputs = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return inputs, teacher(inputs)


def trained_network(base, teacher, name, steps, rate):
    """Return the weights of a network after a training in a precision, in a plain network."""
    precision = load_precision(name)
    model, _ = precision.convert(copy.deepcopy(base))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(steps):
        inputs, target = batch_of(teacher, 64, seed=step)
        nn.functional.mse_loss(run_forward(precision, model, inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = copy.deepcopy(base)
    plain.load_state_dict(model.state_dict())
    return plain


def error_in(name, model, teacher):
    """Return a plain network's mean squared error on new inputs, in a precision."""
    precision = load_precision(name)
    converted, _ = precision.convert(copy.deepcopy(model))
    inputs, target = batch_of(teacher, 512, seed=10**6)
    with torch.no_grad():
        return nn.functional.mse_loss(run_forward(precision, converted, inputs), target).item()


def test_training_on_rounded_weights_recovers_what_packing_costs():
    teacher = network(seed=0)
    base = trained_network(network(seed=1), teacher, "32-true", 500, 3e-3)
    plain = trained_network(base, teacher, "32-true", 150, 1e-3)
    aware = trained_network(base, teacher, "qat-int4", 150, 1e-3)
    lost = error_in("int4", plain, teacher) - error_in("32-true", plain, teacher)
    recovered = error_in("int4", plain, teacher) - error_in("int4", aware, teacher)
    assert lost > 0.1 * error_in("32-true", plain, teacher)
    assert recovered > 0.3 * lost
