"""Which float32 weights a strategy may gather in the dtype to which autocast casts them anyway.

A layer whose operation autocast runs in half precision rounds its float32 weights in every forward.
Where they are rounded before the gather (strategy.param_dtype=compute), the same numbers arrive and
half the bytes are sent. A weight that anything else reads stays in float32.
"""

from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import nn

from runner.distributed.strategy import NarrowWeights, Strategy
from runner.precision.contract import Precision
from runner.precision.keep_fp32 import Float32Island
from runner.precision.layers.conv1d import linear_classes
from runner.utils.errors import ConfigError, Unavailable
from runner.utils.tensors import dtype_name

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
# In evaluation torch reads the weights of this layer's parts and calls none of them.
_READERS = (nn.TransformerEncoderLayer,)


def check_strategy_dtypes(strategy: Strategy, precision: Precision, device: torch.device) -> None:
    """Refuse a strategy's param_dtype or reduce_dtype that means nothing in a precision.

    Raises:
        ConfigError: the precision casts no weights, or its gradients would be rounded.
        Unavailable: torch is too old.
    """
    problems = []
    gathers_narrow = strategy.param_dtype is not None
    if gathers_narrow and autocast_dtype(precision, device) is None:
        problems.append(
            f"strategy.param_dtype={strategy.param_dtype} gathers float32 weights in the dtype to "
            f"which autocast casts them, and precision={precision.name} runs without autocast. "
            "Allowed here: null. Type strategy.param_dtype=null, precision=bf16-mixed or "
            "precision=16-mixed."
        )
    if strategy.reduce_dtype is not None and precision.storage is torch.float64:
        problems.append(
            f"strategy.reduce_dtype={strategy.reduce_dtype} would round the float64 gradients of "
            f"precision={precision.name}. Allowed here: null. Type strategy.reduce_dtype=null."
        )
    if problems:
        raise ConfigError(*problems)
    if gathers_narrow:
        _require_torch(strategy)


def _require_torch(strategy: Strategy) -> None:
    """Raise Unavailable where FSDP cannot gather the weights of a unit in several dtypes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if "param_dtype_override_fn" not in {field.name for field in fields(MixedPrecisionPolicy)}:
        raise Unavailable(
            f"strategy.param_dtype={strategy.param_dtype} needs torch 2.15 or newer, and this is "
            f"torch {torch.__version__}.",
            'Type pip install "torch>=2.15", or strategy.param_dtype=null.',
        )


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """Return the dtype of the autocast in which a precision's forward runs; None without one."""
    if precision.storage is not torch.float32:
        return None
    with precision.forward(device):
        if not torch.is_autocast_enabled(device.type):
            return None
        return torch.get_autocast_dtype(device.type)


def find_narrow_weights(
    model: nn.Module, precision: Precision, device: torch.device
) -> NarrowWeights:
    """Return the weights that can be gathered in the dtype of the precision's autocast.

    Args:
        model: converted, and not yet sharded.
        precision: its forward runs under autocast.
        device: where the model computes.

    Raises:
        ConfigError: the model has no such weight.
    """
    dtype = autocast_dtype(precision, device)
    assert dtype is not None, "check_strategy_dtypes refuses it"
    layers = set(_cast_layers(model))
    elsewhere = set()
    for module in model.modules():
        if module not in layers:
            elsewhere |= {id(parameter) for parameter in module.parameters(recurse=False)}
    chosen = {}
    for layer in layers:
        for parameter in layer.parameters(recurse=False):
            if parameter.dtype is torch.float32 and id(parameter) not in elsewhere:
                chosen[id(parameter)] = parameter.numel()
    if not chosen:
        name = dtype_name(dtype)
        raise ConfigError(
            "strategy.param_dtype=compute: the model has no weight that only linear layers or "
            f"convolutions under autocast read, so nothing would be gathered in {name}. "
            "Type strategy.param_dtype=null."
        )
    return NarrowWeights(dtype, frozenset(chosen), sum(chosen.values()))


def _cast_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers whose weights are read by nothing but operations that autocast casts for."""
    excluded: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, (Float32Island, *_READERS)):
            excluded.update(module.modules())
        elif type(module).__module__.startswith("peft."):
            excluded |= _read_by_adapter(module)
    # By the exact class: a subclass may do anything with its weights. The output projection of
    # nn.MultiheadAttention, which is read and never called, is of a subclass.
    kinds = (*linear_classes(), *CONVOLUTIONS)
    for module in model.modules():
        if type(module) in kinds and module not in excluded:
            yield module


def _read_by_adapter(layer: nn.Module) -> set[nn.Module]:
    """Return the modules within a layer of peft whose weights or dtypes the layer reads."""
    parts = set(layer.modules())
    base = getattr(layer, "base_layer", None)
    # DoRA reads the weight of the adapted layer; other additions only call that layer.
    if base is not None and not getattr(layer, "lora_magnitude_vector", None):
        parts -= set(base.modules())
    return parts
