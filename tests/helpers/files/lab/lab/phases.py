"""Code that prints where it is, and stays there."""

import ctypes
import time
from pathlib import Path

import torch

from lab.data import Rows
from lab.nets import Net


def stay(seconds=300):
    Path("here").touch()
    time.sleep(seconds)


def slow_to_read(count):
    stay()


class Hung(Rows):
    """Its loading process never brings the fourth batch."""

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() and Path("first").exists() and index > 8:
            stay()
        return super().__getitem__(index)


def hung(count):
    return Hung(count), Rows(20)


class Slow(Net):
    """Stays in the constructor, the evaluation, the export, or a call of one step."""

    def __init__(self, where: str, **sizes) -> None:
        super().__init__(**sizes)
        self.where = where
        if where == "constructor":
            stay()

    def forward(self, x):
        if self.where == "export" and torch.compiler.is_exporting():
            stay()
        if self.where == "evaluation" and self.calls and not self.training:
            stay(1)  # a batch; a hundred of them
        if self.where == "step" and self.training and self.calls == 5:
            Path("here").touch()
            lock = ctypes.create_string_buffer(64)
            for _ in range(2):  # a deadlock: no handler of Python's runs any more
                ctypes.CDLL(None).pthread_mutex_lock(lock)
        if self.training:
            Path("first").touch()
            time.sleep(0.01)
        return super().forward(x)
