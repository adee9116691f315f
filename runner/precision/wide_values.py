"""Find what stays wider than a precision stores: inputs, parts built in float64, outputs of modules
that are kept in float32, and tensors that a forward makes without a dtype.

docs/precisions.md#what-is-cast has the rule.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from runner.core import ConfigError, ConversionPlan, Precision, fmt, module_tape, tensor_facts
from runner.precision.casting import fields_of, is_wider, lost_whole_number
from runner.precision.forward_watch import ForwardWatch, ModelTrial
from runner.precision.keep_fp32 import KeptInFloat32, double_parts

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
DEFAULT_DTYPE = ("tensors made without ", "a dtype")
"""The origin, see WideTrial, of tensors that a forward makes without a dtype."""


class WideTrial(TorchFunctionMode):
    """A context around forwards in which values are wider than the precision stores, and which
    finds those of them that an operation does not take.

    An operation that fails with such values gets them cast, so that one forward finds all. Values
    come from origins: ("input ", key), ("", name of a part), ("output of ", name of a kept module,
    key), and DEFAULT_DTYPE.

    Args:
        model: converted; its parts built in float64 and its kept modules' outputs are tried.
        storage: dtype of the precision.
        makes_float32: tensors made without a dtype are tried in float32, see ConversionPlan.

    Attributes:
        parts: the parameters and buffers that the model built in float64, by name.
        found: the origins of wide values.
        refused: those with which an operation failed.
        indices: those of which an operation makes integers, as of categories in a float column.
        losing: modules whose tensors made without a dtype have distinct values that are equal in
            16 bits.
    """

    def __init__(self, model: nn.Module, storage: torch.dtype, makes_float32: bool) -> None:
        super().__init__()
        is_half = storage.itemsize == 2
        self._storage = storage
        self._makes_float32 = makes_float32
        named = [(name or module_tape.ROOT, module) for name, module in model.named_modules()]
        self._kept = {n: m for n, m in named if is_half and isinstance(m, KeptInFloat32)}
        self.parts = {} if storage is torch.float64 else double_parts(model)
        self._origins: dict[int, tuple[Tensor, set[Any]]] = {}  # by id of the tensor, kept alive
        self._made = set[int]()  # ids of tensors made without a dtype, or computed of such alone
        self.found, self.refused, self.indices = set[Any](), set[Any](), set[Any]()
        self.losing = set[str]()
        self._tape = module_tape.ModuleTape()
        for name, module in named:
            self._tape.watch_calls(name, module, end=self._note_outputs)
        for kept in self._kept.values():
            kept._surroundings = torch.float32
        for name, part in self.parts.items():
            self.add(part, {("", name)})

    def add(self, values: Any, origins: set[Any]) -> None:
        """Note what the wide ones among the tensors of a nest come from."""
        for leaf in tree_leaves(values):
            if is_wider(leaf, self._storage):
                self._origins[id(leaf)] = leaf, origins
                self.found |= origins

    def leave(self, taken: Collection[Any]) -> None:
        """End the trial; leave wide what these origins name of the model's, and cast the rest."""
        self._tape.close()
        for name, module in self._kept.items():
            keys = [origin[2] for origin in taken if origin[:2] == ("output of ", name)]
            module._surroundings = self._storage
            module._wide_outputs = dict.fromkeys(keys, torch.float32)
        for name, part in self.parts.items():
            if ("", name) not in taken:
                part.data = part.data.to(self._storage)

    def _note_outputs(self, name: str, output: Any) -> None:
        for key, value in fields_of(output).items() if name in self._kept else ():
            self.add(value, {("output of ", name, key)})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        origins = {o for leaf in leaves for o in self._origins.get(id(leaf), (None, ()))[1]}
        try:
            result = func(*args, **kwargs)
        except Exception:
            if not origins:
                raise
            self.refused |= origins
            args, kwargs = tree_map(self._narrowed, (args, kwargs))
            return func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype in _INTEGERS:
            self.indices |= origins
        if self._is_made(func, leaves, result):
            origins = {DEFAULT_DTYPE}
        self.add(result, origins)
        return result

    def _is_made(self, func: Any, leaves: list[Any], result: Any) -> bool:
        """Return whether a tensor is made without a dtype, or computed of such alone."""
        running = self._tape.running
        has_dtype = func is Tensor.float or any(isinstance(leaf, torch.dtype) for leaf in leaves)
        given = [v for v in leaves if isinstance(v, Tensor) and id(v) not in self._made]
        has_numbers = any(v.is_floating_point() or v.is_complex() for v in given)
        is_new = is_wider(result, self._storage) and not (has_dtype or has_numbers)
        is_outside = bool(running) and self._kept.keys().isdisjoint(running)
        is_made = self._makes_float32 and is_outside and is_new
        # Of normal numbers 16 bits lose no more than of the sums that they are added to, and
        # torch.empty has no values yet.
        if is_made and func not in (torch.randn, torch.empty):
            self._made.add(id(result))
            narrow = result.to(self._storage)
            # As positions and angles do; cosines near 1 that become equal are as good as before.
            is_coarse = func is torch.rand or bool(((narrow - result).abs() > 2**-7).any())
            if is_coarse and narrow.unique().numel() < result.unique().numel():
                self.losing.add(running[-1])
        return is_made

    def _narrowed(self, value: Any) -> Any:
        return value.to(self._storage) if id(value) in self._origins else value


def find_wide_values(
    precision: Precision, trial: ModelTrial, watch: Callable[[], ForwardWatch]
) -> tuple[ConversionPlan, list[str]]:
    """Leave wider than a precision stores what the forward takes so.

    Args:
        precision: of the run.
        trial: the model, whose parts and kept modules are changed in place.
        watch: makes the context around a forward, in which packed weights can be read.

    Returns:
        The plan with the dtypes of wide inputs, and lines for the console.

    Raises:
        ConfigError: 16 bits would change whole numbers of which the forward makes integers.
    """
    storage = precision.storage
    batch = trial.inputs()
    fields = fields_of(batch)
    label = [*fields][-1] if trial.has_label else None
    wide: dict[str | int, torch.dtype] = {}
    for key, value in fields.items():
        dtypes = {leaf.dtype for leaf in tree_leaves(value) if is_wider(leaf, storage)}
        if dtypes:
            wide[key] = torch.float64 if torch.float64 in dtypes else torch.float32
    makes_float32 = storage.itemsize == 2 and not precision.has_autocast
    plan = replace(trial.plan, wide_inputs=wide, makes_float32=makes_float32)
    first = precision.cast(batch, plan)
    wide_trial = WideTrial(trial.model, storage, makes_float32)
    for key, value in fields_of(first).items():
        wide_trial.add(value, {("input ", key)})
    # In training mode, too, in which alone a forward may make tensors without a dtype.
    modes = (False, True) if makes_float32 else (False,)

    def complete_together(values: Any) -> bool:
        results = [trial.forward(lambda: values, plan, watch(), mode) for mode in modes]
        return trial.strategy.broadcast_object(all(results))

    with wide_trial:
        if wide_trial.found or makes_float32:
            complete_together(first)
    found = trial.strategy.broadcast_object(wide_trial.found - wide_trial.refused)
    # An autograd.Function, say, hides its operations from the trial: what is found is proven.
    for taken in (found, set[Any]()):
        kept = {key: dtype for key, dtype in wide.items() if ("input ", key) in taken}
        plan = replace(trial.plan, wide_inputs=kept, makes_float32=DEFAULT_DTYPE in taken)
        wide_trial.leave(taken)
        if not taken or complete_together(batch):
            break
    narrow = tensor_facts.dtype_name(storage)
    rounded = {*wide} - {*plan.wide_inputs, label} if storage.itemsize == 2 else set()
    lost = {key: lost_whole_number(fields[key], storage) for key in sorted(rounded, key=str)}
    lines = [*_lost_number_lines(precision, lost, wide_trial.indices)]
    cast = {o for o in wide_trial.found - taken if o[0] == "" or o[1] == label}
    if taken:
        lines.append(f"stays wider than {narrow}, as the forward takes it: {_origins_text(taken)}")
    if cast:
        lines.append(
            f"cast to {narrow}, for an operation takes nothing wider: {_origins_text(cast)}"
        )
    losing = fmt.first_names(sorted(wide_trial.losing))
    if losing and DEFAULT_DTYPE not in taken:
        lines.append(
            f"warning: tensors made without a dtype are in {narrow}, for an operation takes no "
            f"wider ones, and distinct values become equal in {losing}. Make them there with "
            "dtype=torch.float32, or type precision.keep_fp32=[<module>]"
        )
    return plan, lines


def _lost_number_lines(
    precision: Precision, lost: Mapping[str | int, str], indices: Collection[tuple[Any, ...]]
) -> Iterator[str]:
    """Yield a warning for each input whose whole numbers 16 bits change.

    Args:
        precision: of the run.
        lost: such a number, with its place, by the input's key; empty for none.
        indices: origins of values of which the forward makes integers.

    Raises:
        ConfigError: the forward makes integers of such an input.
    """
    narrow = tensor_facts.dtype_name(precision.storage)
    for key, number in lost.items():
        if number and ("input ", key) in indices:
            raise ConfigError(
                f"precision={precision.name}: {narrow} would change whole numbers, {number} of "
                f"input {key}, of which the forward makes integers, and a layer takes no float32. "
                "Have the data set yield categories as integers, or type "
                f"precision={precision.wider_precision}."
            )
        if number:
            yield (
                f"warning: {narrow} changes whole numbers, {number} of input {key}. Scale the "
                f"column, or type precision={precision.wider_precision}"
            )


def _origins_text(origins: set[tuple[Any, ...]]) -> str:
    return fmt.first_names(sorted({f"{kind}{name}" for kind, name, *_ in origins}))
