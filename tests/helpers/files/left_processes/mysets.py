import torch
from torch.utils.data import Dataset, IterableDataset


def example(i):
    return torch.full((4,), float(i)), i % 2


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return example(i)


class Lines(IterableDataset):
    def __iter__(self):
        return map(example, range(32))


def rows():
    return Rows(), Rows()


def lines():
    return Lines(), Lines()
