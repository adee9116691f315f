"""Gradients whose elements are clipped, as torch's own function clips them."""

import pytest
import torch
from states import CPU, are_equal, make_state, optimizer_gradients, regression_batch, regression_net
from torch import nn

from runner.config.schema import RunSpec, TrainSpec
from runner.precision import registry
from runner.training.optimizers import build_scheduled_optimizers
from runner.training.setup import TrainingSetup, build_state
from runner.training.step import train_step
from runner.training.tasks.regression import Regression
from runner.utils.errors import ConfigError


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


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.tensor([3 + 0.1j, 0.1 - 4j]))

    def forward(self, inputs):
        return (inputs[:, :1] * self.wave).abs().square()


def test_both_parts_of_a_complex_gradient_are_clipped():
    state, given = clipping_state("64-true", 0.5, Wave())
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
