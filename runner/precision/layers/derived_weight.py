"""Read and change a weight that a layer computes from other parameters in each forward.

torch.nn.utils.parametrize computes it (weight_norm, spectral_norm, orthogonal, or a module of the
user's own), or a hook of torch's older functions (weight_norm, spectral_norm, pruning) does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.weight_norm import WeightNorm

from runner.core import ConfigError
from runner.precision.layers.conv1d import is_transposed
from runner.precision.layers.experts import ExpertLayer


def is_derived(layer: nn.Module) -> bool:
    """Return whether a linear layer computes its weight from other parameters in each forward."""
    return "weight" not in layer._parameters and not isinstance(layer, ExpertLayer)


@torch.no_grad()
def current_weight(layer: Any) -> Tensor:
    """Return the weight that a forward in evaluation mode computes with, in the layer's layout."""
    if not is_derived(layer):
        return layer.weight.detach()
    training = layer.training
    # In training a spectral norm takes another step towards the largest singular value.
    layer.eval()
    for hook in layer._forward_pre_hooks.values():
        if type(hook).__module__.startswith("torch.nn.utils."):
            hook(layer, ())
    weight = layer.weight.detach().clone()
    layer.train(training)
    return weight


def current_matrix(layer: Any) -> Tensor:
    """Return current_weight() as [out, in]."""
    weight = current_weight(layer)
    return weight.t() if is_transposed(layer) else weight


@torch.no_grad()
def set_weight(name: str, layer: Any, weight: Tensor) -> None:
    """Give a linear layer a weight, or the parameters from which it computes it, in place.

    Args:
        name: dotted, of the layer.
        layer: unchanged where it is refused.
        weight: in the layer's layout and dtype.

    Raises:
        ConfigError: there are no such parameters: a weight norm has them for every weight, a
            spectral norm only for a weight whose largest singular value is 1.
    """
    if not is_derived(layer):
        layer.weight.copy_(weight)
        return
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    try:
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                magnitudes, directions = _WeightNorm(hook.dim).right_inverse(weight)
                layer.weight_g.copy_(magnitudes)
                layer.weight_v.copy_(directions)
        if is_parametrized(layer, "weight"):
            layer.weight = weight.clone()  # its storage becomes a parameter's
        error = (current_weight(layer) - weight).norm()
        # A few roundings of each element.
        if error > 8 * torch.finfo(weight.dtype).eps * weight.norm():
            raise ValueError("another weight is read back")
    except Exception as error:  # of whatever type a right_inverse raises
        layer.load_state_dict(before)
        raise ConfigError(
            f"{name} {[*weight.shape]} derives its weight in each forward from parameters that "
            "cannot give this one, as a spectral norm's: no addition is merged into it, or takes a "
            "part out of it. Type adapter.init=default, or adapter.modules=[<other layers>]; "
            "checkpoint.resume=<its folder> train.max_steps=<more steps> continues a run as it is."
        ) from error


def add_beside(layer: Any, weight: Tensor) -> None:
    """Have a layer compute with another weight, in place: beside its own product, which stays, it
    adds that of its input and the difference of the weights.

    Args:
        layer: nn.Linear or Conv1D, see is_derived.
        weight: in the layer's layout and dtype.
    """
    change = weight - current_weight(layer)
    change = change.t() if is_transposed(layer) else change

    def add_product(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + F.linear(inputs[0].to(output.dtype), change.to(output))

    layer.register_forward_hook(add_product)
