import resource
from pathlib import Path

import psutil
import torch
from torch import nn

MIB, NOTE = 2**20, Path("taken")


class Greedy(nn.Module):
    """Keeps 4 MiB of activations for each layer and example. The first process notes what it has
    when its first step begins; later ones may have so many MiB more than that.

    Activations of 10 examples are above 32 MiB, which the C library maps and returns one by one:
    smaller ones leave gaps in its heap that differ from run to run.
    """

    def __init__(self, classes: int, mib: int, extra: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2**20))
        self.extra = nn.Parameter(torch.zeros(extra))
        self.head = nn.Linear(64, classes)
        if NOTE.exists():
            limit = int(NOTE.read_text()) + mib * MIB
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def forward(self, x):
        if self.training and not NOTE.exists():
            NOTE.write_text(str(psutil.Process().memory_info().vms))
        y = x.flatten(1)
        wide = y.mean(1, keepdim=True) * self.scale
        for _ in range(8):
            wide = wide.sin()
        return self.head(y) + self.extra[0] + wide.mean(1, keepdim=True)
