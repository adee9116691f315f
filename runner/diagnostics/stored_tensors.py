"""List the tensors that a module stores, with the packed ones in words."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from runner.precision.layers.weight_formats import WeightFormat
from runner.utils.tensors import dtype_name, tensor_bytes


class StoredTensor(NamedTuple):
    """A parameter or buffer.

    Attributes:
        name: dotted name below the module that was asked for.
        dtype: as stored; of a packed weight that of its codes.
        shape: as stored; of a weight that bitsandbytes packs that of the weight.
        size: bytes, with the scales that a packed parameter holds itself.
        note: how it is packed, that it is a buffer or does not train; empty for a plain parameter.
    """

    name: str
    dtype: str
    shape: list[int]
    size: int
    note: str


def stored_tensors(module: nn.Module) -> Iterator[StoredTensor]:
    """Yield the parameters and buffers of a module and of those inside it, each once."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        tensors = {**part._parameters, **part._buffers}
        for key, tensor in tensors.items():
            if tensor is None or is_lazy(tensor) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            state = getattr(tensor, "quant_state", None)
            shape = tensor.shape if state is None else state.shape
            name = f"{prefix}.{key}".lstrip(".")
            size = tensor_bytes(tensor)
            dtype = dtype_name(tensor.dtype)
            yield StoredTensor(name, dtype, [*shape], size, _note(part, key, tensor))


def _note(module: nn.Module, key: str, tensor: Tensor) -> str:
    packing = _packing(module, key, tensor)
    if key in module._buffers:
        return "buffer"
    if not tensor.requires_grad:
        return f"{packing}, frozen" if packing else "frozen"
    return packing


def _packing(module: nn.Module, key: str, tensor: Tensor) -> str:
    """Return how a tensor's numbers are packed or rounded; empty for plain numbers."""
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        return _packing_4bit(state)
    fmt: Any = getattr(module, "format", None)
    if key == "weight" and isinstance(fmt, WeightFormat):
        how = "rounded in each forward" if tensor.is_floating_point() else "codes"
        return f"{fmt.label} {how}"
    if key == "weight" and "SCB" in module._buffers:
        return "int8 codes, scaled by SCB / 127"
    return ""


def _packing_4bit(state: Any) -> str:
    """Return the format, the scales and the block sizes of a packing of bitsandbytes."""
    text = f"{state.quant_type}, {dtype_name(state.absmax.dtype)} scale per {state.blocksize}"
    if state.nested:
        inner = state.state2
        text += f", {dtype_name(inner.absmax.dtype)} scale per {inner.blocksize} scales"
    return text
