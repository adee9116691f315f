"""Models that read weights of their layers in place of calling them, and data for them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class TwoLayers(nn.Module):
    """Two layers for a forward to use."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 16)


class Reads(nn.Module):
    """Two layers of three are never called."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        h = F.linear(x, self.a.weight, self.a.bias).relu()
        return self.head(h @ self.b.weight.to(h.dtype).t())


class ReadsAll(TwoLayers):
    """No layer is ever called."""

    def forward(self, x):
        h = F.linear(x, self.a.weight, self.a.bias).relu()
        return F.linear(h, self.b.weight, self.b.bias)


class Casts(TwoLayers):
    """Activations are cast to a weight's dtype before the layer is called, as T5 does."""

    def forward(self, x):
        h = self.a(x).relu()
        return self.b(h.to(self.b.weight.dtype)).float()


class Asks(TwoLayers):
    """What is asked of the weights here does no harm, or is not used."""

    def forward(self, x):
        weight = self.a.weight
        assert weight.dtype != torch.float64
        dtype = next(p.dtype for p in self.parameters() if p.is_floating_point())
        h = self.a.forward(x.to(weight.device, dtype)).relu()
        return self.b(h) + (0.0 if weight.requires_grad else 1e-3)


class Limits(TwoLayers):
    """The limits of a weight's dtype, of which integers have none in this sense."""

    def forward(self, x):
        least = torch.finfo(self.a.weight.dtype).min / 2
        return self.b(self.a(x).clamp(min=least))


class Experts(nn.Module):
    """One expert is never chosen; one layer runs in training alone."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.auxiliary, self.head = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x):
        h = self.experts[0](x).relu()
        return self.head(h) + self.auxiliary(h) if self.training else self.head(h)


class NeverCalled(nn.Module):
    """The one layer of a kind that is converted stays idle."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(32, 16)
        self.weight = nn.Parameter(torch.randn(32, 16))

    def forward(self, x):
        return x @ self.weight


class TrainsByReading(TwoLayers):
    """In training alone a weight is read."""

    def forward(self, x):
        h = F.linear(x, self.a.weight.to(x.dtype)) if self.training else self.a(x)
        return self.b(h)


class ReadsShort(TwoLayers):
    """In a short batch alone a weight is read."""

    def forward(self, x):
        whole = len(x) == 24
        return self.b(self.a(x) if whole else F.linear(x, self.a.weight.to(x.dtype), self.a.bias))


class Leaves(TwoLayers):
    """Draws numbers and moves a buffer even in evaluation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.b(F.dropout(self.a(x), 0.5, training=True))


def rows():
    """64 examples, the same for training and validation."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=drawn)
    made = TensorDataset(x, x[:, :16].argmax(1))
    return made, made
