import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, WeightedRandomSampler


class Bag(nn.Module):
    """Averages the embeddings of tokens [B, T]; token 0 is padding."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, padding_idx=0)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.bag(tokens))


class Sentences(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.arange(1, 2 + index % 5), index % 2


class Whole(Sentences):
    def batch(self, indices):
        return torch.ones(len(indices), 2, dtype=torch.long), indices % 2


def make(kind="Sentences"):
    return globals()[kind](24), globals()[kind](7)


def taken(collate="mine"):
    return make()


class Pad:
    def __init__(self, length):
        self.length = length

    def __call__(self, pairs):
        with Path("pids.txt").open("a") as file:
            file.write(f"{os.getpid()} ")
        inputs = torch.zeros(len(pairs), self.length, dtype=torch.long)
        for row, (tokens, _) in zip(inputs, pairs, strict=True):
            row[: len(tokens)] = tokens
        return inputs, torch.tensor([label for _, label in pairs])


def broken(pairs):
    return pairs[0]["input_ids"]


def raises_late(pairs):
    if len(pairs) < 8:
        raise ArithmeticError("too few")
    return Pad(5)(pairs)


LENGTH = 5


def second_half(dataset):
    weights = [float(index >= len(dataset) // 2) for index in range(len(dataset))]
    return WeightedRandomSampler(weights, 16)


def batched(dataset):
    return BatchSampler(SequentialSampler(dataset), 4, drop_last=False)


def needs_labels(dataset):
    return dataset.labels
