"""Casting tensors, nests of tensors and modules. Only floating tensors follow a float policy:
integers and booleans stay; complex tensors follow the width (complex64 <-> complex128) and never
lose their imaginary part."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

# complex32 (ComplexHalf) lacks most kernels, so half precisions keep complex64.
_COMPLEX = {torch.float64: torch.complex128}


def target_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor takes under a policy of the given floating dtype."""
    if tensor.is_complex():
        return _COMPLEX.get(dtype, torch.complex64)
    return dtype if tensor.is_floating_point() else tensor.dtype


def cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in its target dtype; itself where nothing changes."""
    wanted = target_dtype(tensor, dtype)
    return tensor if tensor.dtype is wanted else tensor.to(wanted)


def cast_nest(nest: Any, dtype: torch.dtype) -> Any:
    """A copy of nested dicts, lists, tuples and dataclasses with every tensor cast."""
    if type(nest) is Tensor and nest.dtype is dtype:  # in a third of the time, in every step
        return nest
    if isinstance(nest, Tensor):
        return cast_tensor(nest, dtype)
    if isinstance(nest, Mapping):
        cast = {key: cast_nest(value, dtype) for key, value in nest.items()}
        if isinstance(nest, defaultdict):
            return type(nest)(nest.default_factory, cast)
        return cast if type(nest) is dict else type(nest)(cast)  # type: ignore[call-arg]
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(cast_nest(value, dtype) for value in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(cast_nest(value, dtype) for value in nest)
    if is_dataclass(nest) and not isinstance(nest, type):
        values = {f.name: cast_nest(getattr(nest, f.name), dtype) for f in fields(nest) if f.init}
        return replace(nest, **values)
    return nest


def float64_to_float32(nest: Any) -> Any:
    """Float64 and complex128 tensors of a nest in float32 and complex64, which float32 weights can
    meet; everything else as it is."""

    def single(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.dtype in (torch.float64, torch.complex128)
        return cast_tensor(value, torch.float32) if wide else value

    return single(nest) if isinstance(nest, Tensor) else tree_map(single, nest)


def cast_floats(model: nn.Module, dtype: torch.dtype, islands: Collection[str] = ()) -> None:
    """Cast parameters and buffers in place, outside the islands (dotted module names). A
    parameter object stays the same, so ties, hooks and frozen flags survive; a buffer that modules
    share is cast once, so that they still share it."""
    done = _tensors_of(model, islands)

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = tensor, cast_tensor(tensor, dtype)
        return done[id(tensor)][1]

    with torch.no_grad():
        model._apply(convert)


def _tensors_of(model: nn.Module, islands: Collection[str]) -> dict[int, tuple[Tensor, Tensor]]:
    """The islands' tensors by identity, each with what becomes of it: itself."""
    modules = [model.get_submodule(name) for name in islands]
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    return {id(tensor): (tensor, tensor) for tensor in tensors}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype inside, the previous one after, also after an exception."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


class DefaultDtype:
    """default_dtype as a reusable context without a generator's cost, for the step path."""

    __slots__ = ("dtype", "previous")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.previous: list[torch.dtype] = []

    def __enter__(self) -> None:
        self.previous.append(torch.get_default_dtype())
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.previous.pop())
