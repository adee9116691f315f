"""A multilayer perceptron with complex weights and a real output."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ComplexLinear(nn.Module):
    """Affine map with complex weight [out, in] and bias [out].

    The weight starts as a circular complex normal with E|w|² = 2 / (in + out): Rayleigh magnitude
    and uniform phase, Glorot's variance (Trabelsi et al. 2018, arXiv:1705.09792, section 3.6).
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        scale = math.sqrt(2 / (in_features + out_features))
        weight = torch.randn(out_features, in_features, dtype=torch.complex64) * scale
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=torch.complex64))

    def forward(self, input: Tensor) -> Tensor:
        """Map real or complex [..., in] to complex [..., out] in the weight's dtype."""
        return F.linear(input.to(self.weight.dtype), self.weight, self.bias)


class ModReLU(nn.Module):
    """The activation relu(|z| + b) · z / |z|, which shrinks magnitudes and keeps phases.

    The real bias b [features] starts at 0, where it is the identity (Arjovsky et al. 2016,
    arXiv:1511.06464, equation 8).
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, input: Tensor) -> Tensor:
        """Map complex [..., features] to the same shape and dtype."""
        magnitude = input.abs()
        # z = 0 has no phase. Below eps the map is linear, which bounds the gradient by b / eps.
        safe = magnitude.clamp_min(torch.finfo(magnitude.dtype).eps)
        bias = self.bias.to(magnitude.dtype)
        return input * (F.relu(magnitude + bias) / safe)


class ComplexMLP(nn.Module):
    """Complex linear layers with ModReLU; the output is the real part of the last layer.

    Every dtype follows the parameters: cast to complex128, the whole forward is double.

    Args:
        input_shape: shape of one input without the batch dimension; it is flattened.
        classes: width of the output.
        hidden: widths of the hidden layers; empty gives a linear model.

    Raises:
        ValueError: a width or dimension is below 1.
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (8,)
    ) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden]
        if min(*widths, classes) < 1:
            raise ValueError(
                f"ComplexMLP needs widths of 1 or more, got input_shape={list(input_shape)}, "
                f"hidden={list(hidden)}, classes={classes}"
            )
        layers = (nn.Sequential(ComplexLinear(a, b), ModReLU(b)) for a, b in pairwise(widths))
        self.layers = nn.ModuleList(layers)
        self.head = ComplexLinear(widths[-1], classes)

    def forward(self, signals: Tensor) -> Tensor:
        """Map real or complex [B, *input_shape] to real [B, classes]."""
        hidden = signals.flatten(1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).real
