import os
from pathlib import Path

import torch
from torch.utils.data import Dataset, TensorDataset


def tensors():
    return TensorDataset(torch.randn(8, 1, 8, 8), torch.arange(8) % 2)


class NoItems(Dataset):
    def __len__(self):
        return 8


class NoLength:
    def __getitem__(self, index):
        return torch.randn(1, 8, 8), 0


class Ragged(Dataset):
    """Rows of several heights, and batches that are padded."""

    pids = "pids.txt"

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((1, 4 + index % 5, 8), float(index)), index % 2


class Padded(Ragged):
    def batch(self, indices):
        with Path(self.pids).open("a") as file:
            file.write(f"{os.getpid()}\n")
        x = torch.zeros(len(indices), 1, 8, 8)
        for row, index in enumerate(indices.tolist()):
            one, _ = Ragged.__getitem__(self, index)
            x[row, :, : one.shape[1]] = one
        return x, indices % 2


KINDS = {
    "no_items": lambda: (tensors(), NoItems()),
    "no_length": lambda: (NoLength(), tensors()),
    "four": lambda: (tensors(), tensors(), tensors(), tensors()),
    "dict": lambda: {"train": tensors(), "val": tensors()},
    "trains": lambda: ({"seen": tensors(), "unseen": tensors()}, tensors()),
    "no_vals": lambda: (tensors(), {}),
    "odd_names": lambda: (tensors(), {"a/b": tensors(), "loss": tensors(), 3: tensors()}),
    "a_val": lambda: (tensors(), {"seen": tensors(), "unseen": NoLength()}, tensors()),
    "all": lambda: (
        tensors(),
        {"seen": tensors(), "unseen": tensors()},
        {"near": tensors(), "far": tensors()},
    ),
    "pair": lambda: (tensors(), tensors()),
    "test": lambda: (tensors(), tensors(), tensors()),
    "ragged": lambda: (Ragged(), tensors()),
    "ragged_val": lambda: (tensors(), Ragged()),
    "padded": lambda: (Padded(), tensors()),
}


def make(kind):
    return KINDS[kind]()
