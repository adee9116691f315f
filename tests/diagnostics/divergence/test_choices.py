"""A router that rounding makes choose otherwise is no divergence, and hides none."""

import pytest
import torch
import torch.nn.functional as F
from compared_models import compare, extended, replace_forward, sentence
from torch import nn

from runner.diagnostics.divergence.findings import first_divergence
from runner.training.tasks.language import Language

VOCABULARY, WIDTH, EXPERTS = 64, 32, 4


class Router(nn.Module):
    """Returns the weights and numbers of two experts for each token."""

    def __init__(self):
        super().__init__()
        self.score = scorer()

    def forward(self, x):
        weights, numbers = self.score(x).softmax(-1).topk(2, dim=-1)
        return weights / weights.sum(-1, keepdim=True), numbers


def scorer():
    """Return a layer whose scores are so near to each other that rounding swaps some."""
    layer = nn.Linear(WIDTH, EXPERTS, bias=False)
    with torch.no_grad():
        layer.weight.mul_(0.1)
    return layer


def choose(scores):
    weights, numbers = torch.topk(input=scores.softmax(-1), k=2, dim=-1)
    return weights / weights.sum(-1, keepdim=True), numbers


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.expand = nn.Linear(WIDTH, 2 * WIDTH)
        self.contract = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.contract(F.gelu(self.expand(x)))


class Mixture(nn.Module):
    """A layer of experts, which chooses itself or lets its router choose."""

    def __init__(self, chooses):
        super().__init__()
        self.chooses = chooses
        self.router = scorer() if chooses else Router()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        rows = x.flatten(0, 1)
        found = self.router(rows)
        weights, numbers = choose(found) if self.chooses else found
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(numbers == number)
            weighted = expert(rows[token]) * weights[token, place, None]
            output = output.index_add(0, token, weighted.to(output.dtype))
        return output.view_as(x)


class Net(nn.Module):
    def __init__(self, chooses):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Mixture(chooses) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def first_found(chooses, precision, plant=None, seed=0):
    torch.manual_seed(seed)
    model = Net(chooses)
    tokens = torch.randint(VOCABULARY, (8, 33))
    made = (model, (tokens[:, :-1], tokens[:, 1:]), Language())
    return first_divergence(compare(made, precision, plant).rows)


ROUNDED = ("bf16-mixed", "16-mixed", "bf16-true")
CHOOSES = pytest.mark.parametrize("chooses", [False, True], ids=["router", "layer"])
PRECISIONS = pytest.mark.parametrize(
    "precision", ["32-true", "bf16-mixed", *(extended(name) for name in ("16-mixed", "bf16-true"))]
)


@CHOOSES
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("seed", [0, *(extended(seed) for seed in (1, 2))])
def test_another_choice_by_rounding_is_no_divergence(chooses, precision, seed):
    assert first_found(chooses, precision, seed=seed) is None


def test_rounding_changes_choices_here():
    """Else the test above would not show that they are replaced."""
    torch.manual_seed(0)
    x, router = torch.randn(256, WIDTH), Router()
    _, numbers = router(x)
    _, rounded = router.bfloat16()(x.bfloat16())
    assert 0 < (numbers != rounded).float().mean() < 0.1


@CHOOSES
@PRECISIONS
def test_a_bug_in_an_expert_is_named(chooses, precision):
    plant = replace_forward("layers.1.experts.2.contract", lambda plain, x: 1.3 * plain(x))
    first = first_found(chooses, precision, plant)
    assert first.row.module == "layers.1.experts.2.contract"


@PRECISIONS
def test_a_router_that_sends_tokens_elsewhere_is_named(precision):
    def shifted(plain, x):
        weights, numbers = plain(x)
        return weights, (numbers + 1) % EXPERTS

    first = first_found(False, precision, replace_forward("layers.1.router", shifted))
    assert first.row.module == "layers.1.router"
    assert first.added.found.is_discrete


@CHOOSES
@PRECISIONS
def test_noise_in_what_is_chosen_among_is_named(chooses, precision):
    """As by a copy of the router that is out of date."""

    def noisy(plain, x):
        return plain(x) + 0.3 * torch.randn(EXPERTS, dtype=x.dtype)

    name = "layers.1.router" + ("" if chooses else ".score")
    assert first_found(chooses, precision, replace_forward(name, noisy)).row.module == name


class Experts(nn.Module):
    """Experts whose matrices are two parameters, computed in a loop or all at once."""

    loops = False

    def __init__(self):
        super().__init__()
        self.expand = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 6)
        self.contract = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 6)
        self.gelu = nn.GELU()

    def forward(self, rows, numbers, weights):
        if not self.loops:
            inner = self.gelu(torch.einsum("th,eih->tei", rows, self.expand))
            outputs = torch.einsum("tei,ehi->teh", inner, self.contract)
            chosen = outputs.gather(1, numbers[..., None].expand(-1, -1, WIDTH))
            return (chosen * weights[..., None]).sum(1)
        output = torch.zeros_like(rows)
        for number in range(EXPERTS):
            token, place = torch.where(numbers == number)
            inner = self.gelu(F.linear(rows[token], self.expand[number]))
            found = F.linear(inner, self.contract[number]) * weights[token, place, None]
            output = output.index_add(0, token, found.to(output.dtype))
        return output


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = Experts()

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, numbers = self.router(rows)
        return self.experts(rows, numbers, weights).view_as(x)


def compare_stacked(precision, plant=None, **options):
    torch.manual_seed(0)
    net = Net(False)
    net.layers = nn.ModuleList(Stacked() for _ in range(2))
    tokens = torch.randint(VOCABULARY, (8, 33))
    return compare((net, (tokens[:, :-1], tokens[:, 1:]), Language()), precision, plant, **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_bug_in_one_of_stacked_experts_is_named(precision):
    def plant(net):
        with torch.no_grad():
            net.layers[1].experts.contract[2] *= 1.3

    text = sentence(compare_stacked(precision, plant))
    assert "parts from other in `layers.1.experts[2]`: its output" in text
    assert "other weights in 1 module" in text
    assert "`layers.1.experts.contract[2]`" in text


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "int4"])
def test_stacked_experts_may_be_computed_in_another_way(precision):
    def plant(net):
        for layer in net.layers:
            layer.experts.loops = True

    names = ["layers.*.experts.expand", "layers.*.experts.contract"]
    options = {"experts": names} if precision == "int4" else {}
    found = compare_stacked(precision, plant, **options)
    assert first_divergence(found.rows) is None
    assert not found.uneven_calls
    flips = found.flips["layers.1.experts"]
    assert found.flips.keys() == {"layers.0.experts", "layers.1.experts"}
    assert (flips > 0) is (precision != "32-true")
    assert flips < 0.3
    assert ("of tokens go to other experts in `layers." in sentence(found)) is (flips > 0)
