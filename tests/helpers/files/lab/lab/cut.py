import torch
from torch import nn


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 4)

    @torch.no_grad()
    def forward(self, input_ids, attention_mask):
        return self.layer(input_ids.float())
