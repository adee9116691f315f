"""Training states of small models, on the CPU."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from runner.core.loop.step import train_step
from runner.core.loop.train_state import ScheduledOptimizer, TrainState
from runner.diagnostics.numerics.probe import Probe
from runner.precision import registry
from runner.training.own_state import OwnState, own_hooks
from runner.training.tasks.regression import Regression

CPU = torch.device("cpu")
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}
"""Functions of parameters: kinds whose steps are computed in different ways."""


def regression_net():
    """Return a network of three inputs and two outputs, the same in every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def regression_batch(count, seed=1):
    """Return inputs [count, 3] and targets [count, 2] for regression_net."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator)


def decaying_sgd(lr=0.1):
    """Return what makes SGD, whose rate falls with every step, of parameters."""

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=lr)
        return ScheduledOptimizer(optimizer, LambdaLR(optimizer, lambda step: 0.9**step))

    return make


def make_state(
    model, precision="32-true", *, task=None, optimizer=None, scale=None, device=CPU, **options
):
    """Return the state of a model before its first step.

    Args:
        model: converted in place.
        precision: a name; its options are the other keywords.
        task: regression if it is left out.
        optimizer: makes the optimizer of some parameters, or a ScheduledOptimizer of it; SGD with
            a rate of 0.1 if it is left out.
        scale: the precision's own if it is left out.
    """
    policy = registry.load_precision(precision, **options)
    model = policy.convert(model)[0].to(device)
    trainable = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(trainable) if optimizer else torch.optim.SGD(trainable, lr=0.1)
    driven = made if isinstance(made, ScheduledOptimizer) else ScheduledOptimizer(made)
    scale = scale or policy.scale(device)
    state = TrainState(model, policy, task or Regression(), scale, [driven], device)
    state.hooks.add(*own_hooks(state))
    return state


def follow_own_state(state):
    """Return what follows the model's own changes from now on, as it does in a run."""
    own_state = OwnState(state)
    state.hooks.add(own_state)
    return own_state


def optimizer_gradients(state):
    """Return a list that the next steps fill with the gradients that the optimizers are given.

    The optimizers do nothing with them.
    """
    seen = []
    state.scale.step = lambda optimizer, _: seen.extend(
        p.grad.clone() for group in optimizer.param_groups for p in group["params"]
    )
    return seen


def are_equal(some, others):
    """Return whether two sequences hold the same tensors, bit by bit."""
    some, others = [*some], [*others]
    return len(some) == len(others) and all(map(torch.equal, some, others))


def tensors_in(value, path=""):
    """Return all tensors of nested mappings and lists by their paths."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    children = value if isinstance(value, dict) else {}
    if isinstance(value, list | tuple):
        children = dict(enumerate(value))
    found = {}
    for key, child in children.items():
        found |= tensors_in(child, f"{path}.{key}")
    return found


def bits_of(tensor):
    """Return the bytes of a tensor's numbers; of a packed one's, which they stand for."""
    is_packed = type(tensor) is not torch.Tensor and hasattr(tensor, "dequantize")
    plain = tensor.dequantize() if is_packed else tensor
    return plain.detach().contiguous().flatten().view(torch.uint8)


def check_same_checkpoints(one, other):
    """Check that the contents of two checkpoints are of the same step and equal bit by bit."""
    first, second = tensors_in(one), tensors_in(other)
    assert first.keys() == second.keys()
    assert any(name.startswith(".model.") for name in first)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(bits_of(tensor), bits_of(second[name])), name
    for key in ("step", "epoch", "position", "loss_scale", "schedulers", "metrics"):
        assert one.get(key) == other.get(key), key


def measure_step(state, micros):
    """Return what the probe of numerics measures in a step."""
    found = []
    with Probe(state, found.append):
        train_step(state, micros)
    (snapshot,) = found
    return snapshot


def count_hooks(model):
    """Return how many hooks a model's modules and parameters hold."""
    held = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return sum(held) + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
