"""Networks of a user's own."""

import os
import signal
from pathlib import Path

import torch
from torch import nn


class Drops(nn.Module):
    """Draws at random in each step, so that every process's stream matters."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head, self.rate = nn.Linear(16, 10), rate

    def forward(self, x):
        return self.head(nn.functional.dropout(self.body(x), self.rate, self.training))


class Dies(Drops):
    """In the second process, in its eighth step, unless it was started anew."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if self.steps == 8 and first and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Stays(nn.Module):
    """Nothing of it depends on how many processes there are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.head = nn.Linear(16, 10)
        self.scale = nn.Parameter(torch.ones(3))  # fewer rows than some have processes

    def forward(self, x):
        return self.head(self.body(x)) * self.scale.mean()


class Parts(nn.Module):
    """The second process alone reads a weight in place of calling its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        h = self.first(x.flatten(1)).relu()
        if os.environ["RANK"] == "1":
            return self.head(nn.functional.linear(h, self.second.weight, self.second.bias))
        return self.head(self.second(h))


class MadeOn(nn.Module):
    """A network that writes down on which devices it is made, with all kinds of values to fill."""

    def __init__(self, log, stray=False):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 16, bias=False)
        self.tied = nn.Linear(64, 16, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("scale", torch.arange(64.0) / 64, persistent=False)
        if stray:
            self.shift = torch.ones(64)
        with Path(f"{log}-{os.environ['RANK']}.txt").open("a") as file:
            file.write(f"{self.scale.device} ")

    def forward(self, x):
        h = x.flatten(1) * self.scale + getattr(self, "shift", 0)
        for layer in self.body:
            h = layer(h).relu()
        h = self.norm(h)
        return self.head(h) + self.tied(h)


class GatedBlock(nn.Module):
    """A repeated block of operations that a compiler fuses."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64))
        self.rest = nn.Identity()

    def forward(self, x):
        return self.rest(nn.functional.silu(x * self.scale) * self.scale + x)


class Gated(nn.Module):
    """A classifier of two such blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([GatedBlock(), GatedBlock()])
        self.head = nn.Linear(64, 16)

    def forward(self, x):
        h = x.flatten(1)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Mixture(nn.Module):
    """Experts of which the first weight is [experts, in, out], beside a table of no experts.

    Args:
        in_turns: they take the rows in turns, whatever the router says.
    """

    def __init__(self, in_turns: bool = False) -> None:
        super().__init__()
        self.in_turns = in_turns
        self.router = nn.Linear(32, 4, bias=False)
        self.first = nn.Parameter(torch.randn(4, 32, 64) / 6)
        self.second = nn.Parameter(torch.randn(4, 32, 64) / 6)
        self.table = nn.Parameter(torch.zeros(2, 3, 4))

    def forward(self, x):
        weights, chosen = (self.router(x) + self.table.mean()).softmax(-1).max(-1)
        if self.in_turns:
            chosen = torch.arange(len(x)) % 4
        output = torch.zeros_like(x)
        for expert in chosen.unique():
            rows = expert == chosen
            inner = torch.relu(x[rows] @ self.first[expert])
            output[rows] = nn.functional.linear(inner, self.second[expert]).to(output.dtype)
        return x + output * weights[:, None]


class Mixes(nn.Module):
    """Has its experts between two linear layers."""

    def __init__(self, in_turns: bool = False) -> None:
        super().__init__()
        experts = Mixture(in_turns)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), experts)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x))


class OnlyExperts(nn.Module):
    """Has no linear layer beside its experts and their router."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Mixture()

    def forward(self, x):
        return self.experts(x.flatten(1)[:, 16:48])[:, :10]


class Tables(nn.Module):
    """Has parameters of three dimensions that are no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 16)
        self.queries = nn.Parameter(torch.randn(4, 8, 16))
        self.positions = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x):
        queries = torch.cat([self.layer(x)[:, None], self.queries[0].expand(len(x), -1, -1)], 1)
        return queries.sum(1) + self.positions.mean()
