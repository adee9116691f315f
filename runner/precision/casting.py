"""Cast tensors, nests of tensors and modules to a floating dtype, and keep in float32 what
`precision.keep_fp32` names, and in its dtype what the model itself declares or froze.

Only floating tensors follow a dtype: integers and booleans keep theirs; complex tensors follow the
width (complex64 <-> complex128) and never lose their imaginary part.

A parameter or buffer that is kept is stored in float32, and the model's code computes with it as
torch promotes dtypes. A module stores and computes in float32. Its class is swapped for a subclass
whose forward casts inputs and outputs (the way torch.nn.utils.parametrize does it): names, state
dict, hooks, isinstance and deepcopy survive, and torch.compile sees an ordinary forward.

Models of transformers declare float32: a list names parameters and persistent buffers, and a
constructor may give a tensor float32 explicitly, as the frequencies of rotary embeddings. Loading
one in 16 bits keeps both, and the model's own forward casts at their borders.

Source: transformers, modeling_utils.py (_keep_in_fp32_modules for float16, its strict form for
bfloat16, too) and core_model_loading.py.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from runner.core import (
    ConfigError,
    fmt,
    module_tape,
    module_tree,
    random_streams,
    tensor_facts,
    terminal,
)


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
        for tensor in _tensors_named(model, name):
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


default_dtype = cache(DefaultDtype)
"""Return the context that sets torch's default dtype, one object for each dtype."""


KEEP_FP32_REASON = "kept in float32 by precision.keep_fp32"


class KeptInFloat32:
    """Mixin before a module's own class, whose forward computes in float32 and returns the dtype of
    the modules around it."""

    _surroundings: torch.dtype
    # Dtypes of the outputs, by key or position, that are not cast to the surroundings'.
    _wide_outputs: Mapping[str | int, torch.dtype] = MappingProxyType({})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = (*self.parameters(recurse=False), *tree_leaves((args, kwargs)))  # type: ignore[attr-defined]
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        device_type = "cpu" if first is None else first.device.type
        # torch.compile does not trace DefaultDtype.
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.autocast(device_type, enabled=False):
                args, kwargs = cast_nest((args, kwargs), torch.float32)
                outputs = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            torch.set_default_dtype(previous)
        # Under autocast the surroundings are float32 storage and the next operation casts by
        # itself; in a true precision the next layer's weights want their own dtype, and outputs
        # that no such layer takes stay as they are, see conversion_proof.WideTrial.
        return cast_fields(outputs, self._surroundings, self._wide_outputs)


def find_kept_modules(model: nn.Module, patterns: Sequence[str], storage: torch.dtype) -> set[str]:
    """Return the dotted names of the outermost modules that the patterns of keep_fp32 match; of a
    pattern that matches no module, of the parameters and buffers that it matches.

    Args:
        model: not changed.
        patterns: see runner.core.base.module_tree.
        storage: dtype of the surroundings.

    Raises:
        ConfigError: a pattern matches nothing, or one of the modules shares a parameter with a
            module of another dtype.
    """
    # A module that is registered twice can be meant by either name.
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    nothing = "no module of the model, and no parameter or buffer"
    chosen = module_tree.select_modules(
        "precision.keep_fp32", patterns, names, nothing, _named_tensors(model)
    )
    outermost = module_tree.outermost_names(chosen)
    # In a mixed precision every parameter is in float32 anyway.
    if storage is not torch.float32:
        _refuse_ties(model, outermost.intersection(names))
    return outermost


def keep_in_float32(model: nn.Module, names: Collection[str], storage: torch.dtype) -> None:
    """Make modules store and compute in float32, and single tensors be in float32.

    Args:
        model: changed in place.
        names: dotted names, as find_kept_modules returns them.
        storage: dtype of the surroundings, to which the modules' outputs are cast.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        module = modules.get(name)
        if module is None:
            (tensor,) = _tensors_named(model, name)
            tensor.data = cast_tensor(tensor.data, torch.float32)
            continue
        if not isinstance(module, KeptInFloat32):
            module.__class__ = _float32_class(type(module))
            module._surroundings = storage  # type: ignore[assignment]
            # In evaluation nn.TransformerEncoderLayer reads its parts' weights and does not call
            # their forward, unless a part has a hook.
            module.register_forward_pre_hook(no_op_hook)
            # In a mixed precision the default dtype is float32 already.
            if storage is not torch.float32:
                _RecomputationDtype(torch.float32).watch(module)
        cast_floats(module, torch.float32)


class _RecomputationDtype(DefaultDtype):
    """Hooks on a kept module's parts that make float32 the default dtype while they are recomputed.

    The module's own torch.utils.checkpoint recomputes them in the backward, outside the module's
    forward. Autocast is restored by torch.
    """

    def watch(self, kept: nn.Module) -> None:
        """Register the hooks on every module inside the kept one."""
        for part in kept.modules():
            if part is not kept:
                part.register_forward_pre_hook(self._before)
                part.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        if module_tape.is_in_backward():
            self.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if module_tape.is_in_backward():
            self.__exit__()


def no_op_hook(module: nn.Module, args: Any) -> None:
    """Do nothing: a module with a hook is called where a fast path would read its weights."""


@cache
def _float32_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Float32{kind.__name__}", (KeptInFloat32, kind), {"__module__": kind.__module__})


def _refuse_ties(model: nn.Module, kept: Collection[str]) -> None:
    """Raise ConfigError where a parameter is shared by a kept module and one outside it: a tied
    parameter has one dtype, so both modules are in float32 or neither is."""
    parts = {part for name in kept for part in model.get_submodule(name).modules()}
    shared = {parameter for part in parts for parameter in part.parameters()}
    outside = []
    for name, module in model.named_modules():
        if module not in parts and not shared.isdisjoint(module.parameters(recurse=False)):
            outside.append(name)
    if outside:
        others = ", ".join(name or "*" for name in outside)
        raise ConfigError(
            f"precision.keep_fp32: {', '.join(sorted(kept))} shares a parameter with {others}, "
            f"which is not in it. Add {others}."
        )


def double_parts(model: nn.Module, storage: torch.dtype) -> dict[str, Tensor]:
    """Return the float64 parameters and buffers by name, where they are wider than the storage
    dtype, of a model whose first matrix is of another dtype: one that is built in float64
    throughout has no such parts."""
    first = next((p.dtype for p in model.parameters() if p.ndim > 1), torch.float64)
    named = _named_tensors(model).items() if torch.float64 not in (first, storage) else ()
    return {name: tensor for name, tensor in named if tensor.dtype is torch.float64}


def find_kept_tensors(
    model: nn.Module, storage: torch.dtype, device: torch.device = tensor_facts.CPU_DEVICE
) -> tuple[dict[str, torch.dtype], tuple[str, ...]]:
    """Return what keeps its dtype where the other floating tensors get the storage dtype.

    Returns:
        By name float32 for the parameters and buffers that the model declares so, and the dtypes of
        those that it froze in one of their own or built in float64; lines for the console.
    """
    kept: dict[str, torch.dtype] = {}
    lines: list[str] = []
    for path, part in module_tree.frozen_parts(model).items():
        # float32 is what torch makes unless it is asked for another dtype.
        plain = (torch.float32, storage)
        own = {
            f"{path}.{name}": tensor.dtype
            for name, tensor in _named_floats(part).items()
            if tensor.dtype not in plain
        }
        kept |= own
        for dtype in {*own.values()}:
            lines.append(f"stays in {tensor_facts.dtype_name(dtype)}, frozen by the model: {path}")
    if tensor_facts.widest_float(device) is torch.float64:
        kept = {**dict.fromkeys(double_parts(model, storage), torch.float64), **kept}
    declared: list[str] = []
    if storage.itemsize == 2:
        models = [n for n, m in model.named_modules() if hasattr(m, "_keep_in_fp32_modules")]
        # The lists of a model hold those of the models in it, whose names begin with its own.
        for path in sorted(module_tree.outermost_names(models)):
            declared += _declared_of(path, model.get_submodule(path), storage)
    if declared:
        lines.append(f"stays in float32, as the model declares: {fmt.first_names(declared, 8)}")
    return {**dict.fromkeys(declared, torch.float32), **kept}, tuple(lines)


def _declared_of(path: str, model: Any, storage: torch.dtype) -> Iterator[str]:
    """Yield the names of the float32 tensors of a model of transformers, which is at a path."""
    patterns = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if storage is torch.float16:
        patterns |= {*(model._keep_in_fp32_modules or ())}
    listed = re.compile("|".join(p.replace("*", ".*") for p in patterns) or "$^")
    persistent = model.state_dict(keep_vars=True)
    explicit = _explicit_float32(model, storage)
    for name in _named_floats(model):
        is_listed = name in persistent and listed.search(name)
        if is_listed or name in explicit:
            yield f"{path}.{name}".lstrip(".")


def _explicit_float32(model: Any, storage: torch.dtype) -> set[str]:
    """Return the names of the tensors that a model's constructor makes in float32 where torch's
    default dtype is the storage dtype."""
    try:
        # Without memory, as transformers' own loading builds it first.
        with torch.device("meta"), torch.random.fork_rng(devices=[]), terminal.suppress_warnings():
            built = type(model)._from_config(deepcopy(model.config), dtype=storage)
    except Exception:
        # A class of one's own may take more than a config. Every architecture has these in float32.
        return {name for name, _ in model.named_buffers() if name.endswith("inv_freq")}
    return {name for name, tensor in _named_tensors(built).items() if tensor.dtype is torch.float32}


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by dotted name; a shared one by each of its names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def _named_floats(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's floating parameters and buffers by dotted name, as _named_tensors does."""
    named = _named_tensors(model).items()
    return {name: tensor for name, tensor in named if tensor.is_floating_point()}


def _tensors_named(model: nn.Module, name: str) -> list[Tensor]:
    """Return the parameter or buffer of a dotted name, or the tensors of that name's module."""
    path, _, key = name.rpartition(".")
    holder = model.get_submodule(path)
    tensor = holder._parameters.get(key, holder._buffers.get(key))
    if tensor is not None:
        return [tensor]
    module = model.get_submodule(name)
    return [*module.parameters(), *module.buffers()]
