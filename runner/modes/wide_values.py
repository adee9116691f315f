"""Leave values wider than a precision stores them, where the model's forward takes them so.

The rule is in docs/precisions.md. It is about labels that the model takes, float64 inputs and parts
of the model, inputs and outputs of modules of keep_fp32, and tensors that a forward makes without a
dtype. One forward finds what the model takes, and another one proves it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.precision.casting import (
    DefaultDtype,
    WideTrial,
    cast_tensor,
    fields_of,
    is_wider,
    lost_whole_numbers,
)
from runner.precision.contract import Precision
from runner.precision.keep_fp32 import KeptInFloat32, double_parts
from runner.training.setup import TrainingSetup
from runner.training.tasks.task import Task
from runner.utils.errors import ConfigError
from runner.utils.formatting import first_names
from runner.utils.module_tape import ROOT, ModuleTape
from runner.utils.tensors import dtype_name

Forward = Callable[[Any, bool], bool]
"""Calls the model with inputs, in training mode or not; returns whether it succeeds."""


class WideValues(NamedTuple):
    """What may stay wider than a precision stores.

    Attributes:
        inputs: the dtypes that fields of the model's inputs may have, by key or position.
        label: the key or position of the target among them.
        lost: of inputs with whole numbers that the storage dtype cannot hold, one in words.
        kept: the modules of keep_fp32, by name, where the storage dtype is narrower.
        parts: the parameters and buffers that the model built in float64, by name.
        contexts: of forward and backward, where 16 bits are the default dtype in them.
    """

    inputs: dict[str | int, torch.dtype]
    label: str | int | None
    lost: dict[str | int, str]
    kept: dict[str, KeptInFloat32]
    parts: dict[str, Tensor]
    contexts: list[DefaultDtype]

    def leave(self, precision: Precision, inputs: Any, outputs: Any, makes_wide: bool) -> None:
        """Leave these inputs, outputs of kept modules (None: all), and tensors without a dtype."""
        precision.wide_inputs = inputs
        for context in self.contexts:
            context.dtype = torch.float32 if makes_wide else precision.storage
        for name, module in self.kept.items():
            module._surroundings = torch.float32 if outputs is None else precision.storage
            module._wide_outputs = {key: torch.float32 for of, key in outputs or () if of == name}


class Findings(NamedTuple):
    """What a forward does with wide values: names of inputs, parts, outputs and makers of tensors,
    each with its kind before it.

    Attributes:
        refused: what an operation failed with.
        found: inputs of kept modules, their outputs, and modules that make tensors without a dtype.
        losing: modules whose tensors made so have distinct values that 16 bits make equal.
    """

    refused: set[Any]
    found: set[Any]
    losing: set[Any]

    def taken(self, kind: str) -> set[Any]:
        """Return the names of what was found of a kind and the forward takes."""
        return {name for of, name in self.found - self.refused if of == kind}


def fit_wide_values(
    setup: TrainingSetup, model: nn.Module, batch: Any, completes: Forward
) -> list[str]:
    """Leave values wider than the precision stores where the forward takes them so; return lines
    that name them.

    Args:
        setup: its precision is changed.
        model: converted; changed in place.
        batch: the model's inputs.
        completes: see Forward.

    Raises:
        ConfigError: 16 bits would change whole numbers among the inputs.
    """
    precision, strategy = setup.precision, setup.strategy
    precision.wide_inputs = {}
    wide = _wide_values(setup, model, batch)
    if not strategy.all_reduce_max(any(map(len, (wide.inputs, *wide[3:])))):
        return []
    findings, modes = _try(setup, model, batch, completes, wide)
    storage = precision.storage
    wanted = {wide.label, *wide.lost, *findings.taken("input")}
    inputs = {
        key: dtype
        for key, dtype in wide.inputs.items()
        if ("input", key) not in findings.refused and (key in wanted or dtype is torch.float64)
    }
    outputs, makers = findings.taken("output"), findings.taken("made")
    are_wide = bool(makers) and not any(of == "made" for of, _ in findings.refused)
    cast = [name for name in wide.parts if ("part", name) in findings.refused]
    _cast(wide.parts, cast, storage)
    wide.leave(precision, inputs, outputs, are_wide)
    if inputs or outputs or are_wide or wide.parts:
        own = bool(modes) and all(completes(batch, mode) for mode in modes)
        if not strategy.broadcast_object(all(strategy.gather_object(own))):
            # An autograd.Function, say, hides its operations from the trial.
            inputs, outputs, are_wide, cast = {}, set(), False, [*wide.parts]
            _cast(wide.parts, cast, storage)
            wide.leave(precision, inputs, outputs, are_wide)
    lost = [text for key, text in wide.lost.items() if key not in inputs]
    if lost and storage.itemsize == 2:
        raise ConfigError(
            f"precision={precision.name} would change whole numbers: {first_names(lost, 3)}; no "
            "layer takes them in float32. Have the data set yield numbers of categories as "
            "integers, in a field of their own, and scale measurements; or type precision="
            f"{precision.wider_precision}, which leaves inputs as they are."
        )
    narrow = dtype_name(storage)
    lines = {
        "stays in float32 or float64, which the forward takes: input ": [*map(str, inputs)],
        "stays in float32, which the forward takes: output of ": sorted({of for of, _ in outputs}),
        "stays in float32, which the forward takes: tensors made without a dtype by ": (
            sorted(makers) if are_wide else []
        ),
        "stays in float64, as the model was built: ": [n for n in wide.parts if n not in cast],
        f"cast from float64 to {narrow}, for an operation takes no float64: ": cast,
        f"warning: precision={precision.name} changes whole numbers: ": lost,
        f"warning: of tensors made without a dtype {narrow} makes distinct values equal, and an "
        "operation takes no float32. Type precision.keep_fp32=[<module>], or compute them with "
        "dtype=torch.float32 and cast the result, in ": (
            [] if are_wide else sorted(name for _, name in findings.losing)
        ),
        f"warning: an operation takes the labels in {narrow} only, which rounds them: input ": (
            [str(wide.label)] if wide.label in wide.inputs.keys() - inputs.keys() else []
        ),
    }
    return [text + first_names(names, 8) for text, names in lines.items() if names]


def _wide_values(setup: TrainingSetup, model: nn.Module, batch: Any) -> WideValues:
    precision, device = setup.precision, setup.device
    storage = precision.storage
    label = _label_field(setup.task, batch)
    inputs: dict[str | int, torch.dtype] = {}
    lost: dict[str | int, str] = {}
    for key, value in fields_of(batch).items():
        floats = [leaf for leaf in tree_leaves(value) if is_wider(leaf, storage)]
        if floats and key == label:
            inputs[key] = precision.loss_dtype
        elif floats:
            is_double = any(leaf.dtype is torch.float64 for leaf in floats)
            inputs[key] = torch.float64 if is_double else torch.float32
            for leaf in floats:
                for column, number in lost_whole_numbers(leaf, storage):
                    lost[key] = f"{number:.15g} in column {column} of input {key}"
    kept: dict[str, KeptInFloat32] = {}
    contexts: list[DefaultDtype] = []
    if storage.itemsize == 2:
        named = model.named_modules()
        kept = {name or ROOT: m for name, m in named if isinstance(m, KeptInFloat32)}
        both = precision.forward(device), precision.backward(device)
        contexts = [context for context in both if isinstance(context, DefaultDtype)]
    parts = {} if storage is torch.float64 else double_parts(model)
    return WideValues(inputs, label, lost, kept, parts, contexts)


def _label_field(task: Task, inputs: Any) -> str | int | None:
    """Return the key or position of the target among the inputs, of a model that takes it."""
    if not task.passes_target:
        return None
    if isinstance(inputs, Mapping):
        return task.layout(None, task.target_field).field_names(tuple(inputs))[0]
    return len(inputs) - 1


def _cast(parts: Mapping[str, Tensor], names: list[str], dtype: torch.dtype) -> None:
    for name in names:
        parts[name].data = cast_tensor(parts[name].data, dtype)


def _try(
    setup: TrainingSetup, model: nn.Module, batch: Any, completes: Forward, wide: WideValues
) -> tuple[Findings, list[bool]]:
    """Return what forwards of all processes do with wide values, and the modes that succeed.

    What a forward makes without a dtype may be made in training mode alone.
    """
    precision = setup.precision
    kept = wide.kept
    found = set[Any]()

    def begin(name: str, call: Any) -> None:
        if name in kept:
            found.update(origin for origin in trial.origins(call) if origin[0] == "input")

    def end(name: str, output: Any) -> None:
        for key, value in fields_of(output).items() if name in kept else ():
            if trial.add(value, ("output", (name, key))):
                found.add(("output", (name, key)))

    wide.leave(precision, wide.inputs, None, makes_wide=True)
    first = precision.cast(batch)
    with ModuleTape() as tape:

        def maker() -> str:
            is_kept = any(name in kept for name in tape.running)
            return "" if is_kept or not wide.contexts or not tape.running else tape.running[-1]

        trial = WideTrial(precision.storage, maker)
        for key, value in fields_of(first).items():
            trial.add(value, ("input", key))
        for name, part in wide.parts.items():
            trial.add(part, ("part", name))
        for name, module in model.named_modules():
            tape.watch_calls(name or ROOT, module, begin, end)
        with trial:
            tried = (False, True) if wide.contexts else (False,)
            modes = [mode for mode in tried if completes(first, mode)]
    own = trial.refused, found | trial.makers, trial.losing
    every = setup.strategy.gather_object(own)
    together = Findings(*(set().union(*each) for each in zip(*every, strict=True)))
    return setup.strategy.broadcast_object(together), modes
