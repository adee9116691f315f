import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, twice, **sizes):
        super().__init__()
        self.into, self.twice = nn.Linear(64, 32), twice
        self.body, self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 10)

    def forward(self, x):
        x = self.into(x.flatten(1))
        if not self.twice:
            return self.head(checkpoint(self.body, x, use_reentrant=False))
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            y = self.body(x)
            return self.head(y + torch.autograd.grad(y.sum(), x, create_graph=True)[0])
