"""A tiny model, its data and its trainers, for callbacks in other trainers' loops."""

import torch
from torch import nn
from torch.nn import functional as F


class TinyNet(nn.Module):
    """A classifier of 4 numbers that returns its loss as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x, labels=None):
        logits = self.last(self.norm(self.first(x.to(self.first.weight.dtype))))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return {"loss": loss, "logits": logits}


class FailingNet(TinyNet):
    """Raises an error in its third forward."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.calls = 0

    def forward(self, x, labels=None):
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return super().forward(x, labels)


def examples(count=64):
    """Rows of numbers and labels, the same in each call."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.tensor(i % 2)}
        for i in range(count)
    ]


def tiny_net(seed=0):
    """The model with the same weights in each call."""
    torch.manual_seed(seed)
    return TinyNet()


def norm_of_gradients(model):
    """The 2-norm of all gradients, added up by hand in float64."""
    squares = [float(p.grad.double().square().sum()) for p in model.parameters()]
    return sum(squares) ** 0.5
