"""TransformerEngine's layers imitated in plain torch, with the signatures of the library's."""

import torch
from torch import nn
from torch.nn import functional as F


class Linear(nn.Module):
    """te.Linear: remembers the shapes of its inputs."""

    def __init__(self, in_features, out_features, bias, params_dtype, device):
        super().__init__()
        options = {"dtype": params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **options))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **options))
        else:
            self.bias = torch.empty(0)  # as the library has it
        self.input_shapes = []

    def forward(self, inp):
        self.input_shapes.append(tuple(inp.shape))
        return F.linear(inp, self.weight, self.bias)

    def get_extra_state(self):
        return torch.empty(0)


class LayerNorm(nn.Module):
    """te.LayerNorm."""

    def __init__(self, shape, eps, dtype, device):
        super().__init__()
        self.eps, self.shape = eps, shape

    def forward(self, inp):
        return F.layer_norm(inp, self.shape, self.weight, self.bias, self.eps)

    def get_extra_state(self):
        return torch.empty(0)


class LayerNormLinear(Linear):
    """te.LayerNormLinear."""

    def __init__(self, in_features, out_features, eps, **keywords):
        super().__init__(in_features, out_features, **keywords)
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features, device="meta"))
        self.layer_norm_bias = nn.Parameter(torch.empty(in_features, device="meta"))

    def forward(self, inp):
        shape, weight, bias = inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias
        return super().forward(F.layer_norm(inp, shape, weight, bias, self.eps))
