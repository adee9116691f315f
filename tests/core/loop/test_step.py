import math

import pytest
import torch
from one_off_nets import net
from states import (
    CPU,
    OPTIMIZERS,
    are_equal,
    make_state,
    optimizer_gradients,
    regression_batch,
    regression_net,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from runner.core import batch_layout
from runner.core.base.errors import ConfigError
from runner.core.config.schema import RunSpec, TrainSpec
from runner.core.loop.step import grad_norms, loss_of, train_step
from runner.core.loop.task import Task
from runner.core.loop.train_state import ScheduledOptimizer, TrainState
from runner.core.run.run_context import TrainingSetup
from runner.precision import registry
from runner.precision.dynamic_loss_scale import DynamicLossScale
from runner.training.own_state import own_hooks
from runner.training.setup import build_scheduled_optimizers, build_state
from runner.training.tasks.regression import Regression


def training_state(
    name, model=None, kinds=("adamw",), clip=None, schedule=True, task=None, **changes
):
    """A state; with several kinds of optimizers each has one of the model's parts."""
    precision = registry.load_precision(name, **changes)
    model, _ = precision.convert(model or regression_net())
    parts = [model] if len(kinds) == 1 else [model[0], model[2]]
    driven = []
    for kind, part in zip(kinds, parts, strict=True):
        optimizer = OPTIMIZERS[kind](part.parameters())
        halved = LambdaLR(optimizer, lambda step: 0.5**step) if schedule else None
        driven.append(ScheduledOptimizer(optimizer, halved))
    task = task or Regression()
    state = TrainState(model, precision, task, precision.scale(CPU), driven, CPU, clip)
    state.hooks.add(*own_hooks(state))
    return state


def snapshot(state):
    tensors = [p.detach().clone() for p in state.model.parameters()]
    tensors += [t.clone() for t in state.optimizer_tensors()]
    return tensors, [d.scheduler.state_dict() for d in state.optimizers if d.scheduler]


def gradients(state, micros):
    """Return what the optimizers would be given, and the record, of a step that ends before it."""
    seen = optimizer_gradients(state)
    for d in state.optimizers:
        d.scheduler = None
    return seen, train_step(state, micros)


# The step's result


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ["32-true", "16-mixed"])
def test_equals_a_plain_training_loop(name, kind):
    """For 16-mixed the documented AMP recipe with GradScaler."""
    state = training_state(name, kinds=[kind], clip=0.05, schedule=False)
    model = regression_net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    mixed = name == "16-mixed"
    scaler = torch.amp.GradScaler("cpu", enabled=mixed)
    for seed in range(6):
        inputs, target = regression_batch(4, seed)
        train_step(state, [(inputs, target)])
        with torch.autocast("cpu", torch.float16, enabled=mixed):
            output = model(inputs)
        scaler.scale(Regression().loss(output.float(), target)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert are_equal(state.model.parameters(), model.parameters())
    assert all(p.grad is None for p in state.model.parameters())


@pytest.mark.parametrize("name", ["32-true", "64-true", "16-mixed", "bf16-true"])
def test_uneven_micro_batches_equal_one_large_batch(name):
    inputs, target = regression_batch(10)
    micros = [*zip(inputs.split(4), target.split(4), strict=True)]
    assert [len(x) for x, _ in micros] == [4, 4, 2]
    keywords = {"loss_scale": {"init_scale": 8.0}} if name == "16-mixed" else {}
    whole, one = gradients(training_state(name, **keywords), [(inputs, target)])
    parts, many = gradients(training_state(name, **keywords), micros)
    close = {"64-true": 1e-14, "32-true": 1e-6}.get(name, 1e-2)
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, rtol=close, atol=close)
    assert torch.allclose(one.loss, many.loss, rtol=close)
    assert (one.examples, many.examples) == (10, 10)


def test_a_micro_batch_alone_is_not_reweighted():
    state = training_state("32-true")
    inputs, target = regression_batch(3)
    wanted = loss_of(state, inputs, target).item()
    assert train_step(state, [(inputs, target)]).loss.item() == wanted


def test_the_scale_moves_once_per_boundary(monkeypatch):
    updates = []
    real = DynamicLossScale.update
    monkeypatch.setattr(
        DynamicLossScale, "update", lambda self, found: (updates.append(1), real(self, found))
    )
    state = training_state("16-mixed", loss_scale={"init_scale": 4.0, "growth_interval": 1})
    train_step(state, [regression_batch(4), regression_batch(4, 2), regression_batch(2, 3)])
    assert updates == [1]
    assert state.scale.value.item() == 8.0


# Overflows


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_skipped_step_changes_nothing_but_the_scale(kind, clip):
    state = training_state("16-mixed", kinds=[kind], clip=clip)
    for _ in range(3):
        train_step(state, [regression_batch(4)])
    state.scale.load_state_dict({**state.scale.state_dict(), "scale": 2.0**40})
    for d in state.optimizers:
        d.advance_schedule()
    before, schedules = snapshot(state)
    pending = train_step(state, [regression_batch(4)])
    for d in state.optimizers:
        d.advance_schedule()
    after, schedules_after = snapshot(state)
    assert are_equal(before, after)
    assert schedules == schedules_after
    assert (pending.scale.item(), state.scale.value.item()) == (2.0**40, 2.0**39)
    assert pending.found_inf.item() == 1.0
    assert not math.isfinite(torch.linalg.vector_norm(pending.norms).item())
    assert math.isfinite(pending.loss.item())
    assert all(p.grad is None for p in state.trainable_parameters)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_schedule_counts_applied_steps_and_the_rate_is_the_one_in_force(kind):
    scale = {"init_scale": 2.0**26, "growth_interval": 3}
    state = training_state("16-mixed", kinds=[kind], loss_scale=scale)
    rates, applied = [], 0
    for _ in range(30):
        before = [p.detach().clone() for p in state.trainable_parameters]
        wanted = 0.1 * 0.5**applied
        pending = train_step(state, [regression_batch(4)])
        assert pending.lr == pytest.approx(wanted)
        skipped = pending.found_inf.item() == 1.0
        assert are_equal(before, state.trainable_parameters) == skipped
        applied += not skipped
        rates.append(skipped)
    assert rates[0]
    assert 1 < sum(rates) < 30
    state.optimizers[0].advance_schedule()
    assert state.optimizers[0].scheduler.last_epoch == applied


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "64-true"])
def test_without_a_scale_each_step_moves_the_schedule(name):
    state = training_state(name)
    assert [train_step(state, [regression_batch(4)]).lr for _ in range(3)] == [0.1, 0.05, 0.025]
    assert state.optimizers[0].scheduler.last_epoch == 3


@pytest.mark.parametrize("clip", [None, 1e6])
def test_an_overflow_of_one_optimizer_leaves_the_other_alone(clip):
    """The last layer's gradients overflow by a hook; the first layer's step is the usual one."""
    keywords = {"kinds": ("adamw", "sgd"), "clip": clip, "loss_scale": {"init_scale": 8.0}}
    state, twin = training_state("16-mixed", **keywords), training_state("16-mixed", **keywords)
    state.model[2].bias.register_hook(lambda g: g * torch.inf)
    frozen = [p.detach().clone() for p in state.model[2].parameters()]
    pending = train_step(state, [regression_batch(4)])
    train_step(twin, [regression_batch(4)])
    assert are_equal(state.model[0].parameters(), twin.model[0].parameters())
    assert are_equal(state.model[2].parameters(), frozen)
    assert not state.optimizers[1].optimizer.state
    assert (pending.found_inf.item(), pending.scale.item()) == (1.0, 8.0)
    assert (state.scale.value.item(), twin.scale.value.item()) == (4.0, 8.0)
    for d in state.optimizers:
        d.advance_schedule()
    assert [d.scheduler.last_epoch for d in state.optimizers] == [1, 0]


def test_an_overflow_in_any_micro_batch_skips_the_step():
    state = training_state("16-mixed", loss_scale={"init_scale": 2.0**30})
    before = [p.detach().clone() for p in state.trainable_parameters]
    pending = train_step(state, [regression_batch(4), regression_batch(4, 2)])
    assert pending.found_inf.item() == 1.0
    assert are_equal(before, state.trainable_parameters)
    assert state.scale.value.item() == 2.0**29


# Norms and clipping


@pytest.mark.parametrize("name", ["64-true", "32-true", "16-mixed", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("clip", [None, 0.01, 1e6])
def test_the_norm_is_unscaled_and_from_before_clipping(name, clip):
    keywords = {"loss_scale": {"init_scale": 1024.0}} if name == "16-mixed" else {}
    state = training_state(name, clip=clip, **keywords)
    reference = regression_net().double()
    inputs, target = regression_batch(8)
    Regression().loss(reference(inputs.double()), target.double()).backward()
    exact = math.sqrt(sum(p.grad.square().sum().item() for p in reference.parameters()))
    given, pending = gradients(state, [(inputs, target)])
    close = {"64-true": 1e-12, "32-true": 1e-6}.get(name, 2e-2)
    assert torch.linalg.vector_norm(pending.norms).item() == pytest.approx(exact, rel=close)
    clipped = math.sqrt(sum(g.double().square().sum().item() for g in given))
    wanted = min(exact, clip or exact)
    assert clipped == pytest.approx(wanted, rel=max(close, 1e-4))
    direction = torch.cat([g.double().flatten() for g in given])
    exact_direction = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert torch.cosine_similarity(direction, exact_direction, 0) > 1 - close


def test_one_norm_over_all_optimizers():
    a, _ = gradients(training_state("32-true", clip=0.01), [regression_batch(4)])
    apart = training_state("32-true", kinds=("adamw", "sgd"), clip=0.01)
    b, _ = gradients(apart, [regression_batch(4)])
    assert are_equal(a, b)
    total = math.sqrt(sum(g.square().sum().item() for g in a))
    assert total == pytest.approx(0.01, rel=1e-3)


NARROW = [torch.float16, torch.bfloat16, torch.float32, torch.complex64]


@pytest.mark.parametrize("wide", [[], [torch.float64, torch.complex128]], ids=["narrow", "wide"])
def test_norms_of_mixed_dtypes(wide):
    kinds = [*NARROW, *wide]
    grads = [torch.full((3, 2), 2.0).to(kind) for kind in kinds]
    for g in grads:
        if g.is_complex():
            g += 1j
    norms = grad_norms(grads)
    assert norms.dtype is (torch.float64 if wide else torch.float32)
    exact = [math.sqrt(6 * 5) if k.is_complex else math.sqrt(24) for k in kinds]
    assert norms.tolist() == pytest.approx(exact, rel=1e-6)


def test_a_float16_norm_is_added_up_wide():
    grads = [torch.full((1000,), 5e4), torch.full((4,), 1e-5)]
    big, small = grad_norms([grad.half() for grad in grads]).tolist()
    assert big == pytest.approx(5e4 * math.sqrt(1000), rel=1e-3)
    assert small == pytest.approx(2e-5, rel=1e-2)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_clipping_mixed_dtypes_in_one_step(clip):
    state = training_state("bf16-true", clip=clip, keep_fp32=["2"])
    given, _ = gradients(state, [regression_batch(4)])
    assert [g.dtype for g in given] == [torch.bfloat16] * 2 + [torch.float32] * 2
    total = math.sqrt(sum(g.double().square().sum().item() for g in given))
    assert clip is None or total == pytest.approx(clip, rel=2e-2)
    fused = training_state("bf16-true", clip=clip, keep_fp32=["2"], kinds=["adamw-fused"])
    train_step(fused, [regression_batch(4)])


def test_a_loss_that_reaches_no_parameter_is_refused():
    state = training_state("32-true")
    state.model[2].register_forward_hook(lambda m, a, out: out.detach().requires_grad_())
    with pytest.raises(RuntimeError, match="no parameter received a gradient"):
        train_step(state, [regression_batch(4)])


def test_parameters_without_a_gradient_are_passed_over():
    model = nn.Sequential(*regression_net(), nn.Linear(2, 2))
    state = training_state("16-mixed", model=model, loss_scale={"init_scale": 8.0}, clip=0.1)
    state.model[3].forward = lambda x: x
    before = model[3].weight.detach().clone()
    pending = train_step(state, [regression_batch(4)])
    assert (len(pending.norms), pending.found_inf.item()) == (4, 0.0)
    assert torch.equal(model[3].weight, before)


# Complex parameters


class Wave(nn.Module):
    """Its gradient comes from autograd as a lazy conjugate, which view_as_real refuses."""

    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.tensor([1 + 2j, 0.5 - 1j]))

    def forward(self, x):
        return (self.wave.conj() * x).real


@pytest.mark.parametrize("name", ["32-true", "64-true", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("micros", [1, 2])
def test_complex_parameters_are_trained(name, kind, micros):
    keywords = {"loss_scale": {"init_scale": 4.0}} if name == "16-mixed" else {}
    state = training_state(name, model=Wave(), kinds=[kind], clip=0.1, schedule=False, **keywords)
    reference = Wave()
    optimizer = OPTIMIZERS[kind](reference.parameters())
    inputs, target = torch.ones(4, 2), torch.zeros(4, 2)
    if name == "bf16-true":
        state.cast = lambda x: x  # the complex kernels take no bfloat16
    for _ in range(2):
        pending = train_step(state, [(inputs, target)] * micros)
        Regression().loss(reference(inputs), target).backward()
        reference.wave.grad = reference.wave.grad.resolve_conj()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.linalg.vector_norm(pending.norms).item() == pytest.approx(norm.item())
        assert torch.allclose(state.model.wave.to(torch.complex64), reference.wave, atol=1e-6)


# LBFGS


def lbfgs(name, schedule=True):
    def made(parameters):
        optimizer = torch.optim.LBFGS(parameters, lr=1.0, max_iter=4)
        halved = LambdaLR(optimizer, lambda step: 0.5**step) if schedule else None
        return ScheduledOptimizer(optimizer, halved, takes_closure=True)

    return make_state(regression_net(), name, optimizer=made)


@pytest.mark.parametrize("micros", [1, 3])
def test_lbfgs_takes_a_closure(micros):
    state, reference = lbfgs("64-true", schedule=False), regression_net().double()
    optimizer = torch.optim.LBFGS(reference.parameters(), lr=1.0, max_iter=4)
    inputs, target = (t.double() for t in regression_batch(9))

    def closure():
        optimizer.zero_grad()
        loss = Regression().loss(reference(inputs), target)
        loss.backward()
        return loss

    parts = [*zip(inputs.chunk(micros), target.chunk(micros), strict=True)]
    for _ in range(3):
        before = closure()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in reference.parameters()))
        optimizer.step(closure)
        pending = train_step(state, parts)
        assert pending.loss.item() == pytest.approx(before.item(), rel=1e-9)
        assert torch.linalg.vector_norm(pending.norms).item() == pytest.approx(norm, rel=1e-9)
        for p, q in zip(state.model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-7)
        assert (pending.scale, pending.found_inf, pending.examples) == (None, None, 9)
    assert all(p.grad is None for p in state.trainable_parameters)


def test_the_rate_of_a_closure_step_is_the_one_in_force():
    state = lbfgs("32-true")
    assert [train_step(state, [regression_batch(9)]).lr for _ in range(3)] == [1.0, 0.5, 0.25]


# Nothing is read from the device


class Reads(TorchDispatchMode):
    """Fails at a read that would stall an accelerator. The step counters of optimizers that are
    not fused lie on the host always."""

    def __init__(self, state):
        super().__init__()
        self.optimizers = state.optimizers

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"):
            held = (s for d in self.optimizers for s in d.optimizer.state.values())
            assert any(args[0] is s.get("step") for s in held), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ["32-true", "16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_no_step_reads_the_device(name, kind, clip, monkeypatch):
    def refuse(self):
        raise AssertionError("tolist() in a step")

    state = training_state(name, kinds=[kind], clip=clip)
    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    with Reads(state):
        for seed in range(3):
            train_step(state, [regression_batch(4, seed), regression_batch(2, seed)])
    assert state.step == 3


def test_a_read_would_be_seen():
    with (
        pytest.raises(AssertionError, match="_local_scalar_dense"),
        Reads(training_state("32-true")),
    ):
        torch.ones(1).item()


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((torch.zeros(5, 2), torch.zeros(4)), 4),
        (({"x": torch.zeros(5)}, torch.zeros(3)), 3),
        ((torch.zeros(5, 2), {"boxes": torch.zeros(4)}), 5),
        (({"x": 1}, {"y": 2}), 1),
    ],
)
def test_examples_in_a_batch(batch, count):
    assert batch_layout.examples_in(batch) == count


class Nested(Task):
    quality, direction = "val/loss", "min"

    def loss(self, output, target):
        self.saw = output["y"].dtype, target["y"].dtype, target["n"].dtype
        return (output["y"] - target["y"]).square().mean()

    def totals(self, output, target): ...

    def summarise(self, totals): ...


@pytest.mark.parametrize(
    ("name", "wide"), [("bf16-true", torch.float32), ("64-true", torch.float64)]
)
def test_nested_batches_are_cast_at_both_ends(name, wide):
    model = net(lambda net, batch: {"y": net.body(batch["x"])}, body=regression_net())
    state = training_state(name, model=model, task=Nested())
    inputs, target = regression_batch(4)
    train_step(state, [({"x": inputs}, {"y": target, "n": torch.arange(4)})])
    assert state.task.saw == (wide, wide, torch.int64)


def clipping_state(name, limit, model=None, **options):
    """A state whose gradients are clipped, and the list of those that its optimizer is given."""
    state = make_state(model or regression_net(), name, **options)
    state.clip_value = limit
    return state, optimizer_gradients(state)


@pytest.mark.parametrize("name", ["64-true", "32-true", "bf16-true"])
def test_each_element_is_clipped_as_torch_does_and_the_norm_is_from_before(name):
    batch = regression_batch(8)
    free, whole = clipping_state(name, None)
    record = train_step(free, [batch])
    clipped, given = clipping_state(name, 0.05)
    assert torch.equal(train_step(clipped, [batch]).norms, record.norms)
    wanted = []
    for gradient in whole:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        nn.utils.clip_grad_value_([parameter], 0.05)
        wanted.append(parameter.grad)
    assert are_equal(given, wanted)
    assert not are_equal(given, whole)


def test_the_gradients_are_unscaled_before():
    scale = {"loss_scale": {"init_scale": 1024.0}}
    batch = regression_batch(8)
    _, given = state_after_a_step("16-mixed", batch, **scale)
    _, plain = state_after_a_step("bf16-mixed", batch)
    assert max(g.abs().max() for g in given) == pytest.approx(0.05)
    for one, other in zip(given, plain, strict=True):
        assert torch.allclose(one, other, atol=5e-3)


def state_after_a_step(name, batch, **options):
    state, given = clipping_state(name, 0.05, **options)
    train_step(state, [batch])
    return state, given


@pytest.mark.parametrize("name", ["16-true", "32-true"])
def test_a_limit_that_the_dtype_cannot_hold_clips_nothing(name):
    state, given = clipping_state(name, 1e308)
    free, whole = clipping_state(name, None)
    for one in (state, free):
        train_step(one, [regression_batch(4)])
    assert are_equal(given, whole)


def test_both_parts_of_a_complex_gradient_are_clipped():
    wave = nn.Parameter(torch.tensor([3 + 0.1j, 0.1 - 4j]))
    squares = net(lambda net, inputs: (inputs[:, :1] * net.wave).abs().square(), wave=wave)
    state, given = clipping_state("64-true", 0.5, squares)
    train_step(state, [regression_batch(4)])
    (gradient,) = given
    parts = torch.view_as_real(gradient)
    assert parts.abs().tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_the_key_reaches_the_step_and_lbfgs_refuses_it():
    model = regression_net()
    precision = registry.load_precision("32-true")
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1}
    spec = RunSpec(train=TrainSpec(clip_value=0.25), optimizer=sgd)
    state = build_state(TrainingSetup(spec, precision, Regression(), CPU), model, 5)
    assert (state.clip_value, state.clip_norm) == (0.25, None)
    lbfgs = RunSpec(train=spec.train, optimizer={"_target_": "torch.optim.LBFGS"})
    with pytest.raises(ConfigError, match=r"works alone and without train\.clip_norm and train\."):
        build_scheduled_optimizers(lbfgs, model, precision, 5)


@pytest.mark.parametrize("update", ["nearest", "master_weights"])
@pytest.mark.parametrize(("is_wide", "norm"), [(True, 1.0), (False, 0.5)])
def test_micro_batches_are_added_in_float32_to_gradients_of_16_bits(update, is_wide, norm):
    """512 gradients of 1 / 512 are 1; in bfloat16 their sum stops at 0.5."""
    precision = registry.load_precision("bf16-true", update=update)
    model, _ = precision.convert(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.weight)
    train = {"accumulate": 512, "accumulate_float32": is_wide}
    spec = RunSpec(optimizer={"_target_": "torch.optim.SGD", "lr": 0.25}, train=TrainSpec(**train))
    state = build_state(TrainingSetup(spec, precision, Regression(), CPU), model, total_steps=2)
    # The loss is the square of w - 1 / 2.
    micros = [(torch.ones(1, 1), torch.full((1, 1), 0.5))] * 512
    assert float(train_step(state, micros).norms) == norm
    assert model.weight.item() == 1 - 0.25 * norm
    assert train_step(state, micros[:1]).norms.item() == 2 * (0.5 - 0.25 * norm)
