import torch
from torch.utils.data import Dataset


class Fields(Dataset):
    """Examples of random tokens or pixels, as dicts with the fields of a kind of model."""

    def __init__(self, count, kind):
        self.kind = kind
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(4, 64, (12,), generator=generator)
        fields = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "id": index}
        if self.kind == "image_classification":
            pixels = torch.randn(3, 32, 32, generator=generator)
            return {"pixel_values": pixels, "labels": index % 4}
        if self.kind == "sequence_classification":
            return {**fields, "label": index % 4}
        if self.kind == "token_classification":
            return {**fields, "labels": tokens % 4}
        labels = tokens.clone()
        labels[:6] = -100
        return {**fields, "labels": labels}


def fields(kind="causal_lm"):
    return Fields(16, kind), Fields(8, kind)
