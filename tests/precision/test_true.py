"""True half precision: float32's switches, and the eps of an optimizer whose state is float16."""

import pytest
import torch
from precision_models import CPU, raise_inside
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from runner.core.base.errors import ConfigError
from runner.precision import registry

ADAMS = {"Adam": {}, "AdamW": {}, "NAdam": {}, "RMSprop": {"eps": 1e-8}, "Adagrad": {"eps": 1e-10}}


def switches():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("before", [("high", False), ("medium", True), ("highest", False)])
def test_the_switches_are_restored_after_an_exception(before):
    previous = switches()
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
    try:
        for precision in ("highest", "high"):
            chosen = registry.load_precision("32-true", float32_matmul=precision)
            with pytest.raises(RuntimeError, match="inside"):
                raise_inside(chosen.session(nn.Linear(2, 2), CPU))
            assert switches() == before
    finally:
        torch.set_float32_matmul_precision(previous[0])
        torch.backends.cudnn.allow_tf32 = previous[1]


@pytest.mark.parametrize("kind", ADAMS)
def test_an_eps_that_float16_rounds_to_zero_is_refused(kind):
    optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.ones(1))], **ADAMS[kind])
    with pytest.raises(ConfigError, match=rf"optimizer\.eps=1e-\d+: {kind}.*optimizer\.eps=1e-4"):
        registry.load_precision("16-true").check_optimizers([optimizer])
    with pytest.raises(ConfigError, match=r"precision=transformer-engine-float16"):
        registry.load_precision("transformer-engine-float16").check_optimizers([optimizer])
    for name in set(registry.precision_names()) - {"16-true", "transformer-engine-float16"}:
        registry.load_precision(name).check_optimizers([optimizer])


def test_an_eps_that_works_and_none_at_all_pass():
    weights = [nn.Parameter(torch.ones(1))]
    good = [torch.optim.AdamW(weights, eps=1e-4), torch.optim.SGD(weights)]
    registry.load_precision("16-true").check_optimizers(good)


def weight_after_training(eps):
    """Return a weight after five steps whose squared gradients underflow in float16."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = torch.optim.AdamW([weight], lr=0.01, eps=eps)
    for _ in range(5):
        weight.grad = torch.tensor([1e-5, 1.0, 0.0, 1e-3], dtype=torch.float16)
        optimizer.step()
    return weight


def test_the_refused_eps_fails_and_the_advised_one_works():
    assert not weight_after_training(1e-8).isfinite().all()
    assert weight_after_training(1e-4).isfinite().all()


def optimizer(kind, eps, lr, **keywords):
    return getattr(torch.optim, kind)([nn.Parameter(torch.ones(1))], lr=lr, eps=eps, **keywords)


REFUSED = {
    "Adam's default times ten": ("Adam", 1e-7, 1e-3, {}, "1e-4"),
    "a hundred times the default": ("AdamW", 1e-6, 1e-3, {}, "1e-4"),
    "a large rate": ("NAdam", 3e-5, 1e-2, {}, "1e-3"),
    "a long memory": ("Adam", 1e-5, 1e-3, {"betas": (0.9, 0.9999)}, "1e-4"),
    "RMSprop's": ("RMSprop", 1e-7, 1e-3, {}, "1e-4"),
    "Adagrad's": ("Adagrad", 1e-7, 1e-2, {}, "1e-4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_eps_that_cannot_stand_in_for_vanished_squares_is_refused(case):
    kind, eps, lr, keywords, works = REFUSED[case]
    message = rf"optimizer\.eps={eps:g}: {kind} keeps .* round to 0.*Type optimizer\.eps={works},"
    for name in ("16-true", "transformer-engine-float16"):
        precision = registry.load_precision(name)
        with pytest.raises(ConfigError, match=message):
            precision.check_optimizers([optimizer(kind, eps, lr, **keywords)])
        precision.check_optimizers([optimizer(kind, float(works), lr, **keywords)])
    for name in ("16-mixed", "32-true", "bf16-true"):
        registry.load_precision(name).check_optimizers([optimizer(kind, eps, lr, **keywords)])


def test_an_eps_that_only_hurts_is_warned_of():
    with pytest.warns(UserWarning, match=r"eps=1e-05: AdamW .*= 0\.55\. Type optimizer.eps=1e-4"):
        registry.load_precision("16-true").check_optimizers([optimizer("AdamW", 1e-5, 1e-3)])


def test_optimizers_without_squares_take_any_eps_that_float16_holds():
    for kind in ("Adamax", "Adadelta"):
        registry.load_precision("16-true").check_optimizers([optimizer(kind, 1e-6, 1e-2)])


def worst_loss(eps, lr):
    """Return the first and the largest loss of 12 steps of a small GPT-2 in 16-true with AdamW."""
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 16}
    config = GPT2Config(**sizes, vocab_size=32, bos_token_id=0, eos_token_id=0)
    precision = registry.load_precision("16-true")
    model, _ = precision.convert(GPT2LMHeadModel(config))
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, eps=eps)
    tokens = torch.randint(0, 32, (8, 17))
    losses = []
    for _ in range(12):
        with precision.forward(CPU):
            output = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(output.float().flatten(0, 1), tokens[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return losses[0], max(losses)


@pytest.mark.parametrize(("eps", "lr"), [(1e-6, 1e-3), (3e-5, 1e-2)])
def test_a_refused_eps_destroys_a_gpt2_and_the_advised_one_trains_it(eps, lr):
    precision = registry.load_precision("16-true")
    with pytest.raises(ConfigError) as error:
        precision.check_optimizers([optimizer("AdamW", eps, lr)])
    works = float(str(error.value).partition("Type optimizer.eps=")[2].partition(",")[0])
    first, worst = worst_loss(eps, lr)
    assert not worst < 2 * first
    first, worst = worst_loss(works, lr)
    assert worst < 1.1 * first
