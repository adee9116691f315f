"""What 16-bit weights keep of their updates under each rule: the literature's case, exactness
against float32, every kind of optimizer, checkpoints."""

import pytest
import torch
from precision_models import random_parameters, set_random_gradients
from torch import nn

from runner.core.base.errors import ConfigError
from runner.precision.weight_updates import UPDATE_RULES, round_stochastically
from runner.precision.wide_step import CHUNK_ELEMENTS, attach_update, drop_foreign_state

BF16 = torch.bfloat16
CURES = UPDATE_RULES[1:]
SHAPES = ((64, 32), (64,), (3, 5, 2), ())


def weights(dtype=torch.bfloat16, shapes=SHAPES):
    return random_parameters(shapes, dtype)


def train(optimizer, steps, first=0):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        set_random_gradients(params, step)
        optimizer.step()
    return params


def adam(params, **keys):
    return torch.optim.AdamW(params, lr=1e-4, **keys)


# Zamirai et al., arXiv:2010.06192, figure 1: a weight of 1 and updates below half of its unit in
# the last place, which is 2**-8.
@pytest.mark.parametrize(
    ("rule", "mean", "tolerance"),
    [
        ("nearest", 1.0, 0.0),
        ("master_weights", 0.9, 2**-9),
        ("remainders", 0.9, 2**-9),
        ("kahan", 0.9, 0.002),
        ("stochastic_rounding", 0.9, 0.002),
    ],
)
def test_a_hundred_updates_below_half_a_unit(rule, mean, tolerance):
    p = nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=1e-3)
    attach_update(optimizer, rule)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.detach().float().mean().item() == pytest.approx(mean, abs=tolerance + 1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_is_right_on_average(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([1.001, -1.2345, 3.3e-7, -2e-8, 1e-3, 60010.0, -7.75])
    draws = torch.stack(
        [round_stochastically(values, dtype, generator).float() for _ in range(4000)]
    )
    low, high = draws.min(0).values, draws.max(0).values
    gap = high - low
    # Two neighbours, and none where the dtype holds the value.
    assert all(len(set(column.tolist())) == 2 for column in draws.unbind(1)[:-1])
    assert draws[:, -1].eq(-7.75).all()
    share = ((values - low) / gap.clamp_min(1e-30))[:-1]
    spread = (share * (1 - share) / 4000).sqrt() * gap[:-1]
    assert ((draws.mean(0) - values)[:-1].abs() <= 4.5 * spread).all()
    assert torch.allclose(draws.var(0)[:-1], share * (1 - share) * gap[:-1] ** 2, rtol=0.15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_has_no_neighbours_stays(dtype):
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.5])
    rounded = round_stochastically(values, dtype)
    assert torch.equal(rounded.nan_to_num(nan=7.0), values.to(dtype).nan_to_num(nan=7.0))
    assert rounded.signbit()[1]


def test_torchaos_rounding_has_the_same_distribution():
    from torchao.optim.quant_utils import _fp32_to_bf16_sr

    values = torch.full((200_000,), 1.0 + 0.3 * 2**-7)
    ours = round_stochastically(values, torch.bfloat16).float()
    theirs = _fp32_to_bf16_sr(values).float()
    assert set(ours.tolist()) == set(theirs.tolist()) == {1.0, 1 + 2**-7}
    assert ours.mean().item() == pytest.approx(theirs.mean().item(), abs=2**-7 * 0.006)
    assert ours.var().item() == pytest.approx(theirs.var().item(), rel=0.02)


@pytest.mark.parametrize("rule", ["master_weights", "remainders"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("state_dtype", [None, BF16])
def test_float32_weights_are_kept_bit_by_bit(rule, fused, state_dtype):
    params = weights()
    optimizer = adam(params, fused=fused)
    attach_update(optimizer, rule, state_dtype)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    reference = adam(wide, fused=fused)
    attach_update(reference, "nearest", state_dtype)
    for step in range(50):
        set_random_gradients(params, step)
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    for p, q in zip(params, wide, strict=True):
        state = optimizer.state[p]
        if rule == "master_weights":
            kept = state["master_weight"]
        else:
            upper = p.detach().view(torch.int16).to(torch.int32) << 16
            kept = (upper + state["weight_remainder"]).view(torch.float32)
        assert torch.equal(kept, q)
        # A tie may be rounded to either side.
        assert (p.float() - q).abs().le(q.abs() * 2**-8).all()
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].dtype is reference.state[q][key].dtype
            assert torch.equal(state[key], reference.state[q][key])


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
    "adamw": adam,
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-4),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-4),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-4),
    "own": lambda params: Signs(params),
}


class Signs(torch.optim.Optimizer):
    """One of a user's own: steps by the sign of the gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-4})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p -= group["lr"] * p.grad.sign()


@pytest.mark.parametrize("rule", CURES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_follows_its_float32_self(name, rule):
    params = weights(shapes=((256, 64), (64,)))
    optimizer = OPTIMIZERS[name](params)
    attach_update(optimizer, rule)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    start = [q.detach().clone() for q in wide]
    reference = OPTIMIZERS[name](wide)
    path = [torch.zeros_like(q) for q in wide]
    for step in range(40):
        set_random_gradients(params, step % 2)
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.float()
        earlier = [q.detach().clone() for q in wide]
        optimizer.step()
        reference.step()
        for part, q, before in zip(path, wide, earlier, strict=True):
            part += (q - before).abs()
    for p, q, before, part in zip(params, wide, start, path, strict=True):
        moved = (q - before).norm()
        # Rounding of the stored weights and of 16-bit state, never the loss of small updates.
        # Stochastic rounding walks at random, by a variance of update times gap in each step.
        rounding = (before.abs() * 2**-8).norm()
        walk = (part * before.abs() * 2**-7).sum().sqrt() if "stochastic" in rule else 0.0
        assert (p.float() - q).norm() <= 0.1 * moved + rounding + 1.2 * walk
        assert p.dtype is torch.bfloat16
        assert optimizer.param_groups[0]["params"][0] is params[0]


# By the weights' dtype and the state's: the weight, two averages of Adam, what the rule keeps.
BYTES = {
    (BF16, None): {
        "nearest": 6,
        "master_weights": 14,
        "remainders": 12,
        "kahan": 8,
        "stochastic_rounding": 6,
    },
    (BF16, BF16): {"nearest": 6, "master_weights": 10, "remainders": 8, "kahan": 8},
    (torch.float32, BF16): {"nearest": 8},
}


@pytest.mark.parametrize("dtypes", BYTES, ids=str)
def test_bytes_of_a_weight_are_those_on_paper(dtypes):
    dtype, state_dtype = dtypes
    found = {}
    for rule in BYTES[dtypes]:
        params = weights(dtype, shapes=((128, 128),))
        optimizer = adam(params)
        attach_update(optimizer, rule, state_dtype)
        train(optimizer, 2)
        kept = [v for v in optimizer.state[params[0]].values() if v.shape == (128, 128)]
        found[rule] = params[0].itemsize + sum(value.itemsize for value in kept)
    assert found == BYTES[dtypes]


def test_state_of_another_kind_is_left_as_it_is():
    saved = {"state": {0: ["a list"], 1: "a text"}, "param_groups": []}
    assert drop_foreign_state(torch.optim.SGD([nn.Parameter(torch.ones(1))]), saved)[0] is saved


def test_a_large_model_is_stepped_in_parts(monkeypatch):
    monkeypatch.setattr("runner.precision.wide_step.CHUNK_ELEMENTS", 70)
    assert CHUNK_ELEMENTS >= 2**20
    shapes = ((8, 8), (10,), (100,), (30,), (41,))
    apart, whole = weights(shapes=shapes), weights(shapes=shapes)
    parts, optimizer = adam(apart), Adam(whole, lr=1e-4)
    attach_update(parts, "kahan")
    attach_update(optimizer, "kahan")
    train(parts, 5)
    train(optimizer, 5)
    assert optimizer.sizes == [5] * 5  # of a class that torch does not have
    assert all(map(torch.equal, apart, whole))


class Adam(torch.optim.AdamW):
    """Notes how many parameters each step has."""

    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.sizes = []

    def step(self, closure=None):
        self.sizes.append(sum(len(group["params"]) for group in self.param_groups))
        return super().step(closure)


class Hoards(Signs):
    """Keeps its parameters in an attribute."""

    def __init__(self, params):
        super().__init__(params)
        self.mine = [*self.param_groups[0]["params"]]


def test_an_optimizer_that_keeps_its_parameters_itself_is_refused():
    with pytest.raises(ConfigError, match="keeps parameters in its attribute mine"):
        attach_update(Hoards(weights()), "kahan")


class Fails(torch.optim.SGD):
    """Steps until it is told to fail."""

    is_failing = False

    def step(self, closure=None):
        if self.is_failing:
            raise ZeroDivisionError
        return super().step(closure)


def test_a_failed_step_leaves_the_optimizer_as_it_was():
    params = weights()
    optimizer = Fails(params, lr=1e-3, momentum=0.9)
    attach_update(optimizer, "kahan")
    train(optimizer, 2)
    before = [p.detach().clone() for p in params]
    optimizer.is_failing = True
    with pytest.raises(ZeroDivisionError):
        train(optimizer, 1)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in params]
    for p, value in zip(params, before, strict=True):
        assert torch.equal(p, value)
        assert {*optimizer.state[p]} == {"momentum_buffer", "compensation"}
        # State without dimensions may be a count, and is not narrowed.
        kept = torch.bfloat16 if p.ndim else torch.float32
        assert optimizer.state[p]["momentum_buffer"].dtype is kept


@pytest.mark.parametrize(
    ("name", "rule", "text"),
    [
        ("32-true", "kahan", "stores weights in float32, whose updates need no cure"),
        ("16-true", "remainders", "not the upper half of float32"),
        ("bf16-true", "master", "Allowed: nearest, master_weights, remainders, kahan"),
    ],
)
def test_a_precision_without_use_for_a_rule_refuses_it(name, rule, text):
    from runner.precision import precision

    with pytest.raises(ConfigError, match=text):
        precision(name, update=rule)
