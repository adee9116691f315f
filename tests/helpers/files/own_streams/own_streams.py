import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)


class Rows(IterableDataset):
    """Rows whose order follows from the pass, with noise from torch's generator."""

    def __init__(self, count, spoilt=None):
        self.count = count
        self.spoilt = spoilt
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for i in range(self.count):
            x = torch.randn(4, generator=generator)
            if i == self.spoilt:
                x = x / 0
            yield x + 0.1 * torch.randn(4), int(x[0] > 0)


class Once(Rows):
    def __init__(self, count):
        super().__init__(count)
        self.rows = super().__iter__()

    def __iter__(self):
        return self.rows


class Lists(Rows):
    def __iter__(self):
        for x, label in super().__iter__():
            yield {"x": x.tolist(), "label": label}


class Raising(Rows):
    def __iter__(self):
        for i, row in enumerate(super().__iter__()):
            if i == 30:
                raise OSError("the connection is lost")
            yield row


def streams(kind="Rows", count=20, **more):
    return globals()[kind](count, **more), Rows(7)


def mixed():
    return TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), Rows(7), {"far": Rows(5)}
