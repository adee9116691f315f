"""Hooks of runner/diagnostics/numerics/probe.py, with planted truths."""

import copy
from contextlib import nullcontext

import pytest
import torch
from one_off_nets import net
from states import CPU, are_equal, count_hooks, make_state, measure_step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from runner.core.loop.step import train_step
from runner.diagnostics.numerics.probe import Probe
from runner.diagnostics.numerics.results import KINDS
from runner.precision.dynamic_loss_scale import DynamicLossScale


def state_of(model, name="32-true", lr=0.1, scale=None, kind=torch.optim.SGD):
    return make_state(model, name, optimizer=lambda p: kind(p, lr=lr), scale=scale)


def batch(rows=8, width=4, out=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, width, generator=generator)
    return inputs, torch.randn(rows, out, generator=generator)


def look(state, micros=None):
    return measure_step(state, micros or [batch()])


def by_key(one):
    return {(m.module, m.kind): m for m in one.measured}


class Net(nn.Module):
    """Two layers, with an operation between them that belongs to neither."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 16)
        self.head = nn.Linear(16, 2)
        nn.init.constant_(self.body.bias, 1.0)

    def forward(self, x):
        return self.head(self.body(x) / 1.0)


def test_each_module_with_parameters_in_four_kinds():
    one = look(state_of(Net()))
    own = [("(model)", "activations")]  # of operations in its forward
    assert list(by_key(one)) == [*own, *((m, k) for m in ("body", "head") for k in KINDS)]
    assert (one.step, one.loss_scale) == (1, None)
    numbers = by_key(one)
    assert numbers["body", "activations"].elements == 8 * 16
    assert numbers["body", "weights"].elements == 4 * 16 + 16


def test_gradients_are_neither_unscaled_nor_clipped():
    state = state_of(Net(), scale=DynamicLossScale(CPU, 1024.0))
    twin = copy.deepcopy(state.model)
    state.clip_norm = 1e-6
    x, y = batch()
    (F.mse_loss(twin(x), y) * 1024).backward()
    largest = max(twin.head.weight.grad.abs().max(), twin.head.bias.grad.abs().max())
    numbers = by_key(look(state, [(x, y)]))
    assert numbers["head", "gradients"].largest == pytest.approx(largest.item())


def test_a_step_that_is_skipped_has_no_updates():
    state = state_of(Net(), scale=DynamicLossScale(CPU, 3e38))
    one = look(state)
    kinds = {kind for _, kind in by_key(one)}
    assert kinds == {"activations", "weights", "gradients"}
    assert by_key(one)["head", "gradients"].not_finite > 0


class Odd(nn.Module):
    """A layer that is called twice, one with two outputs and integers, a parameter of its own, one
    that is shared, one that is frozen, one in place, one that is never called."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.twice = nn.Linear(4, 4)
        self.pool = net(
            lambda net, x: (x * net.gain, {"where": x.argmax(1), "more": [x * 2]}),
            gain=nn.Parameter(torch.ones(4)),
        )
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.twice.weight
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        self.head = nn.Linear(3, 2)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        x = self.twice(self.twice(x))
        x, _ = self.pool(self.tied(x))
        return self.head(F.relu_(self.frozen(x) * self.scale))


def test_odd_modules():
    torch.manual_seed(0)
    numbers = by_key(look(state_of(Odd())))
    assert numbers["twice", "activations"].elements == 2 * 8 * 4
    assert numbers["pool", "activations"].elements == 2 * 8 * 4
    assert numbers["tied", "activations"].elements == 8 * 4
    assert ("tied", "weights") not in numbers  # they are those of twice
    assert numbers["twice", "weights"].elements == 20
    assert {k for m, k in numbers if m == "frozen"} == {"activations", "weights"}
    assert {k for m, k in numbers if m == "unused"} == {"weights"}
    assert numbers["(model)", "weights"].elements == 3
    assert {k for m, k in numbers if m == "(model)"} == set(KINDS)


def test_the_last_of_several_micro_batches():
    state = state_of(Net())
    one = look(state, [batch(), (batch()[0] * 1000, batch()[1])])
    numbers = by_key(one)
    assert numbers["body", "activations"].elements == 8 * 16
    assert numbers["body", "activations"].largest > 500


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_the_backward_repeats_counts_once(reentrant):
    class Again(Net):
        def forward(self, x):
            x = x.requires_grad_()
            return self.head(checkpoint(self.body, x, use_reentrant=reentrant) / 1.0)

    numbers = by_key(look(state_of(Again())))
    assert numbers["body", "activations"].elements == 8 * 16


def test_complex_numbers_as_their_real_parts():
    weight = nn.Parameter(torch.full((4, 2), 1 + 2j, dtype=torch.complex64))
    wave = net(lambda net, x: (x.to(torch.complex64) @ net.wave).real, wave=weight)
    numbers = by_key(look(state_of(nn.Sequential(wave))))
    assert numbers["0", "weights"].elements == 16
    assert set(numbers["0", "weights"].exponents) == {0, 1}
    assert numbers["0", "updates"].elements == 16


def test_half_precision_counts_what_it_swallowed_already():
    model = Net()
    nn.init.constant_(model.head.weight, 100.0)
    numbers = by_key(look(state_of(model, "bf16-true", lr=1e-2, kind=torch.optim.Adam)))
    assert numbers["head", "updates"].formats["bfloat16"].swallowed > 0.8
    assert numbers["body", "weights"].formats["bfloat16"].sqnr_db is None


@pytest.mark.parametrize(
    "name",
    [
        *("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"),
        *("bnb-nf4", "bnb-int8-training"),
    ],
)
def test_steps_are_the_same_bit_by_bit(name):
    if name.startswith("bnb"):
        pytest.importorskip("bitsandbytes")

    def course(watched):
        torch.manual_seed(0)
        hidden = nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout(0.5)
        model = nn.Sequential(nn.Linear(64, 64), *hidden, nn.Linear(64, 2))
        state, losses, found = state_of(model, name, lr=0.01), [], []
        probe = Probe(state, found.append)
        for step in range(4):
            with probe if watched and step % 2 else nullcontext():
                losses.append(train_step(state, [batch(width=64, seed=step)]).loss)
        assert len(found) == 2 * watched
        assert not watched or found[0].measured
        return [*losses, *state.model.state_dict().values(), torch.get_rng_state()]

    assert are_equal(course(False), course(True))


def test_a_step_that_fails_is_not_measured_and_the_next_one_is():
    state, found = state_of(Net()), []
    probe = Probe(state, found.append)
    with pytest.raises(RuntimeError), probe:
        train_step(state, [batch(width=5)])
    assert not found
    assert count_hooks(state.model) == 0
    with probe:
        train_step(state, [batch()])
    assert len(found) == 1
    assert count_hooks(state.model) == 0


class Mixture(nn.Module):
    """Two matrices of experts in one parameter, of which no token chooses the last."""

    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        chosen = (torch.arange(len(x)) % 2)[:, None]
        return self.experts(x, chosen)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 4))

    def forward(self, x, chosen):
        return torch.stack([self.weight[e] @ row for row, e in zip(x, chosen[:, 0], strict=True)])


def test_each_expert_by_itself():
    found = by_key(look(state_of(Mixture()), [batch(rows=5)]))
    names = [f"experts.weight[{expert}]" for expert in range(3)]
    assert [found[name, "weights"].elements for name in names] == [8, 8, 8]
    assert ("experts", "weights") not in found
    # As many numbers as tokens times their width of 4.
    assert [found[f"experts[{e}]", "activations"].elements for e in range(2)] == [12, 8]
    assert ("experts[2]", "activations") not in found
    swallowed = [found[name, "updates"].formats["bfloat16"].swallowed for name in names]
    assert swallowed[2] is None  # without a token there is no update to swallow
    assert None not in swallowed[:2]
