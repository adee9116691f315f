import math

import pytest
import torch
from torch.nn import functional as F

from runner.models.mixture import Experts, Mixture


def tokens(length=16):
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(0))


def small(**options):
    torch.manual_seed(0)
    return Mixture(64, 16, width=32, hidden=16, **options)


def by_hand(experts, rows, chosen, weights):
    """Return the sum of each row's experts, one row and one expert after the other."""
    sums = torch.zeros_like(rows)
    for n, k in torch.cartesian_prod(*map(torch.arange, chosen.shape)).tolist():
        number = chosen[n, k]
        gate, up = (experts.gate_up_proj[number] @ rows[n]).chunk(2)
        sums[n] += weights[n, k] * (experts.down_proj[number] @ (F.silu(gate) * up))
    return sums


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12), ("bfloat16", 0.05)]
)
def test_experts_multiply_their_own_tokens(dtype, tolerance):
    """Some experts have no token; each dtype may have a kernel of its own."""
    dtype = getattr(torch, dtype)
    torch.manual_seed(0)
    experts = Experts(5, 16, 16).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows = torch.randn(12, 16, dtype=dtype, requires_grad=True)
    chosen = torch.tensor([[4, 1], [1, 3], [3, 4]]).repeat(4, 1)
    weights = torch.rand(12, 2, dtype=dtype)
    results = []
    for sums in (experts(rows, chosen, weights), by_hand(experts, rows, chosen, weights)):
        grads = torch.autograd.grad(sums.square().sum(), [rows, *experts.parameters()])
        results.append((sums, *grads))
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)


def test_logits_of_every_position_see_no_future():
    model, before = small().eval(), tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 64
    logits = model(before)["logits"]
    assert logits.shape == (2, 16, 64)
    assert model(tokens(5))["logits"].shape == (2, 5, 64)
    changed = (logits - model(after)["logits"]).abs().amax((0, 2))
    assert changed[:9].max() < 1e-6
    assert changed[9:].min() > 1e-6
    loss = F.cross_entropy(logits.flatten(0, 1), before.flatten())
    assert loss.item() == pytest.approx(math.log(64), abs=0.5)


def test_the_load_balancing_loss_is_one_for_an_even_router_and_e_for_a_collapsed_one():
    model = small(layers=1, experts=4, top_k=1)
    assert model(tokens())["aux_loss"].item() == pytest.approx(1, abs=0.05)
    with torch.no_grad():
        model.blocks[0].norm2.bias.fill_(1)
        model.blocks[0].norm2.weight.zero_()
        model.blocks[0].router.weight[2] = 5
    assert model(tokens())["aux_loss"].item() == pytest.approx(4, abs=1e-3)


def test_most_weights_are_the_experts_and_learn():
    model = Mixture(256, 128)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert experts / sum(p.numel() for p in model.parameters()) >= 0.75
    model = small()
    output = model(tokens())
    (output["logits"].square().mean() + output["aux_loss"]).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_float32_model_is_exported():
    """torch traces no grouped product in float32."""
    model = small().eval()
    exported = torch.export.export(model, (tokens(),)).module()
    torch.testing.assert_close(exported(tokens())["logits"], model(tokens())["logits"])


def test_refuses_bad_sizes():
    with pytest.raises(ValueError, match=r"experts=2, top_k=3"):
        small(experts=2, top_k=3)
