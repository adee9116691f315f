"""Two towers with a contrastive loss, whose negatives are the batch's other examples."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from runner.core.loop.task import Task

EXAMPLES = 13


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return {"a": self.a(x[:, 0]), "b": self.b(x[:, 1]), "scale": self.scale.exp()[0]}


def loss_of(output):
    a, b = (F.normalize(output[name], dim=-1) for name in ("a", "b"))
    scores = a @ b.t() * output["scale"]
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class Contrastive(Task):
    quality, direction = "val/loss", "min"

    def loss(self, output, target):
        return loss_of(output)

    def totals(self, output, target):
        return torch.stack(
            [self.loss(output, target) * len(target), target.new_tensor(len(target))]
        )

    def summarise(self, totals):
        return {"val/loss": totals[0] / totals[1]}


def pairs(count=EXAMPLES):
    return torch.randn(count, 2, 6, generator=torch.Generator().manual_seed(1)).double()


def sets():
    data = TensorDataset(pairs(), torch.zeros(EXAMPLES).double())
    return data, data
