"""Recognise linear layers, among them transformers' Conv1D, which stores its weight transposed.

GPT-2 and its relatives are built of Conv1D layers: x @ weight + bias, weight [in, out]. Nothing
here imports transformers: a model with such a layer has imported it.
"""

import sys
from typing import Any

from torch import Tensor, nn

_CONV1D_MODULE = "transformers.pytorch_utils"


def linear_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes of linear layers: nn.Linear, and Conv1D where transformers is imported."""
    conv1d = getattr(sys.modules.get(_CONV1D_MODULE), "Conv1D", None)
    return (nn.Linear,) if conv1d is None else (nn.Linear, conv1d)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a layer is a Conv1D, or was one before its conversion."""
    return isinstance(module, linear_classes()[1:])


def layer_widths(module: Any) -> tuple[int, int]:
    """Return the input and the output width of a linear layer that is not converted."""
    if is_transposed(module):
        in_features, out_features = module.weight.shape
        return in_features, out_features
    return module.in_features, module.out_features


def weight_matrix(module: Any) -> Tensor:
    """Return the weight of a linear layer as [out, in]; a Conv1D's is a view, not contiguous."""
    return module.weight.t() if is_transposed(module) else module.weight


def is_packed(module: nn.Module) -> bool:
    """Return whether a layer's weight is codes; each class with such a weight has the method."""
    return hasattr(module, "unpacked_weight")


def unpacked_matrix(module: Any) -> Tensor:
    """Return the weight of a linear layer as [out, in], where it is packed what its codes mean."""
    if not is_packed(module):
        return weight_matrix(module).detach()
    weight = module.unpacked_weight()
    return weight.t() if is_transposed(module) else weight
