"""Which weights strategy.param_dtype=compute gathers in half precision, and that no bit changes."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from runner.distributed.ddp import DDP
from runner.distributed.fsdp import FSDP
from runner.precision.gathered_weights import (
    CONVOLUTIONS,
    autocast_dtype,
    check_strategy_dtypes,
    find_narrow_weights,
    gathers_several_dtypes,
)
from runner.precision.registry import load_precision, precision_names
from runner.utils.errors import ConfigError, Unavailable

CPU = torch.device("cpu")
BF16 = load_precision("bf16-mixed")


def narrow_names(model, precision=BF16):
    ids = find_narrow_weights(model, precision, CPU).ids
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def layer_and_inputs(kind):
    if kind is nn.Linear:
        return nn.Linear(8, 8), torch.randn(4, 8)
    dimensions = int(kind.__name__[-2])
    return kind(3, 4, 3), torch.randn(2, 3, *[6] * dimensions)


@pytest.mark.parametrize("kind", [nn.Linear, *CONVOLUTIONS])
@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_a_layer_with_rounded_weights_computes_the_same(kind, name):
    precision = load_precision(name)
    torch.manual_seed(0)
    layer, inputs = layer_and_inputs(kind)
    found = []
    with precision.session(layer, CPU):
        for dtype in (torch.float32, precision.compute):
            layer = deepcopy(layer).to(dtype)
            layer.zero_grad()
            leaf = inputs.clone().requires_grad_()
            with precision.forward(CPU):
                output = layer(leaf)
            output.float().square().sum().backward()
            gradients = [parameter.grad.float() for parameter in layer.parameters()]
            found.append([output, leaf.grad, *gradients])
    for wide, narrow in zip(*found, strict=True):
        assert wide.dtype == narrow.dtype
        assert torch.equal(wide, narrow)


def test_norms_embeddings_and_shared_weights_stay_in_float32():
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(8, 4),
            "norm": nn.LayerNorm(4),
            "layer": nn.Linear(4, 4),
            "head": nn.Linear(4, 8),
        }
    )
    model.head.weight = model.embedding.weight
    assert narrow_names(model) == {"layer.weight", "layer.bias", "head.bias"}


def test_islands_stay_in_float32():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    precision = load_precision("bf16-mixed", keep_fp32=["1"])
    precision.convert(model)
    assert narrow_names(model, precision) == {"0.weight", "0.bias"}


def test_weights_that_torch_reads_past_the_layers_stay_in_float32():
    model = nn.ModuleDict(
        {
            "layer": nn.Linear(8, 8),
            "attention": nn.MultiheadAttention(8, 2),
            "block": nn.TransformerEncoderLayer(8, 2, 16),
            "subclass": type("Own", (nn.Linear,), {})(8, 8),
        }
    )
    assert narrow_names(model) == {"layer.weight", "layer.bias"}


def float8_model(name, **options):
    """Return a model with a converted layer, one that is too narrow, and two that share a weight
    with an embedding and with each other."""
    model = nn.ModuleDict(
        {
            "wide": nn.Linear(16, 32),
            "narrow": nn.Linear(16, 3),
            "embedding": nn.Embedding(32, 16),
            "head": nn.Linear(16, 32),
            "tied": nn.Linear(16, 32),
        }
    )
    model.head.weight = model.embedding.weight
    model.tied.weight = model.wide.weight
    precision = load_precision(name, emulate=True, **options)
    precision.convert(model)
    return model, precision


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_fp8_layers_with_one_scale_are_gathered_in_fp8(weights):
    model, precision = float8_model("float8-tensorwise", weights=weights)
    narrow = find_narrow_weights(model, precision, CPU)
    assert {id(layer.weight) for layer in narrow.float8_layers} == {id(model.wide.weight)}
    assert narrow.float8_elements == 16 * 32
    is_mixed = weights == "float32"
    assert narrow_names(model, precision) == (
        {"narrow.weight", "narrow.bias"} if is_mixed else set()
    )


def test_fp8_layers_with_scales_by_row_are_gathered_as_stored():
    model, precision = float8_model("float8-rowwise")
    assert not find_narrow_weights(model, precision, CPU).float8_layers
    assert narrow_names(model, precision) == {"narrow.weight", "narrow.bias"}
    del model["narrow"]
    with pytest.raises(ConfigError, match="In FP8 nothing can be: the backward of a rowwise"):
        find_narrow_weights(model, precision, CPU)


@pytest.mark.skipif(
    not gathers_several_dtypes(),
    reason="torch 2.15 is missing, whose FSDP gathers the weights of a unit in several dtypes",
)
def test_the_precisions_with_float32_weights_under_autocast_can_be_gathered_narrow():
    strategy = FSDP(param_dtype="compute")
    found = set()
    for name in precision_names():
        precision = load_precision(name)
        try:
            precision.require_strategy(strategy)
            check_strategy_dtypes(strategy, precision, CPU)
        except (ConfigError, Unavailable):
            continue
        found.add(name)
    float8 = {"float8-tensorwise", "float8-rowwise", "float8-rowwise-hp"}
    packed = {name for name in precision_names() if name.startswith("bnb-")}
    assert found == {"16-mixed", "bf16-mixed", *packed, *float8}
    assert autocast_dtype(load_precision("32-true"), CPU) is None
    assert autocast_dtype(load_precision("16-mixed"), CPU) is torch.float16


def test_strategies_without_the_keys_are_not_asked():
    check_strategy_dtypes(DDP(), load_precision("64-true"), CPU)


def test_an_older_torch_is_refused(monkeypatch):
    monkeypatch.setattr("runner.precision.gathered_weights.fields", lambda _: ())
    with pytest.raises(Unavailable, match=r"needs torch 2\.15 or newer"):
        check_strategy_dtypes(FSDP(param_dtype="compute"), BF16, CPU)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"param_dtype": "bf16"}, "param_dtype=bf16 is not known. Allowed: null, compute"),
        (
            {"reduce_dtype": "float16"},
            "reduce_dtype=float16 is not known. Allowed: null, float32, bfloat16",
        ),
    ],
)
def test_values_that_are_not_known_are_refused(values, text):
    with pytest.raises(ValueError, match=text):
        FSDP(**values)
