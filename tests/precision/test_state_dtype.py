"""Optimizers that keep their state in bfloat16 between steps: the arithmetic, bit by bit, against
the class itself with its state rounded by hand; what is refused; what bfloat16 cannot average."""

import pytest
import torch
from precision_models import random_parameters, set_random_gradients
from torch import nn

from runner.core.base.errors import ConfigError
from runner.precision import PolicyError, precision
from runner.precision.wide_step import attach_update, check_state_dtype, stuck_averages
from runner.training.lowbit_optimizers import AdamW4bit

BF16 = torch.bfloat16
SHAPES = ((64, 32), (3, 5), (64,), ())


def weights(dtype=torch.float32, shapes=SHAPES):
    return random_parameters(shapes, dtype)


class Momentum(torch.optim.Optimizer):
    """One of a user's own, which keeps its parameters in an attribute, too."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})
        self.mine = [*self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.sub_(state["average"], alpha=self.param_groups[0]["lr"])


def of_torch(name, **keys):
    return lambda params: getattr(torch.optim, name)(params, lr=1e-3, **keys)


OPTIMIZERS = {
    "sgd": of_torch("SGD", momentum=0.9),
    "adam": of_torch("Adam", amsgrad=True, foreach=False),
    "adamw": of_torch("AdamW"),
    "adamw fused": of_torch("AdamW", fused=True),
    "adagrad": of_torch("Adagrad"),
    "adadelta": of_torch("Adadelta"),
    "adamax": of_torch("Adamax"),
    "asgd": of_torch("ASGD"),
    "nadam": of_torch("NAdam"),
    "radam": of_torch("RAdam"),
    "rmsprop": of_torch("RMSprop", momentum=0.9, centered=True),
    "rprop": of_torch("Rprop"),
    "adafactor": of_torch("Adafactor"),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-3),
    "own": Momentum,
}


def round_state(optimizer):
    """What a user would write by hand after each step."""
    for p, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == p.shape and value.ndim:
                values[key] = value.to(BF16).float()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_classes_own_with_its_state_rounded(name):
    params, others = weights(), weights()
    optimizer, reference = OPTIMIZERS[name](params), OPTIMIZERS[name](others)
    attach_update(optimizer, "nearest", BF16)
    for step in range(20):
        set_random_gradients(params, step, BF16)
        set_random_gradients(others, step, BF16)
        optimizer.step()
        reference.step()
        round_state(reference)
    narrow = 0
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        assert p.dtype is torch.float32
        for key, value in reference.state.get(q, {}).items():
            kept = optimizer.state[p][key]
            if not isinstance(value, torch.Tensor):
                assert kept == value
                continue
            assert torch.equal(kept.float(), value.float())
            # Counts and factored moments are not numbers for each weight.
            is_narrow = value.shape == p.shape and value.ndim > 0
            assert kept.dtype is (BF16 if is_narrow else value.dtype)
            narrow += is_narrow
    assert narrow or name == "adafactor"


def test_float32_is_what_the_optimizer_does_by_itself():
    params, others = weights(), weights()
    optimizer, reference = (OPTIMIZERS["adamw"](some) for some in (params, others))
    attach_update(optimizer, "nearest", torch.float32)
    for step in range(5):
        set_random_gradients(params, step, BF16)
        set_random_gradients(others, step, BF16)
        optimizer.step()
        reference.step()
    assert all(map(torch.equal, params, others))
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize(
    ("make", "dtype", "text"),
    [
        (AdamW4bit, torch.float32, "AdamW4bit keeps its state in a format of its own"),
        (torch.optim.AdamW, torch.float64, "has weights in float64, whose state keeps their"),
        (torch.optim.AdamW, torch.complex64, "has weights in complex64"),
    ],
)
def test_what_cannot_keep_another_dtype_is_refused(make, dtype, text):
    with pytest.raises(ConfigError) as error:
        check_state_dtype("optimizer.state_dtype", make(weights(dtype)), BF16)
    (problem,) = error.value.problems
    assert problem.startswith("optimizer.state_dtype=bfloat16: ")
    for part in (text, "Allowed: ", "Leave optimizer.state_dtype out, or type "):
        assert part in problem


def test_parameters_in_an_attribute_matter_where_a_step_replaces_them():
    attach_update(Momentum(weights()), "nearest", BF16)
    with pytest.raises(ConfigError, match=r"its attribute mine.*or type optimizer.state_dtype=nu"):
        attach_update(Momentum(weights(BF16)), "nearest", BF16)


# Gradients of variance 1, then of variance 0.01: the average of their squares should follow.
@pytest.mark.parametrize(("beta", "has_warning"), [(0.999, True), (0.95, False)])
def test_an_average_of_slow_decay_never_falls(beta, has_warning):
    generator = torch.Generator().manual_seed(0)
    (p,) = params = weights(shapes=((1000,),))
    optimizer = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, beta))
    attach_update(optimizer, "nearest", BF16)
    for size in [1.0] * 2000 + [0.1] * 2000:
        p.grad = torch.randn(1000, generator=generator) * size
        optimizer.step()
    average = optimizer.state[p]["exp_avg_sq"].float().mean().item()
    assert (average > 1) == has_warning
    assert average == pytest.approx(0.01, rel=0.1) or has_warning
    assert stuck_averages(BF16, optimizer) == (["betas[1]=0.999"] if has_warning else [])
    assert stuck_averages(torch.float32, optimizer) == []


# In a loop of one's own.
def test_a_policy_keeps_state_in_bfloat16():
    policy = precision("bf16-mixed")
    model = policy.convert(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    policy.check(optimizer, state_dtype=BF16)
    with policy.session():
        with policy.forward():
            output = model(torch.ones(2, 8))
        policy.backward(policy.loss(nn.functional.mse_loss, output, torch.zeros(2, 8)))
        policy.step(optimizer)
    assert optimizer.state[model.weight]["exp_avg"].dtype is BF16
    with pytest.raises(PolicyError, match=r"Call it once, before the first policy.step"):
        policy.check(optimizer, state_dtype=torch.float32)
    policy.check(optimizer)


def test_a_policy_refuses_other_dtypes():
    policy = precision("32-true")
    model = policy.convert(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"Allowed: torch.float32, torch.bfloat16"):
        policy.check(optimizer, state_dtype=torch.float16)
