import os
import signal

import torch
from torch import nn
from torch.utils.data import get_worker_info

from lab.data import Rows


class Times(nn.Module):
    """Multiplies from one training step on, or in that step only."""

    def __init__(self, factor: float, at: int, once: bool) -> None:
        super().__init__()
        self.factor, self.at, self.once = factor, at, once
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += self.training
        is_due = self.calls == self.at if self.once else self.calls >= self.at
        return x * self.factor if self.training and is_due else x


class Net(nn.Module):
    def __init__(
        self, classes: int, factor: float = 1.0, at: int = 1, crash: str = "", once: bool = False
    ) -> None:
        super().__init__()
        self.crash = crash
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Times(factor, at, once))
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        if self.crash and self.training and self.body[2].calls + 1 == self.body[2].at:
            raise RuntimeError(self.crash)
        return self.head(self.body(x))


class Faulty(Rows):
    """Rows of which one is at fault."""

    def __init__(self, count: int, fault: str, sample: int) -> None:
        super().__init__(count)
        self.fault, self.sample = fault, sample

    def __getitem__(self, index: int):
        x, y = super().__getitem__(index)
        if index != self.sample:
            return x, y
        if self.fault == "raise":
            raise ValueError(f"sample {index} is broken")
        if self.fault in ("exit", "kill") and get_worker_info() is not None:
            os._exit(3) if self.fault == "exit" else os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "rotten":
            return x * float("nan"), y
        return x, 12 if self.fault == "label" else y


def faulty(count: int = 60, fault: str = "none", sample: int = 17, val: int = 20, where="train"):
    if where == "train":
        return Faulty(count, fault, sample), Rows(val)
    sets = {"good": Rows(val), "bad": Faulty(count, fault, sample)}
    return (Rows(count), sets) if where == "val" else (Rows(count), Rows(val), sets)
