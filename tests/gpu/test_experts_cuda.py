"""Experts of a mixture on the hardware's own kernels, beside the same precision on a CPU."""

import pytest
from mixtures import FAMILIES, IDS, tiny_mixture
from torch.nn import functional as F

from runner.core.base.errors import Unavailable
from runner.precision import precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]
NAMES = ("bf16-mixed", "float8-rowwise", "torchao-mxfp8", "transformer-engine")
NAMES += ("transformer-engine-current", "bnb-nf4", "bnb-int8", "int4", "int8", "qat-int4")


def first_step(name, family, device, **keys):
    """Return the loss of a step, and the gradient of the first stack where it trains."""
    policy = precision(name, device, **keys)
    model = policy.convert(tiny_mixture(family)).train()
    ids = IDS.to(device)
    with policy.session():
        with policy.forward():
            logits = model(ids).logits[:, :-1].flatten(0, 1)
        loss = policy.loss(F.cross_entropy, logits, ids[:, 1:].flatten())
        policy.backward(loss)
    named = dict(model.named_parameters())
    stack = next((named[n] for n in named if n.endswith("experts.gate_up_proj")), None)
    return loss.item(), None if stack is None else stack.grad.float().norm().item()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "Llama4"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mixture_computes_on_a_gpu_what_it_computes_on_a_cpu(name, family):
    emulated = name.startswith(("float8", "torchao", "transformer"))
    try:
        loss, gradient = first_step(name, family, "cuda")
    except Unavailable as error:
        pytest.skip(error.what)
    keys = {"emulate": True} if emulated else {}
    expected, expected_gradient = first_step(name, family, "cpu", **keys)
    assert loss == pytest.approx(expected, rel=5e-3)
    assert gradient == pytest.approx(expected_gradient, rel=0.1)
