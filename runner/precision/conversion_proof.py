"""Prove by forwards on the first batch that a model computes with its converted layers, and find
what stays wider than a precision stores.

Layers that the model bypasses stay unconverted, and experts that the forward finds are converted:
for that a model is built a second time.

Inputs, parts built in float64, outputs of modules that are kept in float32, and tensors that a
forward makes without a dtype are tried wide: docs/precisions.md#what-is-cast has the rule.
"""

from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from runner.core import (
    ConfigError,
    ConversionPlan,
    ConversionReport,
    Fate,
    Precision,
    fmt,
    module_tape,
    module_tree,
    tensor_facts,
)
from runner.precision.casting import (
    KeptInFloat32,
    double_parts,
    fields_of,
    is_wider,
    lost_whole_number,
)
from runner.precision.forward_watch import (
    ForwardWatch,
    ModelTrial,
    adapted_layers,
    converted_layers,
    expert_layouts,
    holds_matrix,
)
from runner.precision.layers.experts import Experts, expert_stacks, restore_stacks

# Why a converted layer counts as not converted; the texts are in conversion.json.
BYPASSED_REASON = "the model reads its weight and passes its forward by"
CODES_REASON = "the model reads its weight itself, which packed would hold codes"
NOT_RUN_REASON = "converted, but not proven: it did not run in the first batch"
# Why it counts after all.
RAN_IN_TRAINING_REASON = "ran in the first step, not in the evaluation before it"


class Proof(NamedTuple):
    """What a precision has found out about a model on its first batch.

    Attributes:
        plan: by which the model is called; or built again, where that is needed.
        report: the conversion as far as it is proven.
        needs_rebuild: the model must be built again, by the plan.
    """

    plan: ConversionPlan
    report: ConversionReport
    needs_rebuild: bool = False


class _TrialResult(NamedTuple):
    """The layers that a trial forward proves or disproves.

    Attributes:
        layers_run: names of the converted layers that ran.
        bypass_reasons: reasons why others count as not converted, by name.
        forward_completed: whether the forward returned without an error.
        experts: dotted names of the stacked weights that are multiplied expert by expert, and
            whether each is transposed.
        plain_stacks: see ConversionPlan.
    """

    layers_run: set[str]
    bypass_reasons: dict[str, str]
    forward_completed: bool
    experts: dict[str, bool]
    plain_stacks: dict[str, str]


def prove_model(precision: Precision, trial: ModelTrial, is_rebuilt: bool = False) -> Proof:
    """Return what forwards on the first batch show about a model; all processes call it.

    Args:
        precision: that converted the model.
        trial: the model, and how its forward is computed.
        is_rebuilt: the model was built by the plan of an earlier proof.

    Raises:
        ConfigError: no converted layer runs, other layers are bypassed in the second build, or
            16 bits would change whole numbers of which the forward makes integers.
    """
    model = trial.model
    converted = converted_layers(model, trial.report)
    adapted = adapted_layers(model)
    layers = adapted | converted
    plan, lines = find_wide_values(precision, trial, layers)
    report = replace(trial.report, kept=(*trial.report.kept, *lines))
    experts = expert_layouts(model)
    if not (experts or layers):
        return Proof(plan, report)
    result = _try_together(trial, plan, ForwardWatch(model, layers))
    if is_rebuilt and result.bypass_reasons:
        raise _second_bypass(precision, plan.bypassed, result.bypass_reasons)
    if not is_rebuilt:
        _check_named_layouts(precision, result.experts)
        if _needs_rebuild(trial, bool(converted), result, experts):
            found = ConversionPlan(
                bypassed={**plan.bypassed, **result.bypass_reasons},
                # What a forward that failed has found of them is not all.
                expert_layouts=result.experts if result.forward_completed else plan.expert_layouts,
                plain_stacks=result.plain_stacks,
            )
            return Proof(found, report, needs_rebuild=True)
    for module in model.modules():
        if isinstance(module, Experts) and module.is_trial and result.forward_completed:
            restore_stacks(module)
    layouts = {stack.name: stack.transposed for stack in expert_stacks(model)}
    plan = replace(plan, expert_layouts={**plan.expert_layouts, **layouts})
    if not result.forward_completed:
        return Proof(plan, report)  # the run tries the batch next, and says why
    matrix_layers = [name for name, layer in converted.items() if holds_matrix(layer)]
    if converted and not result.layers_run & {*matrix_layers}:
        raise ConfigError(
            f"precision={precision.name}: none of the layers that it converts runs in the model's "
            f"forward on the first batch: {fmt.first_names(sorted(matrix_layers))}. Have the "
            "forward call them. Type a precision without conversion, for example "
            "precision=bf16-mixed."
        )
    idle = {*report.names(Fate.CONVERTED)} - result.layers_run
    report = report.change(idle, Fate.UNPROVEN, NOT_RUN_REASON)
    # Other stacks of a module may be converted.
    for row in report.modules:
        why = {**plan.plain_stacks, **result.plain_stacks}.get(row.module, "")
        if why:
            remark = f"in part, for {why}" if row.is_converted else why
            report = report.change({row.module}, row.fate, remark)
    return Proof(plan, report)


@contextmanager
def watch_first_step(
    precision: Precision, model: nn.Module, report: ConversionReport
) -> Iterator[Set[str]]:
    """Return the context around the first training step, whose value names after it the modules
    that are converted, did not run in the proof and ran in the step.

    Raises:
        ConfigError: the model reads a packed weight in training, though not in evaluation.
    """
    proven = set[str]()
    # Layers that did not run in the trial are converted all the same, and may run now.
    watched = converted_layers(model, report)
    if not watched:
        yield proven
        return
    with ForwardWatch(model, watched) as watch:
        yield proven
    bypassed = _bypass_reasons(watch)
    if bypassed:
        raise ConfigError(
            f"precision={precision.name}: in the first step, and not in the evaluation before it: "
            f"{_reasons_text(bypassed)}. Type precision.ignore_modules=[{','.join(bypassed)}]."
        )
    proven |= watch.executed.intersection(report.names(Fate.UNPROVEN))


def _try_together(trial: ModelTrial, plan: ConversionPlan, watch: ForwardWatch) -> _TrialResult:
    """Return the result of a trial forward of all processes together.

    All processes must call it. They see different samples, so a layer that runs in one of them
    has run, and one that is bypassed in one of them is bypassed.
    """
    completed = trial.forward(trial.inputs, plan, watch)
    found = watch.experts(), watch.plain_stacks
    own = _TrialResult(watch.executed, _bypass_reasons(watch), completed, *found)
    every = trial.strategy.gather_object(own)
    together = _TrialResult(
        layers_run={name for one in every for name in one.layers_run},
        bypass_reasons=dict(sorted(pair for one in every for pair in one.bypass_reasons.items())),
        forward_completed=all(one.forward_completed for one in every),
        experts=dict(sorted(pair for one in every for pair in one.experts.items())),
        plain_stacks={name: why for one in every for name, why in one.plain_stacks.items()},
    )
    return trial.strategy.broadcast_object(together)


def _needs_rebuild(
    trial: ModelTrial, converts: bool, result: _TrialResult, experts: Mapping[str, bool | None]
) -> bool:
    """Return whether a model has to be built once more, by what its trial has found.

    Args:
        trial: of the model.
        converts: a layer of the model is converted.
        result: of the trial.
        experts: the stacked weights of the model, see forward_watch.expert_layouts.
    """
    # Stacked weights that a forward had to find, or whose matrices it multiplies the other way.
    is_corrected = any(experts[name] is not found for name, found in result.experts.items())
    if is_corrected or result.bypass_reasons:
        return True
    # Stacks that the forward has not shown to be experts' are restored in place, except: without a
    # converted layer the second build says so; units of FSDP have made classes of those of their
    # modules; an adapter was given none of them, though its patterns may name no other layer.
    is_restorable = not trial.strategy.shards and not trial.has_adapter and converts
    return None in experts.values() and not is_restorable


def _bypass_reasons(watch: ForwardWatch) -> dict[str, str]:
    """Return why layers count as not converted, by name."""
    reasons = {
        name: CODES_REASON if name in watch.executed else BYPASSED_REASON
        for name in sorted(watch.bypassed)
    }
    return reasons | watch.obstacles


def _check_named_layouts(precision: Precision, found: Mapping[str, bool]) -> None:
    """Raise ConfigError for a stack whose order of dimensions precision.experts gives otherwise
    than a forward has found it; for `found` see ForwardWatch.experts."""
    patterns = [str(pattern) for pattern in getattr(precision, "experts", ())]
    for name, transposed in found.items():
        # The last of several patterns counts.
        matching = [p for p in patterns if module_tree.matches_pattern(p.partition(":")[0], name)]
        if matching and (":" in matching[-1]) is not transposed:
            own, _, layout = matching[-1].partition(":")
            right = own if layout else f"{own}:in_out"
            raise ConfigError(
                f"precision.experts names {matching[-1]}, and the forward multiplies {name} as "
                f"{'[experts, in, out]' if transposed else '[experts, out, in]'}. Type {right} in "
                "its place."
            )


def _second_bypass(
    precision: Precision, bypassed: Mapping[str, str], reasons: Mapping[str, str]
) -> ConfigError:
    """Return the error for layers of a second build that count as not converted, by name, beside
    those that were bypassed in the first one."""
    ignored = ",".join(sorted({*bypassed, *reasons}))
    left = fmt.first_names(sorted(bypassed))
    where = f" That shows only where {left} are left as they were." * bool(left)
    return ConfigError(
        f"precision={precision.name}: {_reasons_text(reasons)}.{where} Type "
        f"precision.ignore_modules=[{ignored}]."
    )


def _reasons_text(bypassed: Mapping[str, str]) -> str:
    return fmt.first_names([f"{name}: {why}" for name, why in bypassed.items()], 4, "; ")


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
        self.parts = double_parts(model, storage)
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
            args, kwargs = tree_map(
                lambda value: value.to(self._storage) if id(value) in self._origins else value,
                (args, kwargs),
            )
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
            # Positions and angles do so; cosines near 1 that become equal are as good as before.
            is_coarse = func is torch.rand or bool(((narrow - result).abs() > 2**-7).any())
            if is_coarse and narrow.unique().numel() < result.unique().numel():
                self.losing.add(running[-1])
        return is_made


def find_wide_values(
    precision: Precision, trial: ModelTrial, layers: Mapping[str, nn.Module]
) -> tuple[ConversionPlan, list[str]]:
    """Leave wider than a precision stores what the forward takes so.

    Args:
        precision: of the run.
        trial: the model, whose parts and kept modules are changed in place.
        layers: those that are watched in a forward, in which packed weights can be read.

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
        results = [
            trial.forward(lambda: values, plan, ForwardWatch(trial.model, layers), mode)
            for mode in modes
        ]
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
