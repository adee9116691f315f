"""Compute DoRA's norms of packed weights from the numbers that their codes stand for.

peft unpacks weights of bitsandbytes by calls that know neither the runner's int8 layers nor a CPU's
4-bit widths that are no multiple of 64.

Source: Liu et al., DoRA, arXiv:2402.09353.
"""

from types import SimpleNamespace
from typing import Any

from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor

from runner.precision.layers.conv1d import unpacked_matrix


class PackedDora(DoraLinearLayer):
    """peft's DoRA part of a layer whose weight is codes."""

    def forward(self, x: Tensor, *, base_layer: Any, **rest: Any) -> Tensor:
        """Return what DoRA adds to the base layer's output: float [..., in] to [..., out]."""
        # As [out, in] of a packed Conv1D, too, which peft takes for an nn.Linear.
        plain = SimpleNamespace(weight=unpacked_matrix(base_layer), bias=base_layer.bias)
        return super().forward(x, base_layer=plain, **rest)
