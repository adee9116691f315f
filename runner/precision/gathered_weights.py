"""Which weights a strategy may gather in the narrower dtype to which the forward casts them anyway.

A layer whose operation autocast runs in half precision rounds its float32 weights in every forward,
and an FP8 layer casts its weights to FP8. Where they are cast before the gather
(strategy.param_dtype=compute), the same numbers arrive and fewer bytes are sent. A weight that
anything else reads is gathered as it is stored.
"""

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from runner.distributed.strategy import NarrowWeights, Strategy
from runner.precision.contract import Precision
from runner.precision.float8 import Float8Layer, Float8Precision
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
_ROWWISE_REASON = (
    "the backward of a rowwise recipe casts the stored weight once more, with other scales"
)


def check_strategy_dtypes(strategy: Strategy, precision: Precision, device: torch.device) -> None:
    """Refuse a strategy's param_dtype or reduce_dtype that means nothing in a precision.

    Raises:
        ConfigError: the precision casts no weights, or its gradients would be rounded.
        Unavailable: torch is too old.
    """
    problems = []
    gathers_narrow = strategy.param_dtype is not None
    casts = autocast_dtype(precision, device) is not None or _has_tensor_scales(precision)
    if gathers_narrow and not casts:
        problems.append(_no_cast(precision))
    if strategy.reduce_dtype is not None and precision.storage is torch.float64:
        problems.append(
            f"strategy.reduce_dtype={strategy.reduce_dtype} would round the float64 gradients of "
            f"precision={precision.name}. Allowed here: null. Type strategy.reduce_dtype=null."
        )
    if problems:
        raise ConfigError(*problems)
    if gathers_narrow:
        _require_torch(strategy)


def _no_cast(precision: Precision) -> str:
    """Return that a precision casts no weights that could be cast before a gather."""
    if isinstance(precision, Float8Precision):
        return (
            f"strategy.param_dtype=compute cannot gather the bfloat16 weights of precision="
            f"{precision.name} in FP8: {_ROWWISE_REASON}. Allowed here: null. Type "
            "strategy.param_dtype=null or precision=float8-tensorwise."
        )
    return (
        "strategy.param_dtype=compute gathers float32 weights in the dtype to which autocast casts "
        f"them, and precision={precision.name} runs without autocast. Allowed here: null. Type "
        "strategy.param_dtype=null, precision=bf16-mixed or precision=16-mixed."
    )


def _no_weights(precision: Precision, dtype: torch.dtype | None) -> str:
    """Return that a model has no weight that could be cast before a gather.

    Args:
        precision: of the model.
        dtype: of its autocast; None without one.
    """
    readers = "FP8 layers"
    name = "FP8"
    if dtype is not None:
        readers = "linear layers or convolutions under autocast"
        name = dtype_name(dtype)
    reason = ""
    if isinstance(precision, Float8Precision) and not precision.has_tensor_scales:
        reason = f"In FP8 nothing can be: {_ROWWISE_REASON}. "
    return (
        f"strategy.param_dtype=compute: the model has no weight that only {readers} read, so "
        f"nothing would be gathered in {name}. {reason}Type strategy.param_dtype=null."
    )


def gathers_several_dtypes() -> bool:
    """Return whether this torch's FSDP can gather the weights of a unit in several dtypes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return "param_dtype_override_fn" in {field.name for field in fields(MixedPrecisionPolicy)}


def _require_torch(strategy: Strategy) -> None:
    """Raise Unavailable where FSDP cannot gather the weights of a unit in several dtypes."""
    if not gathers_several_dtypes():
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
    """Return the weights that can be gathered in the dtype of the precision's autocast, or in FP8.

    Args:
        model: converted, and not yet sharded.
        precision: check_strategy_dtypes accepts it.
        device: where the model computes.

    Raises:
        ConfigError: the model has no such weight.
    """
    excluded = _read_elsewhere(model)
    candidates = [module for module in model.modules() if module not in excluded]
    dtype = autocast_dtype(precision, device)
    cast = {} if dtype is None else _cast_by_autocast(model, candidates)
    float8_layers: frozenset[Any] = frozenset()
    if _has_tensor_scales(precision):
        float8_layers = _float8_layers(model, candidates)
    if not cast and not float8_layers:
        raise ConfigError(_no_weights(precision, dtype))
    elements = sum(parameter.numel() for parameter in cast.values())
    return NarrowWeights(dtype or precision.compute, frozenset(cast), elements, float8_layers)


def _cast_by_autocast(model: nn.Module, candidates: Sequence[nn.Module]) -> dict[int, nn.Parameter]:
    """Return the float32 parameters, by `id`, that only operations read for which autocast casts
    them."""
    # By the exact class: a subclass may do anything with its weights. The output projection of
    # nn.MultiheadAttention, which is read and never called, is of a subclass.
    kinds = (*linear_classes(), *CONVOLUTIONS)
    own = _own_parameters(model, {module for module in candidates if type(module) in kinds})
    return {key: p for key, p in own.items() if p.dtype is torch.float32}


def _has_tensor_scales(precision: Precision) -> bool:
    """Return whether a precision has FP8 layers with one scale per weight."""
    return isinstance(precision, Float8Precision) and precision.has_tensor_scales


def _float8_layers(model: nn.Module, candidates: Sequence[nn.Module]) -> frozenset[Any]:
    """Return an FP8 layer for each weight that only FP8 layers read."""
    layers: list[Any] = [module for module in candidates if isinstance(module, Float8Layer)]
    own = _own_parameters(model, layers)
    by_weight = {id(layer.weight): layer for layer in layers}
    return frozenset(layer for key, layer in by_weight.items() if key in own)


def _own_parameters(model: nn.Module, layers: Collection[nn.Module]) -> dict[int, nn.Parameter]:
    """Return the parameters that no module but some layers holds, by `id`."""
    own = {}
    elsewhere = set()
    for module in model.modules():
        held = {id(parameter): parameter for parameter in module.parameters(recurse=False)}
        if module in layers:
            own.update(held)
        else:
            elsewhere.update(held)
    return {key: parameter for key, parameter in own.items() if key not in elsewhere}


def _read_elsewhere(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose weights something else than their own forward may read."""
    excluded: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, (Float32Island, *_READERS)):
            excluded.update(module.modules())
        elif type(module).__module__.startswith("peft."):
            excluded |= _read_by_adapter(module)
    return excluded


def _read_by_adapter(layer: nn.Module) -> set[nn.Module]:
    """Return the modules within a layer of peft whose weights or dtypes the layer reads."""
    parts = set(layer.modules())
    base = getattr(layer, "base_layer", None)
    # DoRA reads the weight of the adapted layer; other additions only call that layer.
    if base is not None and not getattr(layer, "lora_magnitude_vector", None):
        parts -= set(base.modules())
    return parts
