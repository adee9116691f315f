"""A multilayer perceptron on flattened input."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Linear layers with ReLU between them: `layers.0`, `layers.1`, ..., `head`.

    Args:
        input_shape: shape of one input without the batch dimension; it is flattened.
        classes: width of the output.
        hidden: widths of the hidden layers; empty gives a linear model.

    Raises:
        ValueError: a width or dimension is below 1.
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (256, 256)
    ) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden]
        if min(*widths, classes) < 1:
            raise ValueError(
                f"MLP needs widths of 1 or more, got input_shape={list(input_shape)}, "
                f"hidden={list(hidden)}, classes={classes}"
            )
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map float [B, *input_shape] to logits [B, classes]."""
        hidden = images.flatten(1)
        for layer in self.layers:
            hidden = F.relu(layer(hidden))
        return self.head(hidden)
