"""Cast tensors, nests of tensors and modules to a floating dtype.

Only floating tensors follow it: integers and booleans keep their dtype; complex tensors follow the
width (complex64 <-> complex128) and never lose their imaginary part.
"""

from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from runner.core import module_tree, random_streams, tensor_facts


@cache
def autocast(device_type: str, dtype: torch.dtype, caches: bool = True) -> torch.autocast:
    """Return torch's autocast context, one object for each device type, dtype and use of the cache
    of weights' casts.

    It is made once, because it is entered in every micro-batch; it must not be nested in itself.
    """
    return torch.autocast(device_type, dtype=dtype, cache_enabled=caches)


class CastCacheWatch(TorchFunctionMode):
    """A context that finds weights which a forward changes between two uses under autocast.

    autocast casts a weight at its first use in a forward and keeps the cast for the further uses. A
    model that swaps in other weights within one forward, such as those of a reference policy, would
    compute with the first weights' casts. The casts of such weights are dropped here; later
    forwards must do without the cache.

    Args:
        model: of the run, not compiled.

    Attributes:
        rewritten: names of the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._used: dict[int, set[int]] = {}  # ids of weights with a cast, by their memory
        self._stale = set[int]()
        self.rewritten: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = tree_leaves((args, kwargs))
        # On the meta device there is no autocast to ask for.
        leaves = [leaf for leaf in values if isinstance(leaf, Tensor) and not leaf.is_meta]
        if not leaves or not torch.is_autocast_enabled(leaves[0].device.type):
            return func(*args, **kwargs)
        weights = {id(leaf) for leaf in leaves if id(leaf) in self._names}
        name = getattr(func, "__name__", "")
        # Also through `weight.data`, which torch does not count as a change of the weight.
        is_write = name in ("__set__", "__setitem__") or name.rstrip("_") + "_" == name
        is_write |= kwargs.get("out") is not None
        if is_write:
            for leaf in tree_leaves((args[:1], kwargs.get("out"))):
                self._stale |= self._used.get(tensor_facts.memory_of(leaf), set())
        elif weights & self._stale:
            torch.clear_autocast_cache()
            self.rewritten |= {self._names[one]: None for one in weights & self._stale}
            self._stale -= weights
        result = func(*args, **kwargs)
        dtypes = {leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        # Another dtype shows that the operation took the weight as it is.
        if torch.get_autocast_dtype(leaves[0].device.type) in dtypes:
            for leaf in leaves:
                if id(leaf) in weights:
                    self._used.setdefault(tensor_facts.memory_of(leaf), set()).add(id(leaf))
        return result


def lost_whole_number(inputs: Any, dtype: torch.dtype) -> str:
    """Return in words a whole number that a dtype cannot hold, of the columns of a nest of tensors
    in which all numbers are whole; empty without one. The last dimension counts columns, of [N]
    there is one."""
    for leaf in tree_leaves(inputs):
        if is_wider(leaf, dtype) and random_streams.is_dense(leaf) and leaf.numel():
            columns = leaf.reshape(-1, leaf.shape[-1] if leaf.ndim > 1 else 1)
            is_whole = (columns == columns.round()).all(0)
            for row, column in (is_whole & (columns.to(dtype) != columns)).nonzero().tolist():
                return f"{columns[row, column]:.15g} in column {column}"
    return ""


def is_wider(value: Any, dtype: torch.dtype) -> bool:
    """Return whether a value is a floating tensor of more bytes a number than a dtype has."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return is_float and value.itemsize > dtype.itemsize


def cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as a precision of this floating dtype holds it; the same object where nothing
    changes."""
    if tensor.is_complex():
        # complex32 (ComplexHalf) lacks most kernels, so half precisions keep complex64.
        dtype = torch.complex128 if dtype is torch.float64 else torch.complex64
    elif not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def cast_nest(nest: Any, dtype: torch.dtype) -> Any:
    """Return a copy of nested dicts, lists, tuples, dataclasses and graphs with every tensor
    cast."""
    # The usual case of every step first: it is answered in a third of the time.
    if type(nest) is Tensor and nest.dtype is dtype:
        return nest
    if isinstance(nest, Tensor):
        return cast_tensor(nest, dtype)
    cast = partial(cast_nest, dtype=dtype)
    # An object that calls a function on its tensors, as a Batch of torch_geometric.
    if hasattr(nest, "apply") and hasattr(nest, "to") and not isinstance(nest, nn.Module):
        return copy(nest).apply(cast)
    if isinstance(nest, Mapping | list | tuple):
        return _container(nest, {key: cast(value) for key, value in fields_of(nest).items()})
    if is_dataclass(nest) and not isinstance(nest, type):
        # Fields that the constructor does not take, it computes from the others.
        return replace(
            nest, **{f.name: cast(getattr(nest, f.name)) for f in fields(nest) if f.init}
        )
    return nest


def cast_fields(nest: Any, dtype: torch.dtype, wide: Mapping[str | int, torch.dtype]) -> Any:
    """Return a model's inputs or a module's outputs cast to a dtype, some fields to own ones.

    Args:
        nest: a tensor, or a mapping or sequence of fields.
        dtype: of the other fields.
        wide: dtypes of fields, by key or position; 0 for the only tensor.
    """
    if not wide:
        return cast_nest(nest, dtype)
    parts = {key: cast_nest(part, wide.get(key, dtype)) for key, part in fields_of(nest).items()}
    return _container(nest, parts) if isinstance(nest, Mapping | list | tuple) else parts[0]


def _container(like: Any, parts: dict[Any, Any]) -> Any:
    """Return a mapping, list or tuple of another one's class with these parts."""
    if isinstance(like, Mapping):
        # The constructor of a defaultdict takes the factory first.
        factory = [like.default_factory] if isinstance(like, defaultdict) else []
        return parts if type(like) is dict else type(like)(*factory, parts)  # type: ignore[call-arg]
    # A named tuple takes its values as separate arguments.
    values = parts.values()
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)


def fields_of(nest: Any) -> dict[str | int, Any]:
    """Return the fields of a model's inputs or a module's outputs by key or position; of a tensor,
    itself at 0."""
    if isinstance(nest, Mapping):
        return dict(nest)
    return dict(enumerate(nest if isinstance(nest, list | tuple) else [nest]))


def cast_floats(
    model: nn.Module, dtype: torch.dtype, kept: Mapping[str, torch.dtype] | None = None
) -> None:
    """Cast a model's parameters and buffers in place, except what keeps a dtype of its own.

    A parameter object stays the same, so ties, hooks and frozen flags survive; a buffer that
    modules share is cast once, so that they still share it.

    Args:
        model: changed in place.
        dtype: of floating tensors after.
        kept: dtypes after, by the dotted names of modules, parameters and buffers; a later name
            counts more.
    """
    # Each tensor's replacement, by identity. The tensor itself is stored too: it must live, or
    # another one could get its id.
    replacements: dict[int, tuple[Tensor, Tensor]] = {}
    for name, own_dtype in (kept or {}).items():
        for tensor in module_tree.tensors_named(model, name):
            replacements[id(tensor)] = (tensor, cast_tensor(tensor, own_dtype))

    def cast_once(tensor: Tensor) -> Tensor:
        if id(tensor) not in replacements:
            replacements[id(tensor)] = (tensor, cast_tensor(tensor, dtype))
        return replacements[id(tensor)][1]

    with torch.no_grad():
        model._apply(cast_once)


def autocast_input(input: Tensor) -> Tensor:
    """Return a layer's input in the dtype that autocast gives products."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        return input.to(torch.get_autocast_dtype(kind))
    return input


class DefaultDtype:
    """A context that sets torch's default dtype and restores the previous one after, also after an
    exception. It can be entered again and again, nested too: a training step enters it."""

    __slots__ = ("dtype", "previous")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.previous: list[torch.dtype] = []

    def __enter__(self) -> None:
        self.previous.append(torch.get_default_dtype())
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.previous.pop())


@cache
def default_dtype(dtype: torch.dtype) -> DefaultDtype:
    """Return the context that sets torch's default dtype, one object for each dtype."""
    return DefaultDtype(dtype)
