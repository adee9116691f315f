import torch
from torch.utils.data import Dataset


class Photos(Dataset):
    """Bright and dark pictures, transformed."""

    def __init__(self, transform):
        self.transform = transform

    @staticmethod
    def splits(transform):
        return Photos(transform), Photos(transform)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.transform(torch.full((1, 16, 12), index % 2 / 2)), index % 2
