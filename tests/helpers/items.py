"""Ten pairs as data sets that are read one at a time or in whole batches."""

import torch
from torch.utils.data import Dataset

CPU = torch.device("cpu")
X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)


def pair(index):
    return X[index], Y[index]


class Items(Dataset):
    """Whatever `make` returns for an index, one at a time."""

    def __init__(self, make=pair, count=10):
        self.make = make
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


class Batches(Items):
    """Gathered in whole batches."""

    def batch(self, indices):
        return self.make(indices)
