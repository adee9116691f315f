import time
from pathlib import Path

import torch
from torch import nn

RSS = []


def resident():
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * 4096 / 2**20


class Net(nn.Module):
    """One hidden layer with dropout; fails in the given training step where asked to."""

    def __init__(self, classes: int, width: int = 16, fail_at: int | None = None) -> None:
        super().__init__()
        RSS.append(resident())
        self.fail_at, self.calls = fail_at, 0
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(width), nn.ReLU(), nn.Dropout(0.5))
        self.body(torch.zeros(1, 1, 8, 8))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls == self.fail_at:
            raise ArithmeticError("failed as it was told to")
        return self.head(self.body(x))


class Slow(Net):
    """Fifty steps in a second at most."""

    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


class Half(Net):
    """Parameters that are not float32."""

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.head.half()


class Uninitialised(nn.Module):
    """A constructor without that of its base class."""

    def __init__(self, **sizes) -> None:
        self.head = nn.Linear(4, 4)
