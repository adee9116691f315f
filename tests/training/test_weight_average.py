"""Averaged weights (train.ema): their numbers, evaluations, checkpoints and refusals."""

import math

import pytest
import torch
from run_folders import finished_run
from safetensors.torch import load_file
from states import are_equal
from torch import nn
from training_states import MLP, begin, resume_halfway, save, train

from runner.core.base.errors import ConfigError
from runner.core.config.schema import TrainSpec
from runner.core.record import checkpoint_file
from runner.training import state_dict
from runner.training.state_dict import checkpoint_state_dict
from runner.training.weight_average import WeightAverage, with_averaged_weights

DECAY = 0.75


def averages(state):
    return [tensor.clone() for tensor in state.evaluated.tensors()]


@pytest.mark.parametrize("name", ["32-true", "bf16-true", "64-true", "16-mixed"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_average_follows_its_formula_in_float32_at_least(compose, name, optimizer):
    eps = "optimizer.eps=1e-4" if optimizer == "adamw" else "optimizer.rest.eps=1e-4"
    spec = compose(*MLP, f"precision={name}", f"optimizer={optimizer}", eps, f"train.ema={DECAY}")
    state = begin(spec)
    wide = torch.float64 if name == "64-true" else torch.float32
    params = state.trainable_parameters
    wanted = [p.detach().clone().to(torch.float64) for p in params]
    for _ in range(4):
        train(state)
        for total, p in zip(wanted, params, strict=True):
            total.mul_(DECAY).add_(p.detach(), alpha=1 - DECAY)
    assert {tensor.dtype for tensor in state.evaluated.tensors()} == {wide}
    for found, total in zip(state.evaluated.tensors(), wanted, strict=True):
        torch.testing.assert_close(found.double(), total, rtol=1e-6, atol=1e-7)


def test_the_average_takes_the_memory_layout_that_the_weights_get_later():
    model = nn.Conv2d(3, 4, 3)
    average = WeightAverage(model, [[*model.parameters()]], DECAY)
    model.to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    average.end([None])
    found = average.tensors()[0]
    assert found.stride() == model.weight.stride()
    torch.testing.assert_close(found, before + (1 - DECAY))


def test_a_step_that_the_loss_scale_skips_leaves_the_average_as_it_is(compose):
    spec = compose(*MLP, "precision=16-mixed", f"train.ema={DECAY}")
    state = train(begin(spec))
    state.scale.load_state_dict({**state.scale.state_dict(), "scale": 2.0**30})
    before = averages(state)
    train(state)
    assert state.step == 2
    assert are_equal(before, averages(state))
    while torch.equal(before[0], state.evaluated.tensors()[0]):
        train(state)
        assert state.step < 40


def test_the_average_reads_nothing_on_the_device(compose, monkeypatch):
    spec = compose(*MLP, "precision=16-mixed", f"train.ema={DECAY}")
    state = train(begin(spec))

    def refuse(self, *_):
        raise AssertionError("a read of the device")

    for name in ("item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    state.evaluated.end([torch.zeros(())])
    state.evaluated.end([torch.ones(())])


@pytest.mark.parametrize("name", ["32-true", "bf16-true"])
def test_in_its_context_the_model_has_the_average_and_then_the_same_weights(compose, name):
    state = train(begin(compose(*MLP, f"precision={name}", f"train.ema={DECAY}")), 2)
    params = state.trainable_parameters
    before = [p.detach().clone() for p in params]
    with state.evaluated_weights():
        for p, average in zip(params, state.evaluated.tensors(), strict=True):
            assert torch.equal(p, average.to(p.dtype))
            assert not torch.equal(p, before[0])
    assert are_equal(params, before)


@pytest.mark.parametrize("name", ["32-true", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("split", [1, 3])
def test_a_resume_continues_the_average_bit_by_bit(compose, name, split):
    spec = compose(*MLP, f"precision={name}", "optimizer.eps=1e-4", f"train.ema={DECAY}")
    resume_halfway(spec, split)


def test_a_resume_with_and_without_an_average_says_so(compose):
    with_it = compose(*MLP, f"train.ema={DECAY}")
    without = compose(*MLP)
    saved = save(train(begin(with_it)), with_it)
    (note,) = state_dict.restore(begin(without, saved), saved, without, ())
    assert note == "the checkpoint's averaged weights are dropped"
    plain = save(train(begin(without)), without)
    assert "average" not in plain.content
    state = begin(with_it, plain)
    (note,) = state_dict.restore(state, plain, with_it, ())
    assert note == "the average of the weights begins here: the checkpoint holds none"
    assert are_equal(averages(state), state.trainable_parameters)


def test_an_average_of_other_weights_is_refused(compose):
    spec = compose(*MLP, f"train.ema={DECAY}")
    saved = save(train(begin(spec)), spec)
    del saved.content["average"]["weights"]["head.bias"]
    state = begin(spec, saved)
    with pytest.raises(ConfigError, match="its average is of other weights"):
        state_dict.restore(state, saved, spec, ())


class Tied(nn.Module):
    """A batch norm, a frozen layer, and a weight under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, inputs):
        return self.frozen(self.second(self.norm(self.first(inputs))))


def test_shared_weights_and_running_statistics_are_averaged_and_frozen_ones_are_not():
    torch.manual_seed(0)
    model = Tied()
    params = [p for p in model.parameters() if p.requires_grad]
    average = WeightAverage(model, [params], DECAY)
    names = set(average.state_dict()["weights"])
    statistics = {"norm.running_mean", "norm.running_var"}
    assert names == {"first.weight", "second.weight", "norm.weight", "norm.bias", *statistics}
    before = model.norm.running_mean.clone()
    model(torch.randn(8, 3))
    average.end([None])
    found = average.state_dict()["weights"]["norm.running_mean"]
    torch.testing.assert_close(found, DECAY * before + (1 - DECAY) * model.norm.running_mean)
    content = {"model": model.state_dict(), "average": average.state_dict()}
    merged = with_averaged_weights(content)["model"]
    assert torch.equal(merged["second.weight"], average.state_dict()["weights"]["first.weight"])
    assert torch.equal(merged["frozen.weight"], model.frozen.weight)


def test_complex_weights_are_averaged():
    model = nn.Module()
    model.wave = nn.Parameter(torch.tensor([1 + 2j, 0j]))
    average = WeightAverage(model, [[model.wave]], DECAY)
    with torch.no_grad():
        model.wave.zero_()
    average.end([None])
    average.end([torch.zeros(())])
    assert average.tensors()[0].tolist() == [DECAY**2 * (1 + 2j), 0]


EMA = ("train.ema=0.9", "train.eval_every=1", "checkpoint.safetensors=true")


def test_a_run_evaluates_saves_and_exports_the_average(quick, tmp_path):
    quick(*EMA, "precision=bf16-mixed").check_ok(
        "val/... are those of the averaged weights (train.ema=0.9; 0.0 MiB more)"
    )
    folder = finished_run(tmp_path)
    content = checkpoint_file.load(folder / "checkpoints" / "step-00000003.pt")
    weights = content["average"]["weights"]
    raw = load_file(folder / "model.safetensors")
    exported = load_file(folder / "model.ema.safetensors")
    for name, average in weights.items():
        assert torch.equal(exported[name], average)
        assert torch.equal(raw[name], content["model"][name])
        assert not torch.equal(raw[name], average)
    evaluated = quick("mode=evaluate", f"checkpoint={folder}").check_ok(
        "evaluates the averaged weights (train.ema=0.9)"
    )
    for key, value in content["metrics"].items():
        assert f"{value:.4g}" in evaluated.stdout, key


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, math.nan, 2.0])
def test_a_decay_that_is_none_is_refused(decay):
    (problem,) = TrainSpec(ema=decay).problems()
    assert f"train.ema={decay} is no decay. Allowed: above 0 and below 1" in problem


@pytest.mark.parametrize("damage", ["names", "kind", "shape"])
def test_a_file_whose_average_is_odd_is_refused(compose, tmp_path, damage):
    spec = compose(*MLP, f"train.ema={DECAY}")
    state = train(begin(spec))
    content = checkpoint_state_dict(state, spec)
    weights = content["average"]["weights"]
    odd = {"names": {"nobody": torch.ones(1)}, "shape": {"head.bias": torch.ones(3)}}
    content["average"] = {"decay": DECAY, "weights": {**weights, **odd.get(damage, {})}}
    if damage == "kind":
        content["average"] = [1]
    path = checkpoint_file.save(tmp_path, content, 1)
    with pytest.raises(ConfigError, match="was not written by this runner: its average"):
        checkpoint_file.load(path)


def test_packed_weights_are_not_averaged(compose):
    spec = compose(*MLP, "precision=bnb-nf4", "adapter=lora", f"train.ema={DECAY}")
    names = begin(spec).evaluated.state_dict()["weights"]
    assert names
    assert all("lora" in name for name in names)


def test_a_run_without_an_average_takes_the_steps_that_it_took_before(compose):
    plain = train(begin(compose(*MLP)), 2)
    averaged = train(begin(compose(*MLP, f"train.ema={DECAY}")), 2)
    assert are_equal(plain.trainable_parameters, averaged.trainable_parameters)
    assert plain.evaluated is None
