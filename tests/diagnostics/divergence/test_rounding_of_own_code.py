"""What a module's own code computes is allowed the rounding that its precision has there."""

import pytest
import torch
from compared_models import compare, sentence
from one_off_nets import net
from torch import nn

from models.mixture import Experts
from runner.diagnostics.divergence.findings import first_divergence
from runner.training.tasks.classification import Classification

HALF = pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])


class Embedder(nn.Module):
    """Its own code computes in float32 under autocast, and passes on what its head gives."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.head = nn.Linear(32, 10)
        self.factor = 8.0
        self.cast = None

    def forward(self, x):
        x = self.embed(x).mean(1)
        if self.cast is not None:
            x = x.to(self.cast).float()
        return self.head(self.factor * x)


class Residual(nn.Module):
    """Float32 goes in and comes out; autocast rounds the product between."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)
        self.factor = 1.0

    def forward(self, x):
        x = x.to(self.weight.dtype)
        return x + self.factor * (x @ self.weight)


class Residuals(nn.Sequential):
    def __init__(self):
        super().__init__(Residual(), Residual(), nn.Linear(32, 10))


class Attention(nn.Module):
    """The product of what its linear layers give in half precision is rounded, then softened."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(32, 32)
        self.key = nn.Linear(32, 32)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = x.to(self.query.weight.dtype)
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        weights = self.drop(scores.float().softmax(-1)).to(self.head.weight.dtype)
        return self.head(weights).mean(1)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)

    def forward(self, x):
        return self.embed(x).mean(1).float()


class Casting(nn.Module):
    """Its casts do nothing in float32, where it passes on what comes in."""

    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x).to(self.head.weight.dtype)).float()


class MaskedSoftmax(nn.Module):
    def forward(self, scores, mask):
        return (scores + mask).softmax(-1)


class Masking(nn.Module):
    """Fills a mask with the lowest number of its dtype."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(32, 32)
        self.masked = MaskedSoftmax()
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = x.to(self.query.weight.dtype)
        scores = self.query(x) @ x.transpose(-1, -2) / 8
        lowest = torch.finfo(scores.dtype).min
        mask = torch.full((16, 16), lowest, dtype=scores.dtype).triu(1)
        return self.head(self.masked(scores, mask)).mean(1)


class Routed(nn.Module):
    """Float32 goes in and comes out; autocast rounds the grouped products between, whose kernel
    returns views."""

    def __init__(self):
        super().__init__()
        self.experts = Experts(4, 32, 64)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.1)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = x.to(self.head.weight.dtype)
        chosen = torch.arange(len(x))[:, None] % 4
        return self.head(self.experts(x, chosen, torch.ones_like(x[:, :1])))


INPUTS = {
    Routed: lambda: torch.randn(64, 32),
    Casting: lambda: torch.randint(50, (16, 12)),
    Masking: lambda: torch.randn(4, 16, 32),
    Embedder: lambda: torch.randint(50, (16, 12)),
    Residuals: lambda: torch.randn(64, 32),
    Attention: lambda: torch.randn(4, 16, 32),
}


def compare_models(model, precision, plant=None):
    torch.manual_seed(0)
    inputs = INPUTS[model]()
    batch = (inputs, torch.randint(10, (len(inputs),)))
    return compare((model(), batch, Classification()), precision, plant)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "16-true"])
@pytest.mark.parametrize("model", INPUTS)
def test_rounding_of_own_code_is_no_divergence(model, precision):
    assert first_divergence(compare_models(model, precision).rows) is None


@HALF
def test_code_that_computes_in_float32_is_allowed_no_half_precision(precision):
    """Not even where the module passes on what comes in half precision from its last layer."""
    found = compare_models(Embedder, precision, lambda model: setattr(model, "factor", 7.94))
    assert first_divergence(found.rows).row.module == "(model)"
    assert "what it passes to `head` is off by 0.75 %" in sentence(found)
    assert "first in its mul()" in sentence(found)


@HALF
@pytest.mark.parametrize(
    ("model", "attribute", "wrong", "module"),
    [
        pytest.param(Residuals, "1.factor", 1.05, "1", id="a product that autocast rounds"),
        pytest.param(Embedder, "cast", torch.bfloat16, "(model)", id="a cast to bfloat16"),
        pytest.param(Embedder, "cast", torch.float16, "(model)", id="a cast to float16"),
    ],
)
def test_what_is_wrong_in_own_code_is_no_excuse(model, attribute, wrong, module, precision):
    def plant(net):
        owner, _, name = attribute.rpartition(".")
        setattr(net.get_submodule(owner), name, wrong)

    found = compare_models(model, precision, plant)
    assert first_divergence(found.rows).row.module == module


def test_a_module_that_is_never_called_is_said_to_be_so():
    torch.manual_seed(0)
    norms = {"one": nn.LayerNorm(32), "two": nn.LayerNorm(32)}
    model = net(
        lambda net, x: net.head(net.two(x) if net.wrong else net.one(x)),
        **norms,
        head=nn.Linear(32, 10),
        wrong=False,
    )
    made = (model, (torch.randn(8, 32), torch.randint(10, (8,))), Classification())
    text = sentence(compare(made, "32-true", lambda model: setattr(model, "wrong", True)))
    assert "one parts from other in the backward of `one`" in text
    assert "; one never calls the module." in text
    assert "`one` (0 times against 1), `two` (once against 0)" in text
