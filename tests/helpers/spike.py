"""Data of which one example is beyond float16."""

import torch
from torch.utils.data import TensorDataset


def made(**_):
    """The last of the third ten, which is in the last process's part of its batch."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 16, generator=generator)
    inputs[29] = 1e6
    data = TensorDataset(inputs, torch.randint(4, (40,), generator=generator))
    return data, TensorDataset(*data[:20])
