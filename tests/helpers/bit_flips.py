"""A network in which hardware computes wrong: some of its computations flip a bit."""

import os

import torch
from torch import nn


def flipped(x):
    """Return a copy whose first element has one bit flipped."""
    wrong = x.detach().clone()
    wrong.view(torch.uint8).view(-1)[x.itemsize - 2] ^= 1 << 5
    return wrong


class _FlipGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_faulty):
        ctx.is_faulty = is_faulty
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return (flipped(grad) if ctx.is_faulty() else grad), None


class Flip(nn.Module):
    """Passes its input on, with a bit flipped in some computations.

    Args:
        forward: numbers of the computations, from 1, whose output is wrong; 0 stands for all.
        backward: the same, of the gradient of the input.
        rank: the process in which it happens.
    """

    def __init__(self, forward=(), backward=(), rank=0):
        super().__init__()
        self.faulty_forwards = forward
        self.faulty_backwards = backward
        self.rank = rank
        # A list, because numbers are put back before a second computation, as no hardware is.
        self.computations = [0]

    def forward(self, x):
        if not self.training:
            return x
        self.computations[0] += 1
        if self._is_faulty(self.faulty_forwards):
            x = x + (flipped(x) - x).detach()
        return _FlipGradient.apply(x, lambda: self._is_faulty(self.faulty_backwards))

    def _is_faulty(self, numbers):
        here = int(os.environ.get("RANK", "0")) == self.rank
        return here and (0 in numbers or self.computations[0] in numbers)


class Net(nn.Module):
    """Dropout and batch statistics, a number that each forward changes, and a Flip.

    images [B, ...] to logits [B, classes]
    """

    def __init__(self, features=64, classes=10, flip_forward=(), flip_backward=(), rank=0):
        super().__init__()
        self.forwards = 0
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(features, 32),
            nn.BatchNorm1d(32),
            Flip(flip_forward, flip_backward, rank),
            nn.Dropout(0.2),
        )
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        self.forwards += 1
        return self.head(self.body(x))
