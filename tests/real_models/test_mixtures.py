"""Mixtures of experts of transformers' families: every expert trains as an nn.Linear would."""

import re

import pytest
import torch
from mixtures import FAMILIES, IDS, expert_patterns, tiny_mixture, unfuse
from torch.nn import functional as F

from runner.precision import precision

TRAINED = ("float8-rowwise", "float8-tensorwise", "torchao-mxfp8", "transformer-engine")
# NVFP4 rounds gradients at random.
TRAINED += ("transformer-engine-current", "transformer-engine-mxfp8")
TRAINED += ("qat-int4", "qat-int8", "qat-nvfp4", "bnb-int8-training")
PACKED = ("bnb-nf4", "bnb-nf4-dq", "bnb-int8", "int4", "int8", "nvfp4")
KINDS = ("float8-rowwise", "transformer-engine", "torchao-mxfp8", "bnb-nf4", "bnb-int8", "int4")
# Of the other families these, which stand for their kind.
SHORT = ("float8-rowwise", "transformer-engine", "bnb-nf4", "qat-int4")


def policy_of(name, **keys):
    if name.startswith(("float8", "torchao", "transformer")):
        keys["emulate"] = True
    return precision(name, **keys)


def losses(policy, model):
    """Return the losses of three steps of SGD on what trains."""
    model = policy.convert(model).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    values = []
    with policy.session():
        for _ in range(3):
            with policy.forward():
                logits = model(IDS).logits[:, :-1].flatten(0, 1)
            loss = policy.loss(F.cross_entropy, logits, IDS[:, 1:].flatten())
            policy.backward(loss)
            policy.step(optimizer)
            optimizer.zero_grad()
            values.append(loss.item())
    return values


CASES = [(family, name) for family in ("Mixtral", "GptOss") for name in (*TRAINED, *PACKED)]
CASES += [(family, name) for family in ("Qwen3Moe", "DeepseekV3", "Olmoe") for name in SHORT]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_mixture_trains_as_one_with_a_linear_layer_for_each_matrix(family, name):
    stacked = losses(policy_of(name), tiny_mixture(family))
    routers = ["*.mlp.router" if family == "GptOss" else "*.mlp.gate"]
    if family == "DeepseekV3":  # its first layer has no mixture
        routers = ["model.layers.1.mlp.gate"]
    unfused = losses(policy_of(name, keep_fp32=routers), unfuse(tiny_mixture(family)))
    # Sums over a token's experts and of weight gradients are in another order.
    assert stacked == pytest.approx(unfused, rel=2e-3)
    assert stacked[0] == pytest.approx(unfused[0], rel=2e-4)
    assert len(set(stacked)) == 3


def shares(family, name):
    """Return the share of experts and of all matrices but embeddings and routers that is converted,
    as text, and the reasons for the others."""
    policy = policy_of(name, experts=expert_patterns(family))
    policy.convert(tiny_mixture(family))
    rows = policy.report.modules
    # DeepSeek-V3's router is one that the model declares float32.
    left = [r for r in rows if not re.search("Embedding|Router|Gate", r.kind)]
    experts = [row for row in rows if row.module.endswith("experts")]
    assert experts
    return [
        f"{100 * sum(row.converted for row in group) / sum(row.elements for row in group):.3g} %"
        for group in (experts, left)
    ]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_experts_are_converted(family, name):
    assert shares(family, name) == ["100 %", "100 %"]


def test_the_page_names_the_families(root):
    page = (root / "docs" / "precisions.md").read_text()
    assert all(family in page for family in FAMILIES)
