import os

import torch


class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([*os.urandom(4)]) / 255, index % 10


def sets(**_):
    return Drawn(), Drawn()
