import torch
from torch import nn

from runner.precision import BasePrecision
from runner.precision.casting import cast_nest


class Factor(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def loud():
    """A model of digits whose activations are beyond float16's range in one place."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), Factor(1e7), Factor(1e-7), nn.ReLU(), nn.Linear(32, 10)
    )


class Half(BasePrecision):
    """Everything in float16, without a loss scale."""

    storage = compute = torch.float16

    def __init__(self, name, keep_fp32=()):
        self.name, self.keep_fp32 = name, keep_fp32

    def cast(self, inputs, plan):
        return cast_nest(inputs, self.storage)


class Single(BasePrecision):
    """Everything in float32."""

    def __init__(self, name):
        self.name = name
