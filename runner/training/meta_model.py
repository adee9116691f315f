"""Build a model on the meta device, where tensors have shapes and take no memory."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.training.model import BuiltModel
from runner.utils.errors import RunnerError

META_DEVICE = torch.device("meta")

ModelBuilder = Callable[[torch.device, torch.device | None], BuiltModel]
"""Builds a model, given the device where it ends up and the one on which its parameters are made;
None for the CPU."""


def build_on_meta(build: ModelBuilder) -> BuiltModel:
    """Build and convert a model on the meta device; on the CPU if its code reads values.

    Args:
        build: see ModelBuilder.

    Raises:
        ConfigError: the model cannot be built, or does not fit the weights that it starts from.
    """
    try:
        return build(META_DEVICE, META_DEVICE)
    except RunnerError:
        raise
    except (NotImplementedError, RuntimeError):
        return build(torch.device("cpu"), None)


def holds_other_meta_tensors(model: nn.Module) -> bool:
    """Return whether a module has a meta tensor that is neither a parameter nor a buffer.

    Nothing gives such a tensor its values later.
    """
    registered = ("_parameters", "_buffers", "_modules")
    for module in model.modules():
        attributes = {key: value for key, value in vars(module).items() if key not in registered}
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(attributes)):
            return True
    return False
