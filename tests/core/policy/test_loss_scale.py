import random

import pytest
import torch
from states import CPU, OPTIMIZERS, are_equal
from torch import nn

from runner.core import tensor_facts
from runner.core.base.errors import ConfigError
from runner.core.policy.loss_scale import LossScale
from runner.precision.dynamic_loss_scale import DynamicLossScale, check_loss_scale
from runner.precision.gradient_hooks import gradient_hooks, watch_gradient_calls

SETTINGS = [
    {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3},
    {"init_scale": 300.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1},
    {"init_scale": 2.0**122, "growth_factor": 4.0, "backoff_factor": 0.9, "growth_interval": 2},
    {},
]


def seeded_parameters(count=2):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2)) for _ in range(count)]


def set_gradients(parameters, scale, seed, overflow):
    """Set scaled gradients, the same for the same seed; overflow puts an inf or nan somewhere."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator) * scale
    if overflow:
        bad = float("inf") if seed % 2 else float("nan")
        parameters[seed % len(parameters)].grad[0, 0] = bad


def state_tensors(optimizer):
    return [v for values in optimizer.state.values() for v in values.values()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("setting", SETTINGS, ids=range(4))
def test_a_dynamic_scale_equals_gradscaler_value_for_value(kind, setting):
    ours, theirs = seeded_parameters(), seeded_parameters()
    our_optimizer, their_optimizer = OPTIMIZERS[kind](ours), OPTIMIZERS[kind](theirs)
    scale, scaler = DynamicLossScale(CPU, **setting), torch.amp.GradScaler("cpu", **setting)
    chance = random.Random(0)
    skipped = grown = 0
    for step in range(40):
        # GradScaler leaves a fused optimizer's state unfilled where the first step overflows.
        overflow = chance.random() < 0.2 if step else "fused" not in kind
        loss = torch.tensor(1.5)
        before = scale.value
        assert torch.equal(scale.multiply(loss), scaler.scale(loss))
        set_gradients(ours, scale.value, step, overflow)
        set_gradients(theirs, scaler.get_scale(), step, overflow)
        found = scale.unscale([p.grad for p in ours])
        scaler.unscale_(their_optimizer)
        assert are_equal(*([torch.nan_to_num(p.grad, 9.0) for p in q] for q in (ours, theirs)))
        weights = [p.detach().clone() for p in ours]
        scale.step(our_optimizer, found)
        scaler.step(their_optimizer)
        skipped += found.item() == 1.0
        assert are_equal(weights, ours) == (found.item() == 1.0)
        scale.update([found])
        scaler.update()
        grown += (scale.value > before).item()
        assert are_equal(ours, theirs)
        assert are_equal(state_tensors(our_optimizer), state_tensors(their_optimizer))
        assert scale.value.item() == scaler.get_scale()
        assert scale.state_dict()["applied_in_a_row"] == scaler.state_dict()["_growth_tracker"]
    assert 0 < skipped < 40
    assert setting == {} or grown


def test_a_fixed_scale_stays_and_skips_overflows():
    parameters = seeded_parameters()
    optimizer = OPTIMIZERS["sgd"](parameters)
    scale = DynamicLossScale(CPU, fixed=128.0, growth_interval=1)
    assert scale.value.item() == 128.0
    for overflow in (True, False, False):
        before = parameters[0].detach().clone()
        set_gradients(parameters, 128.0, 2, overflow)
        found = scale.unscale([p.grad for p in parameters])
        scale.step(optimizer, found)
        scale.update([found])
        assert (found.item(), torch.equal(before, parameters[0])) == (float(overflow), overflow)
        assert scale.value.item() == 128.0


def test_the_scale_grows_once_for_an_iteration_of_several_optimizers():
    scale = DynamicLossScale(CPU, init_scale=2.0, growth_interval=2)
    ok = torch.zeros(())
    for wanted in (2.0, 4.0, 4.0, 8.0):
        scale.update([ok, None, ok])
        assert scale.value.item() == wanted


def test_the_value_is_the_scale_in_force():
    scale = DynamicLossScale(CPU, init_scale=8.0)
    value = scale.value
    scale.update([torch.ones(())])
    assert (value.item(), scale.value.item()) == (8.0, 4.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_loss_of_any_width_is_scaled_in_float32(dtype):
    scaled = DynamicLossScale(CPU, init_scale=2.0**17).multiply(torch.tensor(2.0, dtype=dtype))
    assert (scaled.dtype, scaled.item()) == (torch.float32, 2.0**18)


def test_gradients_of_all_dtypes_are_unscaled_together():
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    grads = [torch.full((2,), 6.0).to(d) for d in kinds]
    grads[4] += 2j
    scale = DynamicLossScale(CPU, init_scale=2.0)
    assert scale.unscale(grads).item() == 0.0
    assert [g[0].item() for g in grads] == [3.0, 3.0, 3.0, 3.0, 3 + 1j]
    for i, bad in ((0, torch.inf), (4, complex(0, torch.nan))):
        grads[i][0] = bad
        assert scale.unscale(grads).item() == 1.0
        grads[i][0] = 0
    assert scale.unscale([]).item() == 0.0


def test_the_default_dtype_does_not_matter():
    torch.set_default_dtype(torch.float64)
    try:
        scale = DynamicLossScale(CPU)
        found = scale.unscale([torch.ones(1)])
        scale.update([found])
    finally:
        torch.set_default_dtype(torch.float32)
    assert (scale.value.dtype, found.dtype) == (torch.float32, torch.float32)


def test_resuming_under_another_precision_says_so():
    with pytest.raises(ConfigError, match="holds no loss scale"):
        DynamicLossScale(CPU).load_state_dict({})
    with pytest.raises(ConfigError, match="Load it with precision=16-mixed"):
        LossScale().load_state_dict(DynamicLossScale(CPU).state_dict())
    LossScale().load_state_dict(LossScale().state_dict())


def test_no_scale_does_nothing():
    parameters = seeded_parameters()
    optimizer, scale = OPTIMIZERS["sgd"](parameters), LossScale()
    set_gradients(parameters, 1.0, 1, overflow=False)
    before = [p.grad.clone() for p in parameters]
    loss = torch.tensor(2.0)
    assert scale.multiply(loss) is loss
    assert scale.value is None
    assert scale.unscale([p.grad for p in parameters]) is None
    scale.step(optimizer, None)
    scale.update([None])
    assert are_equal(before, [p.grad for p in parameters])
    assert are_equal(
        parameters, [w - 0.1 * g for w, g in zip(seeded_parameters(), before, strict=True)]
    )


class OnDevice(DynamicLossScale):
    """Believes to be on an accelerator; PyTorch's fused CPU kernels read found-inf as well."""

    def __init__(self, **keywords):
        super().__init__(CPU, **keywords)
        self.device = torch.device("meta")

    def unscale(self, grads):
        self.device = CPU
        try:
            return super().unscale(grads)
        finally:
            self.device = torch.device("meta")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fused_kernel_skips_on_the_device(kind, first, monkeypatch):
    """torch's fused SGD leaves its momentum unfilled where the very first step is skipped."""
    reads = []
    flag = tensor_facts.HostFlag
    monkeypatch.setattr(tensor_facts, "HostFlag", lambda f: reads.append(1) or flag(f))
    ours, theirs = seeded_parameters(), seeded_parameters()
    optimizers = OPTIMIZERS[kind](ours), OPTIMIZERS[kind](theirs)
    torch.full((3, 2), 7.0)  # memory that an unfilled buffer would take
    for step, overflow in enumerate((first, False, True, False)):
        for scale, q, optimizer in zip(
            (OnDevice(fixed=4.0), DynamicLossScale(CPU, fixed=4.0)),
            (ours, theirs),
            optimizers,
            strict=True,
        ):
            set_gradients(q, 4.0, step, overflow)
            scale.step(optimizer, scale.unscale([p.grad for p in q]))
        assert are_equal(ours, theirs)
        assert (
            are_equal(*map(state_tensors, optimizers)) or overflow
        )  # Adam makes its state and skips
        assert not hasattr(optimizers[0], "found_inf")
    fused = kind.endswith("fused")
    unfilled = {"sgd-fused": 1 + first, "adamw-fused": 0}.get(kind, 4)
    assert len(reads) == 4 + (unfilled if fused else 4)


def test_the_fused_flags_are_removed_after_an_exception():
    class Fails(torch.optim.AdamW):
        def step(self, closure=None):
            assert (self.found_inf.item(), self.grad_scale) == (0.0, None)
            raise RuntimeError("inside")

    parameters = seeded_parameters()
    optimizer = Fails(parameters, fused=True)
    with pytest.raises(RuntimeError, match="inside"):
        OnDevice().step(optimizer, torch.zeros(()))
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_host_flag_has_the_value_of_the_devices(flag):
    assert tensor_facts.HostFlag(torch.tensor(flag)).is_set is bool(flag)


BAD = {
    "init_scale": (0, -1.0, "65536", None, float("inf"), float("nan"), True),
    "growth_factor": (1, 0.5, None, float("inf")),
    "backoff_factor": (0, 1, 1.5, float("nan")),
    "growth_interval": (0, 2.5, "2000", None, float("inf")),
    "fixed": (0, -2.0, "128", float("inf")),
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in BAD.items() for v in values])
def test_a_bad_value_is_refused(key, value):
    with pytest.raises(ConfigError) as error:
        check_loss_scale({key: value})
    (problem,) = error.value.problems
    assert problem.startswith(f"precision.loss_scale.{key}={value} cannot work. Allowed: ")


def test_every_bad_value_is_named_at_once():
    with pytest.raises(ConfigError) as error:
        check_loss_scale({"init_scale": 0, "growth": 2, "growth_interval": 5, "fixed": -1})
    assert [p.partition(" ")[0] for p in error.value.problems] == [
        "precision.loss_scale.init_scale=0",
        "precision.loss_scale.growth",
        "precision.loss_scale.fixed=-1",
    ]
    assert "Allowed: init_scale, growth_factor, backoff_factor, growth_interval, fixed." in str(
        error.value
    )


def test_good_values_pass_and_a_whole_float_is_an_interval():
    check_loss_scale({"init_scale": 1, "growth_factor": 1.01, "fixed": None})
    scale = DynamicLossScale(CPU, init_scale=1.0, growth_interval=2.0)
    for _ in range(2):
        scale.update([torch.zeros(())])
    assert scale.value.item() == 2.0


def test_the_constructor_refuses_a_bad_value():
    with pytest.raises(ConfigError, match=r"growth_interval=0 .*\n?"):
        DynamicLossScale(CPU, growth_interval=0)


def test_modules_and_parameters_with_hooks_on_gradients_are_named():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    model[0].weight.register_hook(lambda grad: grad)
    model[1].weight.register_post_accumulate_grad_hook(lambda p: None)
    model[2].register_full_backward_hook(lambda module, given, grad: None)
    assert gradient_hooks(model) == ["2", "0.weight", "1.weight"]


def test_gradients_within_a_forward_are_named_by_their_line():
    from torch.autograd import grad
    from torch.autograd.functional import jacobian

    lines = []
    x = torch.ones(3, requires_grad=True)
    with watch_gradient_calls(lines.append):
        for _ in range(2):
            grad(x.square().sum(), x)
        jacobian(torch.sin, x)
        x.square().sum().backward()
        x.sin().register_hook(lambda g: g)
    assert len(lines) == 4
    assert all("(test_loss_scale.py, line " in line for line in lines[:3])
    assert "lack the loss scale" in lines[0]
    assert "hooks see gradients" in lines[3]
