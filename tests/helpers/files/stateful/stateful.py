import torch
from torch import nn


class Net(nn.Module):
    first = None

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)
        self.register_buffer("mean", torch.zeros(16), persistent=False)
        self.hidden, self.calls = None, []

    def forward(self, x):
        if self.training and Net.first is None:
            Net.first = (self.hidden, list(self.calls))
        h = torch.tanh(self.a(x.flatten(1)))
        self.hidden = h.detach().mean(0)
        self.calls.append(len(x))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(self.hidden, 0.3)
        return self.b(h - self.mean)
