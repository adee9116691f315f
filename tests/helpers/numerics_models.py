"""Models of transformers on padded tokens."""

import torch
from tiny_configs import LAYERS, NO_DROPOUT
from torch import nn

VOCABULARY = 61
TEXT = {**LAYERS, **NO_DROPOUT}


class Tokens(nn.Module):
    """A transformers model of tokens, half of the first row padded: [B, T] to logits [B, T, V]."""

    def __init__(self, net, padded=True):
        super().__init__()
        self.net, self.padded = net, padded

    def forward(self, ids):
        mask = (ids != 0).long() if self.padded else None
        return self.net(input_ids=ids, attention_mask=mask).logits


def tokens(vocabulary=VOCABULARY, rows=4, length=12):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocabulary, (rows, length), generator=generator)
    ids[0, length // 2 :] = 0
    return ids, ids


def bert(**more):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **{**TEXT, **more})
    return Tokens(BertForMaskedLM(config)), tokens()
