"""Optimizers that need a closure, or that have train() and eval(): found by what they do."""

from dataclasses import replace

import pytest
import torch
from states import are_equal, make_state, regression_batch, regression_net
from torch.nn import functional as F
from training_states import MLP, begin, resume_halfway, save, train

from runner.core.base.errors import ConfigError
from runner.core.loop.step import train_step
from runner.core.loop.train_state import ScheduledOptimizer
from runner.core.record.checkpoint_file import LoadedCheckpoint
from runner.training.setup import build_optimizer, closure_calls
from runner.training.weight_average import with_averaged_weights


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation; begins with the gradients that are there."""

    def __init__(self, params, lr=0.1, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None
        evaluate = torch.enable_grad()(closure)
        params = self.begin(evaluate)
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        moves = [p.grad * (self.defaults["rho"] / norm) for p in params]
        for p, move in zip(params, moves, strict=True):
            p.data.add_(move)
        evaluate()
        for p, move in zip(params, moves, strict=True):
            p.data.sub_(move).sub_(p.grad, alpha=self.defaults["lr"])

    def begin(self, evaluate):
        return [p for p in self.param_groups[0]["params"] if p.grad is not None]


class OwnSam(Sam):
    """Evaluates the loss itself, twice."""

    def begin(self, evaluate):
        evaluate()
        return super().begin(evaluate)


class Averaging(torch.optim.SGD):
    """SGD that evaluates the mean of its weights and those at the start."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.param_groups[0]["trains"] = False

    def step(self, closure=None):
        assert self.param_groups[0]["trains"]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("start", p.detach().clone())
        super().step(closure)

    def _lerp(self, trains, weight):
        group = self.param_groups[0]
        if group["trains"] != trains:
            for p, state in self.state.items():
                p.data.lerp_(state["start"], weight)
        group["trains"] = trains

    def eval(self):
        self._lerp(False, 0.5)

    def train(self):
        self._lerp(True, -1.0)


def spec_of(compose, name, *words):
    return replace(compose(*MLP, *words), optimizer={"_target_": f"{__name__}.{name}"})


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        ("torch.optim.AdamW", (False, False)),
        ("torch.optim.LBFGS", (True, False)),
        (f"{__name__}.Sam", (True, True)),
        (f"{__name__}.OwnSam", (True, False)),
        (f"{__name__}.Averaging", (False, False)),
    ],
)
def test_a_step_shows_whether_it_needs_a_closure(target, calls):
    path, _, name = target.rpartition(".")
    made = torch.optim if path == "torch.optim" else None
    kind = getattr(made, name) if made else globals()[name]
    optimizer = kind([torch.nn.Parameter(torch.ones(2))])
    assert closure_calls("optimizer", {"_target_": target}, optimizer) == calls


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("kind", [Sam, OwnSam])
def test_sam_steps_as_in_plain_pytorch(kind, micros):
    def scheduled(params):
        reads = kind is Sam
        return ScheduledOptimizer(kind(params), takes_closure=True, reads_gradients=reads)

    state = make_state(regression_net(), "64-true", optimizer=scheduled)
    reference = regression_net().double()
    optimizer = Sam(reference.parameters())
    inputs, target = (t.double() for t in regression_batch(9))

    def evaluate():
        optimizer.zero_grad()
        loss = F.mse_loss(reference(inputs), target)
        loss.backward()
        return loss

    parts = [*zip(inputs.chunk(micros), target.chunk(micros), strict=True)]
    for _ in range(3):
        wanted = evaluate()
        optimizer.step(evaluate)
        assert train_step(state, parts).loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    for p, q in zip(state.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_an_optimizer_that_evaluates_the_loss_reads_gradients_in_its_parameters_dtype():
    parts = [regression_batch(4, seed) for seed in (0, 1)]
    states = []
    for takes_closure in (True, False):

        def scheduled(params, takes_closure=takes_closure):
            return ScheduledOptimizer(torch.optim.AdamW(params), takes_closure=takes_closure)

        states.append(make_state(regression_net(), "bf16-true", optimizer=scheduled))
        states[-1].widened = {*states[-1].model.parameters()}
        for _ in range(2):
            train_step(states[-1], parts)
    assert are_equal(*(state.model.parameters() for state in states))


class FusedAveraging(Averaging):
    def __init__(self, params, lr=0.1, fused=None):
        super().__init__(params, lr)


def test_an_optimizer_with_modes_and_a_fused_kernel_begins_in_training_mode():
    node = {"_target_": f"{__name__}.FusedAveraging"}
    optimizer = build_optimizer("optimizer", node, [torch.nn.Parameter(torch.ones(2))])
    assert optimizer.param_groups[0]["trains"]


def test_the_weights_of_eval_are_evaluated_and_training_continues_from_its_own(compose):
    spec = spec_of(compose, "Averaging")
    state = begin(spec)
    start = [p.detach().clone() for p in state.trainable_parameters]
    train(state, 3)
    trained = [p.detach().clone() for p in state.trainable_parameters]
    with state.evaluated_weights():
        for p, first, last in zip(state.trainable_parameters, start, trained, strict=True):
            torch.testing.assert_close(p.detach(), (first + last) / 2)
        evaluated = [p.detach().clone() for p in state.trainable_parameters]
    assert are_equal(state.trainable_parameters, trained)
    saved: LoadedCheckpoint = save(state, spec)
    assert are_equal([*saved.content["model"].values()], trained)
    assert are_equal([*with_averaged_weights(saved.content)["model"].values()], evaluated)
    resume_halfway(spec)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("Sam", ["train.clip_norm=1.0"], "optimizer=sam evaluates the loss several times"),
        ("Sam", ["precision=16-mixed"], "without a loss scale. Type precision=32-true"),
        ("Sam", ["precision=bf16-true", "precision.update=kahan"], "Sam moves its weights by"),
        ("Averaging", ["train.ema=0.9"], "Averaging moves its weights by itself"),
    ],
)
def test_what_does_not_fit_is_refused(compose, name, words, message):
    with pytest.raises(ConfigError, match=message):
        begin(spec_of(compose, name, *words))
