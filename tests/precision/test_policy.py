"""A precision in a loop of one's own: it computes what the runner's loop computes, and refuses
calls that would compute something else."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from nets_that_pass_by import Reads
from one_off_nets import net
from states import CPU, are_equal, make_state, regression_batch, regression_net
from torch import nn
from torch.nn import functional as F

from runner.core.loop.step import train_step
from runner.precision import BasePrecision, ConfigError, Policy, PolicyError, Unavailable, precision

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true"]


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def batches(count):
    return [regression_batch(8, seed) for seed in range(count)]


class Loop:
    """A training loop over a policy, of regression_net."""

    def __init__(self, name="16-mixed", **keys):
        self.policy = precision(name, **keys)
        self.model = self.policy.convert(regression_net())
        self.optimizer = adam(self.model.parameters())

    def loss(self, batch):
        inputs, target = batch
        with self.policy.forward():
            output = self.model(self.policy.cast(inputs))
        return self.policy.loss(F.mse_loss, output, target)

    def backward(self, batch=None, **weight):
        self.policy.backward(self.loss(batch or regression_batch(8)), **weight)

    def train(self, batches, **clipping):
        losses = []
        with self.policy.session():
            for batch in batches:
                loss = self.loss(batch)
                self.policy.backward(loss)
                self.policy.step(self.optimizer, **clipping)
                losses.append(loss.item())
        return losses


def runner_losses(name, steps, clip_norm=None, **keys):
    """Losses and weights of the runner's own steps."""
    state = make_state(regression_net(), name, optimizer=adam, **keys)
    state.clip_norm = clip_norm
    with state.precision.session(state.model, CPU):
        losses = [train_step(state, micros).loss.item() for micros in steps]
    return losses, [*state.model.parameters()]


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_loop_computes_what_the_runner_computes(name, clip_norm):
    steps = batches(10)
    loop = Loop(name)
    losses = loop.train(steps, clip_norm=clip_norm)
    theirs, weights = runner_losses(name, [[batch] for batch in steps], clip_norm)
    assert losses == theirs
    assert losses[-1] != losses[0]
    assert are_equal(loop.model.parameters(), weights)


@pytest.mark.parametrize("keys", [{"autocast_loss": True}, {"keep_fp32": ["2"]}])
def test_keys_change_what_is_computed_as_in_the_runner(keys):
    steps = batches(4)
    losses = Loop("bf16-mixed", **keys).train(steps)
    assert losses == runner_losses("bf16-mixed", [[batch] for batch in steps], **keys)[0]


@pytest.mark.parametrize("name", ["32-true", "16-mixed", "bnb-int8-training"])
def test_micro_batches_add_up_as_in_the_runner(name):
    loop = Loop(name)
    policy = loop.policy
    with policy.session():
        for first, second in zip(batches(4)[::2], batches(4)[1::2], strict=True):
            for batch in (first, second):
                loop.backward(batch, weight=0.5)
            policy.step(loop.optimizer)
    pairs = [batches(4)[:2], batches(4)[2:]]
    assert are_equal(loop.model.parameters(), runner_losses(name, pairs)[1])


def test_an_overflow_skips_the_step_and_halves_the_scale():
    loop = Loop(loss_scale={"init_scale": 2.0**40})
    before = [p.detach().clone() for p in loop.model.parameters()]
    loop.train(batches(1))
    policy = loop.policy
    assert are_equal(before, loop.model.parameters())
    assert (policy.loss_scale, policy.steps, policy.skipped_steps) == (2.0**39, 1, 1)
    assert policy.was_last_step_skipped
    loop.train([regression_batch(8)] * 30)
    assert not policy.was_last_step_skipped
    assert policy.skipped_steps < policy.steps == 31


def test_a_loop_continues_exactly_from_its_state():
    steps = batches(12)
    keys = {"loss_scale": {"init_scale": 2.0**36, "growth_interval": 2}}
    whole = Loop(**keys).train(steps)
    first = Loop(**keys)
    first.train(steps[:5])
    second = Loop(**keys)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.policy.load_state_dict(first.policy.state_dict())
    assert second.policy.skipped_steps == first.policy.skipped_steps > 0
    assert second.train(steps[5:]) == whole[5:]


def test_two_optimizers_share_one_scale():
    policy = precision("16-mixed")
    parts = nn.ModuleDict({"one": regression_net(), "other": regression_net()})
    models = policy.convert(parts)
    one, other = adam(models["one"].parameters()), adam(models["other"].parameters())
    inputs, target = regression_batch(8)
    with policy.session():
        for _ in range(3):
            with policy.forward():
                outputs = [models[name](policy.cast(inputs)) for name in ("one", "other")]
            for output in outputs:
                policy.backward(policy.loss(F.mse_loss, output, target))
            policy.step(one, other, clip_norm=1.0)
    assert are_equal(models["one"].parameters(), models["other"].parameters())
    assert policy.steps == 3


def test_gradients_that_are_views_of_one_buffer_are_unscaled_by_each_optimizer():
    """As those of DistributedDataParallel with gradient_as_bucket_view=True."""
    loop = Loop()
    policy = loop.policy
    parameters = [*loop.model.parameters()]
    buffer = torch.zeros(sum(p.numel() for p in parameters))
    for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    halves = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:2], parameters[2:])]
    with policy.session():
        loop.backward()
        policy.unscale(halves[0])
        policy.unscale(halves[1])
        assert policy.clip(*halves, norm=1e9) < 100
        policy.step(*halves)


def test_gradients_may_be_changed_after_unscale():
    loop = Loop()
    policy = loop.policy
    with policy.session():
        loop.backward()
        policy.unscale(loop.optimizer)
        norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)
        assert policy.clip(loop.optimizer, norm=1.0).item() == pytest.approx(0.05, rel=1e-3)
        policy.step(loop.optimizer)
    assert 0.05 < norm < 100


# What a loop does wrong within its session, and the words of the refusal.
def calls_forward_before_convert(loop):
    precision("16-mixed").forward().__enter__()


def converts_twice(loop):
    loop.policy.convert(regression_net())


def nests_forward(loop):
    with loop.policy.forward(), loop.policy.forward():
        pass


def computes_the_loss_within_forward(loop):
    with loop.policy.forward():
        loop.policy.loss(F.mse_loss, torch.zeros(2), torch.zeros(2))


def leaves_forward_out(loop):
    inputs, target = regression_batch(8)
    loop.policy.backward(F.mse_loss(loop.model(inputs), target))


def takes_a_half_loss(loop):
    inputs, target = regression_batch(8)
    with loop.policy.forward():
        output = loop.model(inputs)
    loop.policy.backward((output - target.half()).square().mean())


def steps_without_backward(loop):
    loop.policy.step(loop.optimizer)


def names_no_optimizer(loop):
    loop.policy.step()


def steps_by_itself(loop):
    loop.backward()
    loop.optimizer.step()


def goes_backward_by_itself(loop):
    loop.backward()
    loop.loss(regression_batch(8)).backward()
    loop.policy.step(loop.optimizer)


def clips_before_unscaling(loop):
    loop.backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.policy.step(loop.optimizer)


def accumulates_after_unscaling(loop):
    loop.backward()
    loop.policy.unscale(loop.optimizer)
    loop.backward()


def leaves_gradients_of_another_step(loop):
    half = adam([loop.model[0].weight])
    for _ in range(2):
        loop.backward()
        loop.policy.step(half)


def converts_lazy_layers(loop):
    precision("16-mixed").convert(nn.LazyLinear(2))


def optimizes_another_model(loop):
    loop.policy.check(adam(regression_net().parameters()))


def moves_the_model(loop):
    loop.model.to("meta")
    loop.policy.check(adam(loop.model.parameters()))


def clips_by_nothing(loop):
    loop.policy.clip(loop.optimizer)


def saves_within_a_step(loop):
    loop.backward()
    loop.policy.state_dict()


MISTAKES = {
    calls_forward_before_convert: r"policy\.forward before policy\.convert",
    converts_twice: r"called already\. Convert several models together",
    nests_forward: r"policy\.forward within policy\.forward",
    computes_the_loss_within_forward: r"policy\.loss within policy\.forward",
    leaves_forward_out: r"policy\.backward without policy\.forward",
    takes_a_half_loss: r"The loss is float16.*policy\.loss",
    steps_without_backward: r"No gradients: policy\.backward\(loss\) was not called",
    names_no_optimizer: r"needs the optimizers",
    steps_by_itself: r"optimizer\.step\(\) of AdamW.*policy\.step",
    goes_backward_by_itself: r"gradients of AdamW are not as policy\.backward left them",
    clips_before_unscaling: r"gradients of AdamW are not as policy\.backward left them",
    accumulates_after_unscaling: r"policy\.backward after policy\.unscale",
    leaves_gradients_of_another_step: r"3 parameters still have a gradient from before",
    converts_lazy_layers: r"lazy layers, which have no weights yet",
    optimizes_another_model: r"that the converted model does not have",
    moves_the_model: r"parameter on meta, and this policy computes on cpu",
    clips_by_nothing: r"norm=None and value=None",
    saves_within_a_step: r"would lose the gradients",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_refused(mistake):
    loop = Loop("16-mixed")
    with loop.policy.session(), pytest.raises(PolicyError, match=MISTAKES[mistake]):
        mistake(loop)


def test_a_loop_without_a_session_is_refused():
    with pytest.raises(PolicyError, match=r"outside of policy\.session"):
        Loop("16-mixed").loss(regression_batch(8))


@pytest.mark.parametrize(
    ("arguments", "keys", "error", "message"),
    [
        (("17-mixed",), {}, ConfigError, "17-mixed is not known. Allowed: 64-true, 32-true"),
        (("16-mixed",), {"keep_fp23": []}, ConfigError, "takes no keep_fp23. It takes: name, dty"),
        (("16-mixed",), {"loss_scale": {"start": 1}}, ConfigError, "loss_scale.start is not kn"),
        (("16-mixed",), {"loss_scale": [1]}, ConfigError, r"loss_scale=\[1\] .*Allowed"),
        (("bf16-true",), {"update": "???"}, ConfigError, r"update=\?\?\?"),
        (("16-mixed",), {"keep_fp32": "head"}, ConfigError, "keep_fp32=head"),
        (("bf16-mixed",), {"loss_scale": {}}, ConfigError, "has none, because"),
        (("32-true",), {"config_dir": "no/where"}, ConfigError, "config_dir=no/where is no fold"),
        (("32-true", "gpu"), {}, ConfigError, "device='gpu' is not known. Allowed: auto, cpu"),
        (("float8-rowwise",), {}, Unavailable, "needs an NVIDIA GPU.*emulate=true"),
    ],
)
def test_wrong_names_and_keys_say_what_is_allowed(arguments, keys, error, message):
    with pytest.raises(error, match=message):
        precision(*arguments, **keys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_the_norm_of_gradients_that_are_not_finite_is_returned_as_it_is():
    policy = precision("32-true")
    model = policy.convert(nn.Linear(2, 1))
    optimizer = adam(model.parameters())
    with policy.session():
        with policy.forward():
            output = model(torch.full((1, 2), float("nan")))
        policy.backward(policy.loss(F.mse_loss, output, torch.zeros(1, 1)))
        assert policy.clip(optimizer, norm=1.0).isnan()


def test_a_missing_device_is_named_as_it_was_given():
    with pytest.raises(Unavailable, match=r"device=cuda is not on this machine.*Type device=cpu\."):
        precision("32-true", "cuda")


@pytest.mark.parametrize(
    ("name", "full"), [(16, "16-mixed"), ("bf16", "bf16-mixed"), (32, "32-true"), ("64", "64-true")]
)
def test_short_names_are_those_of_the_command_line(name, full):
    assert precision(name).precision.name == full


def test_given_keys_of_a_mapping_leave_the_others():
    policy = precision("16-mixed", loss_scale={"init_scale": 8.0})
    assert policy.loss_scale == 8.0
    assert policy.precision.loss_scale["growth_interval"] == 2000


def test_a_precision_of_ones_own_works_by_its_yaml(tmp_path):
    (tmp_path / "precision").mkdir()
    yaml = "defaults: [bf16-mixed, _self_]\nname: mine\nautocast_loss: true\n"
    (tmp_path / "precision" / "mine.yaml").write_text(yaml)
    policy = precision("mine", config_dir=tmp_path)
    assert (policy.precision.name, policy.precision.autocast_loss) == ("mine", True)


def test_an_object_of_a_precision_makes_a_policy_too():
    policy = Policy(Bfloat16(), "cpu")
    model = policy.convert(regression_net())
    assert (policy.device, model[0].weight.dtype) == (CPU, torch.bfloat16)
    with pytest.raises(Unavailable, match="not here"):
        Policy(Bfloat16(missing=True))


class Bfloat16(BasePrecision):
    name = "mine"
    storage = compute = torch.bfloat16

    def __init__(self, missing=False):
        self.missing = missing

    def require(self, device):
        if self.missing:
            raise Unavailable("not here", "take another")


def test_a_state_of_another_precision_is_refused():
    state = Loop("16-mixed").policy.state_dict()
    with pytest.raises(ConfigError, match="state is of precision=16-mixed"):
        Loop("bf16-mixed").policy.load_state_dict(state)
    with pytest.raises(ConfigError, match="no state of a policy"):
        Loop("16-mixed").policy.load_state_dict({"scale": 1.0})


def test_layers_that_the_model_passes_by_are_refused():
    policy = precision("float8-tensorwise", emulate=True)
    model = policy.convert(Reads())
    refused = pytest.raises(PolicyError, match="of a, b and does not call the layer")
    with policy.session(), refused, policy.forward():
        model(torch.zeros(2, 32))


def test_experts_that_are_packed_along_the_wrong_dimension_are_refused():
    for experts, right in ((["stack"], "stack:in_out"), (["stack:in_out"], "")):
        policy = precision("bnb-nf4", experts=experts)
        stack = nn.Parameter(torch.ones(2, 32, 32))
        model = policy.convert(net(lambda net, x: x @ net.stack[0], stack=stack))
        refusal = pytest.raises(PolicyError, match=rf"Make the policy with experts=\['{right}'")
        with policy.session(), refusal if right else nullcontext(), policy.forward():
            model(torch.zeros(2, 32))


def test_frozen_four_bit_weights_train_what_is_not_converted():
    policy = precision("bnb-nf4", ignore_modules=["2"], compute_dtype="float32")
    model = policy.convert(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
    assert policy.report.layer_counts == (1, 2)
    assert "converted 1 of 2 layers" in str(policy)
    optimizer = adam([p for p in model.parameters() if p.requires_grad])
    with policy.session():
        for _ in range(2):
            with policy.forward():
                output = model(policy.cast(torch.ones(4, 64)))
            policy.backward(policy.loss(F.mse_loss, output, torch.zeros(4, 1)))
            policy.step(optimizer)
    assert policy.gauges() == {}


def test_fp8_scales_can_be_read_and_resumed():
    def made():
        policy = precision("transformer-engine", emulate=True, recipe={"amax_history_len": 4})
        torch.manual_seed(0)
        model = policy.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
        return policy, model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(policy, model, optimizer, steps):
        losses = []
        with policy.session():
            for seed in steps:
                inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
                with policy.forward():
                    output = model(policy.cast(inputs))
                loss = policy.loss(F.mse_loss, output, inputs)
                policy.backward(loss)
                policy.step(optimizer)
                losses.append(loss.item())
            with torch.no_grad(), policy.eval_context(), policy.forward():
                model(policy.cast(inputs))
        return losses

    whole = train(*made(), range(6))
    first, second = made(), made()
    train(*first, range(3))
    for new, old in zip(second[1:], first[1:], strict=True):
        new.load_state_dict(old.state_dict())
    second[0].load_state_dict(first[0].state_dict())
    assert any(name.startswith("fp8/") for name in second[0].gauges())
    assert train(*second, range(3, 6)) == whole[3:]


@pytest.mark.parametrize("update", ["nearest", "master_weights"])
def test_backwards_of_one_step_are_added_in_float32(update):
    policy = precision("bf16-true", update=update)
    model = policy.convert(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with policy.session():
        for _ in range(512):
            with policy.forward():
                output = model(policy.cast(torch.ones(1, 1)))
            policy.backward(policy.loss(torch.sum, output), weight=1 / 512)
        # In bfloat16 the sum stops at 0.5.
        assert policy.clip(optimizer, norm=2.0).item() == 1.0
        policy.step(optimizer)
    assert model.weight.item() == 0.75


def test_gradients_of_a_generator_are_read_by_its_optimizer_in_its_parameters_dtype():
    policy = precision("bf16-true")
    model = policy.convert(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)]))
    one, other = (torch.optim.AdamW(part.parameters()) for part in model)
    inputs = torch.ones(2, 4)
    with policy.session():
        for _ in range(2):
            for _ in range(2):
                with policy.forward():
                    output = model[1](model[0](policy.cast(inputs)).detach())
                policy.backward(policy.loss(torch.mean, output))
            policy.step(other)
            with policy.forward():
                output = model[1](model[0](policy.cast(inputs)))
            policy.backward(policy.loss(torch.mean, output))
            policy.step(one)
            other.zero_grad()
    moments = [s["exp_avg"] for o in (one, other) for s in o.state.values()]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_step_of_the_optimizer_itself_reads_gradients_in_its_parameters_dtype(backwards):
    loop, other = Loop("bf16-true"), Loop("bf16-true")
    for one, step in (
        (loop, loop.optimizer.step),
        (other, partial(other.policy.step, other.optimizer)),
    ):
        with one.policy.session():
            for i in range(3):
                for _ in range(backwards):
                    one.backward(regression_batch(8, i))
                step()
                one.optimizer.zero_grad()
    assert are_equal(loop.model.parameters(), other.model.parameters())


def test_a_target_is_cast_for_a_loss_in_the_precision():
    dtypes = []
    policy = precision("bf16-true", autocast_loss=True)
    model = policy.convert(nn.Linear(2, 2))
    with policy.session():
        with policy.forward():
            output = model(torch.ones(1, 2, dtype=torch.bfloat16))
        policy.loss(lambda _, target: dtypes.append(target.dtype), output, torch.ones(1, 2))
    assert dtypes == [torch.bfloat16]


def test_hooks_on_scaled_gradients_are_warned_of():
    loop = Loop("16-mixed")
    loop.model[0].weight.register_hook(torch.Tensor.sign)
    with pytest.warns(UserWarning, match=r"hooks see gradients times the loss scale: 0\.weight"):
        loop.train(batches(1))
    loop = Loop("bf16-mixed")
    loop.model[0].weight.register_hook(torch.Tensor.sign)
    loop.train(batches(1))
