"""bitsandbytes' CUDA kernels at the widths and rows that their CPU twins are tested at."""

import pytest
import torch
from precision_models import load_or_skip
from torch import nn
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    # bitsandbytes says that it takes a slower kernel, torch's compiler imports a deprecated module.
    pytest.mark.filterwarnings("ignore:inner dimension:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]
DEVICE = torch.device("cuda", 0)
BOUND = {
    "nf4": 0.15,
    "nf4-dq": 0.15,
    "fp4": 0.2,
    "fp4-dq": 0.2,
    "int8": 0.03,
    "int8-training": 0.03,
}


@pytest.mark.imitated
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("shape", [(64, 10), (30, 10), (784, 10), (48, 100), (128, 256)])
@pytest.mark.parametrize("mode", BOUND)
def test_outputs_and_gradients_are_near_those_of_float32(mode, shape, rows):
    precision = load_or_skip(f"bnb-{mode}", DEVICE, compute_dtype="float32")
    torch.manual_seed(0)
    layer = nn.Linear(*shape)
    weight, bias = layer.weight.detach().cuda(), layer.bias.detach().cuda()
    precision.convert(layer, DEVICE)
    layer.cuda()
    x = torch.randn(rows, shape[0], device=DEVICE, requires_grad=True)
    made, wanted = layer(x), F.linear(x.detach(), weight, bias)
    assert (made - wanted).norm() < BOUND[mode] * wanted.norm()
    made.sum().backward()
    gradient = weight.sum(0).expand_as(x)
    assert (x.grad - gradient).norm() < BOUND[mode] * gradient.norm()
    if mode == "int8-training":
        expected = x.detach().sum(0).expand_as(weight)
        assert (layer.weight.grad - expected).norm() < BOUND[mode] * expected.norm()
    layer.eval()
    with torch.no_grad():
        assert (layer(x) - wanted).norm() < BOUND[mode] * wanted.norm()


@pytest.mark.parametrize("name", ["bnb-nf4", "float8-tensorwise", "transformer-engine"])
def test_a_compiled_model_computes_the_same(name):
    precision = load_or_skip(name, DEVICE)
    model, _ = precision.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    model.cuda()
    x = precision.cast(torch.randn(16, 64, device=DEVICE))
    with torch.no_grad(), precision.session(model, DEVICE), precision.forward(DEVICE):
        eager, compiled = model(x).float(), torch.compile(model)(x).float()
    # A compiler keeps values between two products wider, which moves some to another FP8 number.
    bound = 0.02 if name == "bnb-nf4" else 2**-4
    assert (compiled - eager).norm() < bound * eager.norm()
