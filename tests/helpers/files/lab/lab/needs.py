import torch

from lab.nets import Net


class Needs(Net):
    def __init__(self, state, **sizes):
        super().__init__(**sizes)
        self.state = state

    def forward(self, x):
        assert getattr(torch, self.state)()
        return super().forward(x)
