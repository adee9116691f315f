from torch import nn


class Net(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x):
        return self.layers(x)
