"""torchao's MXFP8 training, emulated: the layer computes what torchao's own conversion computes.

What holds for every kind of converted layer is in test_layer_contract.py.
"""

import copy

import pytest
import torch
from precision_models import CPU, load_precision, skip_reasons, values_of_many_magnitudes
from torch import nn
from torch.nn import functional as F

from runner.core.base.terminal import suppress_warnings
from runner.precision.emulation.formats import E4M3, BlockQuantizer, exponent_scale

with suppress_warnings():
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
    from torchao.quantization import quantize_

CONFIG = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
WGRAD_WITH_HP = "mxfp8_rceil_wgrad_with_hp"


class Block(nn.Module):
    """A transformer block of 32 numbers, without biases in its linear layers."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96, bias=False)
        self.into, self.out = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.out(F.gelu(self.into(self.norm(x))))


def mlp():
    return nn.Sequential(nn.Linear(32, 96, bias=False), nn.ReLU(), nn.Linear(96, 32, bias=False))


def transformer():
    return nn.Sequential(Block(), Block())


class Titan(nn.Linear):
    """torchao's own layer on a copy of the weight in bfloat16, as FSDP gathers it for torchtitan,
    and on rows that are padded by hand."""

    def forward(self, x):
        rows = x.bfloat16().flatten(0, -2)
        gathered = nn.Linear(*self.weight.shape[::-1], bias=False, dtype=torch.bfloat16)
        gathered.weight.data.copy_(self.weight.data)
        quantize_(gathered, CONFIG)
        gathered.weight.register_hook(self.take_gradient)
        output = gathered(F.pad(rows, (0, 0, 0, -len(rows) % 32)))[: len(rows)]
        return output.unflatten(0, x.shape[:-1])

    def take_gradient(self, gradient):
        self.weight.grad = gradient.to(self.weight.dtype)


def torchaos_own(model, weights, rows):
    """Return a model converted by torchao."""
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    if weights == "bfloat16" and rows % 32 == 0:
        quantize_(model.bfloat16(), CONFIG, filter_fn=lambda module, _: module in linear)
        assert isinstance(linear[0].weight, MXFP8TrainingWeightWrapperTensor)
        return model
    for module in linear:
        module.__class__ = Titan
    return model.to(getattr(torch, weights))


def steps(precision, model, x):
    """Return the losses of three steps, and all gradients."""
    seen = []
    for _ in range(3):
        inputs = x.clone().requires_grad_()
        with precision.session(model, CPU), precision.forward(CPU):
            loss = model(precision.cast(inputs)).float().square().mean()
        loss.backward()
        seen += [loss.detach(), inputs.grad]
        for parameter in model.parameters():
            seen.append(parameter.grad)
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    return seen


# Multiples of 32 rows, a partial batch, one row, and inputs of three dimensions.
@pytest.mark.parametrize("shape", [(64, 32), (33, 32), (1, 32), (4, 8, 32), (3, 11, 32)])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [mlp, transformer])
def test_losses_and_gradients_are_torchaos_bit_by_bit(make, weights, shape):
    torch.manual_seed(0)
    plain, x = make(), torch.randn(shape)
    precision = load_precision("torchao-mxfp8", weights=weights)
    reference = torchaos_own(copy.deepcopy(plain), weights, x.numel() // 32)
    ours, _ = precision.convert(plain)
    wanted, found = steps(precision, reference, x), steps(precision, ours, x)
    assert len({loss.item() for loss in wanted if not loss.ndim}) == 3
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_is_added_and_trained(bias):
    torch.manual_seed(0)
    precision, layer = load_precision("torchao-mxfp8"), nn.Linear(32, 64, bias=bias)
    x = torch.randn(5, 32)
    with precision.forward(CPU):
        output = precision.convert(layer)[0](x)
        product = layer._product(x.bfloat16())
    assert torch.equal(output, product + layer.bias.bfloat16() if bias else product)
    output.sum().backward()
    assert not bias or layer.bias.grad.eq(5).all()


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", WGRAD_WITH_HP])
def test_the_weight_gradient_is_bfloat16s_in_the_hp_recipe_only(recipe):
    torch.manual_seed(0)
    precision = load_precision("torchao-mxfp8", recipe=recipe, weights="bfloat16")
    layer, _ = precision.convert(nn.Linear(64, 32))
    x, gradient = torch.randn(32, 64).bfloat16(), torch.randn(32, 32).bfloat16()
    layer(x).backward(gradient)
    assert torch.equal(layer.weight.grad, gradient.t() @ x) == (recipe == WGRAD_WITH_HP)


def test_scales_are_rounded_as_transformer_engines_are():
    x = values_of_many_magnitudes(64, 96).bfloat16()
    torchaos = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    quantized = BlockQuantizer(E4M3, exponent_scale, (1, 32))(x.float())
    assert torch.equal(torchaos.dequantize(torch.float32), quantized)


def test_each_layer_is_converted_or_has_a_reason():
    model = nn.ModuleDict({"fits": nn.Linear(96, 32), "odd": nn.Linear(32, 48)})
    _, report = load_precision("torchao-mxfp8").convert(model)
    reason = "its shape 32 -> 48 is not in multiples of 32"
    assert skip_reasons(report) == {"fits": "", "odd": reason}
