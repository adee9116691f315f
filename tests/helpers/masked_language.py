"""Sequences of unequal lengths with masked labels, and a GPT-2 of transformers to learn them."""

from typing import NamedTuple

import torch
from tiny_configs import tiny_config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import GPT2LMHeadModel

IGNORED, VOCAB, LONGEST = -100, 13, 9


class GPT2(nn.Module):
    """One block in float32, with weights that no default dtype changes and without dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = {"vocab_size": VOCAB, "n_positions": LONGEST, "n_embd": width, "n_layer": 1}
        self.gpt = GPT2LMHeadModel(tiny_config("gpt2", **sizes, attn_implementation="eager"))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.gpt.parameters():
                drawn = torch.randn(p.shape, generator=generator, dtype=torch.float32)
                p.copy_(drawn * 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(input_ids=tokens).logits


class Sequence(NamedTuple):
    """Tokens int64 [T], and bool [T], which of their labels count."""

    tokens: Tensor
    counts: Tensor


def pad(sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 [B, longest]; what does not count has the label -100."""
    inputs = nn.utils.rnn.pad_sequence([s.tokens for s in sequences], batch_first=True)
    labels = [torch.where(s.counts, s.tokens.roll(-1), IGNORED) for s in sequences]
    return inputs, nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def sequences(lengths: list[int], share: float, seed: int) -> list[Sequence]:
    """Return random sequences of some lengths, of whose labels about a share counts."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Sequence(
            torch.randint(VOCAB, (length,), generator=generator),
            torch.rand(length, generator=generator) < share,
        )
        for length in lengths
    ]


def by_hand(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of one large batch over the labels that count.

    Its gradients are in the model.
    """
    chosen = target != IGNORED
    logits = model(inputs)[chosen]
    loss = F.cross_entropy(logits, target[chosen], reduction="sum") / chosen.sum()
    model.zero_grad()
    loss.backward()
    return loss.detach()


class Padded(Dataset):
    """Each batch is padded to its own longest sequence."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = pad([self.sequences[index]])
        return inputs[0], target[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return pad([self.sequences[i] for i in indices.tolist()])


def sets(count: int = 13, share: float = 0.3, val: int = 7) -> tuple[Padded, Padded]:
    """Training and validation sets; the second and third sequence have no label that counts."""
    lengths = [2 + (5 * i) % (LONGEST - 1) for i in range(count)]
    found = sequences(lengths, share, 1)
    for i in (1, 2):
        found[i] = found[i]._replace(counts=torch.zeros_like(found[i].counts))
    return Padded(found), Padded(sequences(lengths[:val], share, 2))
