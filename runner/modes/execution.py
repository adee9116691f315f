"""Build what a run computes with: its model, proven by a trial forward, and its training state.

Training, evaluation, mode=diff, mode=explain and mode=replay build both here, in one order: a
replay that assembled them otherwise than training would not be bit-exact. The trial forward proves
a conversion before it is announced and before anything trains.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.data.sampling import restored_random_state
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.modes.context import RunContext
from runner.modes.training_outputs import describe_computation
from runner.precision.casting import CastCacheWatch, fields_of, is_wider, lost_whole_number
from runner.precision.contract import ConversionPlan, Precision
from runner.precision.conversion_proof import (
    ForwardWatch,
    adapted_layers,
    converted_layers,
    expert_layouts,
    holds_matrix,
)
from runner.precision.conversion_report import ConversionReport
from runner.precision.keep_fp32 import DEFAULT_DTYPE, WideTrial
from runner.precision.layers.experts import Experts, expert_stacks, restore_stacks
from runner.training.expert_loads import ExpertLoads
from runner.training.initial_weights import read_initial_weights
from runner.training.model import (
    BuiltModel,
    ModelBuilder,
    build_model,
    build_sharded_model,
    restore_precision_state,
)
from runner.training.model_call import call_model
from runner.training.setup import TrainingSetup, build_state
from runner.training.state import TrainState
from runner.utils.errors import ConfigError, RunnerError
from runner.utils.formatting import first_names
from runner.utils.layout import ROUTERS
from runner.utils.modules import matches_pattern, set_training
from runner.utils.reproducibility import saved_forward_state, seed_all
from runner.utils.tensors import dtype_name

# Why a converted layer counts as not converted; the texts are in conversion.json.
BYPASSED_REASON = "the model reads its weight and passes its forward by"
CODES_REASON = "the model reads its weight itself, which packed would hold codes"
NOT_RUN_REASON = "converted, but not proven: it did not run in the first batch"
# Why it counts after all.
RAN_IN_TRAINING_REASON = "ran in the first step, not in the evaluation before it"


def build_execution(
    setup: TrainingSetup,
    make: ModelBuilder,
    inputs: Callable[[], Any],
    total_steps: int | None = None,
) -> tuple[BuiltModel, TrainState]:
    """Build the model and the state of an execution.

    Training and evaluation report the model before they build its state, with the same two calls.

    Args:
        setup: the parts that exist before the model does.
        make: see build_proven_model.
        inputs: see build_proven_model.
        total_steps: see build_state.

    Raises:
        ConfigError: as build_proven_model and build_state.
    """
    precision = setup.precision
    built = build_proven_model(setup, make, inputs)
    plan = built.plan
    # As training does in its trial of a batch, see startup.watched_casts.
    if precision.compute is not precision.storage:
        with CastCacheWatch(built.model) as watch:
            _process_trial(setup, built, inputs)
        plan = replace(plan, caches_casts=not watch.rewritten)
    with precision.session(built.model, setup.device):
        return built, build_state(setup, built.model, total_steps, plan)


def starting_model(setup: TrainingSetup, resumed: LoadedCheckpoint | None = None) -> ModelBuilder:
    """Return the function that builds the model that training starts from.

    Args:
        setup: its spec's model, adapter and init sections are read.
        resumed: a checkpoint whose weights, packing and adapter are restored exactly as they were;
            None starts from init.weights, or from seeded weights.

    Raises:
        ConfigError: init.weights names no checkpoint.
    """
    # The model may be built twice, see build_proven_model; the checkpoint is read once, here.
    start = resumed or read_initial_weights(setup.spec)
    exact = resumed is not None
    return partial(build_model, setup.spec, setup.precision, start=start, restore_exactly=exact)


class TrialResult(NamedTuple):
    """The layers that a trial forward proves or disproves.

    Attributes:
        layers_run: names of the converted layers that ran.
        bypass_reasons: reasons why others count as not converted, by name.
        forward_completed: whether the forward returned without an error.
        matrix_layers: names of the converted layers that hold a matrix.
        experts: dotted names of the stacked weights that are multiplied expert by expert, and
            whether each is transposed.
        left_stacks: see ForwardWatch.
    """

    layers_run: set[str]
    bypass_reasons: dict[str, str]
    forward_completed: bool
    matrix_layers: list[str]
    experts: dict[str, bool]
    left_stacks: dict[str, str]


def build_proven_model(
    setup: TrainingSetup,
    make: ModelBuilder,
    inputs: Callable[[], Any],
    saved: LoadedCheckpoint | None = None,
) -> BuiltModel:
    """Build a model, sharded where the strategy shards, whose conversion one forward proves.

    Layers that the model bypasses stay unconverted and get no adapter, and experts that the forward
    finds are converted. For that the model is built a second time.

    Args:
        setup: its precision converts the model; the processes of its strategy agree on the plan.
        make: builds the model from a freshly seeded generator.
        inputs: loads the model inputs of the first batch.
        saved: a checkpoint whose precision state the model has in the forward; None for none.

    Raises:
        ConfigError: no converted layer runs, or other layers are bypassed in the second build.
    """
    built = _build(setup, make, ConversionPlan(finds_experts=True), inputs, saved)
    experts = expert_layouts(built.model)
    if not (experts or _converts(built) or adapted_layers(built.model)):
        return built
    trial = _trial(setup, built, inputs)
    left_stacks = trial.left_stacks
    _check_named_layouts(setup.precision, trial.experts)
    if _needs_second_build(setup, built, trial, experts):
        plan = ConversionPlan(
            bypassed={**built.plan.bypassed, **trial.bypass_reasons},
            # What a forward that failed has found of them is not all.
            expert_layouts=trial.experts if trial.forward_completed else built.plan.expert_layouts,
        )
        del built  # else both models would be in memory
        seed_all(setup.spec.seed)
        built = _build(setup, make, plan, inputs, saved)
        trial = _trial(setup, built, inputs)
        if trial.bypass_reasons:
            raise _second_bypass(setup.precision, built.plan.bypassed, trial.bypass_reasons)
    for module in built.model.modules():
        if isinstance(module, Experts) and module.is_trial and trial.forward_completed:
            restore_stacks(module)
    found = {stack.name: stack.transposed for stack in expert_stacks(built.model)}
    plan = replace(built.plan, expert_layouts={**built.plan.expert_layouts, **found})
    built = built._replace(plan=plan)
    if not trial.forward_completed:
        return built  # try_batch, which comes next, says why
    if _converts(built) and not trial.layers_run & {*trial.matrix_layers}:
        raise ConfigError(
            f"precision={setup.precision.name}: none of the layers that it converts runs in the "
            f"model's forward on the first batch: {_names_text(trial.matrix_layers)}. Have the "
            "forward call them. Type a precision without conversion, for example "
            "precision=bf16-mixed."
        )
    idle = {row.module for row in built.report.modules if row.done} - trial.layers_run
    report = _with_fate(built.report, idle, False, NOT_RUN_REASON)
    return built._replace(report=_with_left_stacks(report, left_stacks))


def _converts(built: BuiltModel) -> bool:
    return any(row.done for row in built.report.modules)


def _needs_second_build(
    setup: TrainingSetup, built: BuiltModel, trial: TrialResult, experts: Mapping[str, bool | None]
) -> bool:
    """Return whether the model has to be built once more, by what a trial of it has found.

    Args:
        setup: as for build_proven_model.
        built: the model that was tried.
        trial: its result.
        experts: the stacked weights of the model, see conversion_proof.expert_layouts.
    """
    # Stacked weights that a forward had to find, or whose matrices it multiplies the other way.
    is_corrected = any(experts[name] is not found for name, found in trial.experts.items())
    if is_corrected or trial.bypass_reasons:
        return True
    # Stacks that the forward has not shown to be experts' are restored in place, except: without a
    # converted layer the second build says so; units of FSDP have made classes of those of their
    # modules; an adapter was given none of them, though its patterns may name no other layer.
    has_adapter = bool(setup.spec.adapter.get("_target_"))
    is_restorable = not setup.strategy.shards and not has_adapter and _converts(built)
    return None in experts.values() and not is_restorable


def _with_fate(report: ConversionReport, names: set[str], done: bool, why: str) -> ConversionReport:
    """Return a report in which modules count as converted or not, for a reason."""
    rows = [replace(r, done=done, why=why) if r.module in names else r for r in report.modules]
    return replace(report, modules=tuple(rows))


def _with_left_stacks(report: ConversionReport, left: Mapping[str, str]) -> ConversionReport:
    """Return a report whose rows say why stacks of their modules were left, by the modules' names;
    their other stacks may be converted."""
    for name, why in left.items():
        is_done = any(row.done for row in report.modules if row.module == name)
        report = _with_fate(report, {name}, is_done, f"in part, for {why}" if is_done else why)
    return report


def _build(
    setup: TrainingSetup,
    make: ModelBuilder,
    plan: ConversionPlan,
    inputs: Callable[[], Any],
    saved: LoadedCheckpoint | None,
) -> BuiltModel:
    """Build a model by a plan, and find which of its inputs stay wide; see build_proven_model."""
    if setup.strategy.shards:
        built = build_sharded_model(make, plan, setup.precision, setup.strategy, setup.device)
    else:
        built = make(setup.device, plan=plan)
    # Once shards have their values: on the meta device nothing could be restored.
    if saved is not None:
        restore_precision_state(built.model, setup.precision, saved)
    return _fit_wide(setup, built, inputs)


def _names_text(names: Iterable[str]) -> str:
    return first_names(sorted(names), 6)


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
        # Of several the last one counts.
        matching = [p for p in patterns if matches_pattern(p.partition(":")[0], name)]
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
    left = _names_text(bypassed)
    where = f" That shows only where {left} are left as they were." * bool(left)
    return ConfigError(
        f"precision={precision.name}: {_reasons_text(reasons)}.{where} Type "
        f"precision.ignore_modules=[{ignored}]."
    )


def _reasons_text(bypassed: Mapping[str, str]) -> str:
    return first_names([f"{name}: {why}" for name, why in bypassed.items()], 4, "; ")


def _trial(setup: TrainingSetup, built: BuiltModel, inputs: Callable[[], Any]) -> TrialResult:
    """Return the result of a trial forward of all processes together.

    All processes must call it. They see different samples, so a layer that runs in one of them
    has run, and one that is bypassed in one of them is bypassed.
    """
    own = _process_trial(setup, built, inputs)
    every = setup.strategy.gather_object(own)
    together = own._replace(
        layers_run={name for one in every for name in one.layers_run},
        bypass_reasons=dict(sorted(pair for one in every for pair in one.bypass_reasons.items())),
        forward_completed=all(one.forward_completed for one in every),
        experts=dict(sorted(pair for one in every for pair in one.experts.items())),
        left_stacks={name: why for one in every for name, why in one.left_stacks.items()},
    )
    return setup.strategy.broadcast_object(together)


def _process_trial(
    setup: TrainingSetup, built: BuiltModel, inputs: Callable[[], Any], trains: bool = False
) -> TrialResult:
    """Return the result of this process's trial forward, in training mode if it `trains`."""
    precision = setup.precision
    model = built.model
    converted = converted_layers(model, built.report)
    watch = ForwardWatch(model, adapted_layers(model) | converted)
    # Batch norm and FP8 layers change buffers in a forward, and dropout draws random numbers.
    completed = False
    with saved_forward_state(model, setup.device):
        try:
            first = precision.cast(inputs(), built.plan)
            # In evaluation mode, so that no statistics of the first batch get into the model.
            model.eval()
            if trains:
                set_training(model)
            with (
                torch.no_grad(),
                precision.session(model, setup.device),
                precision.eval_context(model),
                torch.compiler.set_stance("force_eager"),  # compiled code runs past the watch
                precision.forward(setup.device, built.plan),
                watch,
            ):
                call_model(model, first)
            completed = True
        except RunnerError:
            raise
        except Exception:  # try_batch reports it, where the packing is not the cause
            pass
    # What the optimizer is built on, and what is counted, are the shards.
    setup.strategy.drop_gathered_weights()
    matrices = [name for name, layer in converted.items() if holds_matrix(layer)]
    bypassed = _bypass_reasons(watch)
    found = watch.experts(), watch.left_stacks
    return TrialResult(watch.executed, bypassed, completed, matrices, *found)


def _fit_wide(setup: TrainingSetup, built: BuiltModel, inputs: Callable[[], Any]) -> BuiltModel:
    """Leave wider than the precision stores what the forward takes so, by the rule in
    docs/precisions.md; return the model with lines that name it.

    Raises:
        ConfigError: 16 bits would change whole numbers of which the forward makes integers.
    """
    precision, storage = setup.precision, setup.precision.storage
    with restored_random_state():
        batch = inputs()
    fields = fields_of(batch)
    label = [*fields][-1] if setup.task.passes_target else None
    wide: dict[str | int, torch.dtype] = {}
    for key, value in fields.items():
        dtypes = {leaf.dtype for leaf in tree_leaves(value) if is_wider(leaf, storage)}
        if dtypes:
            wide[key] = torch.float64 if torch.float64 in dtypes else torch.float32
    makes_float32 = storage.itemsize == 2 and not precision.has_autocast
    plan = replace(built.plan, wide_inputs=wide, makes_float32=makes_float32)
    tried = built._replace(plan=plan)
    first = precision.cast(batch, plan)
    trial = WideTrial(built.model, storage, makes_float32)
    for key, value in fields_of(first).items():
        trial.add(value, {("input ", key)})
    # In training mode, too, in which alone a forward may make tensors without a dtype.
    modes = (False, True) if makes_float32 else (False,)

    def completes(values: Any) -> bool:
        results = [_process_trial(setup, tried, lambda: values, mode) for mode in modes]
        completed = all(result.forward_completed for result in results)
        return setup.strategy.broadcast_object(completed)

    with trial:
        if trial.found or makes_float32:
            completes(first)
    found = setup.strategy.broadcast_object(trial.found - trial.refused)
    # An autograd.Function, say, hides its operations from the trial: what is found is proven.
    for taken in (found, set[Any]()):
        kept = {key: dtype for key, dtype in wide.items() if ("input ", key) in taken}
        plan = replace(built.plan, wide_inputs=kept, makes_float32=DEFAULT_DTYPE in taken)
        tried = built._replace(plan=plan)
        trial.leave(taken)
        if not taken or completes(batch):
            break
    narrow = dtype_name(storage)
    rounded = {*wide} - {*tried.plan.wide_inputs, label} if storage.itemsize == 2 else set()
    lost = {key: lost_whole_number(fields[key], storage) for key in sorted(rounded, key=str)}
    lines = [*_lost_number_lines(precision, lost, trial.indices)]
    cast = {o for o in trial.found - taken if o[0] == "" or o[1] == label}
    stays = f"stays wider than {narrow}, as the forward takes it: {_origins_text(taken)}"
    becomes = f"cast to {narrow}, for an operation takes nothing wider: {_origins_text(cast)}"
    warning = (
        f"warning: tensors made without a dtype are in {narrow}, for an operation takes no wider "
        f"ones, and distinct values become equal in {_names_text(trial.losing)}. Make them there "
        "with dtype=torch.float32, or type precision.keep_fp32=[<module>]"
    )
    has_losses = bool(trial.losing) and DEFAULT_DTYPE not in taken
    lines += [stays] * bool(taken) + [becomes] * bool(cast) + [warning] * has_losses
    return tried._replace(report=replace(built.report, kept=(*built.report.kept, *lines)))


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
    narrow = dtype_name(precision.storage)
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
    return _names_text({f"{kind}{name}" for kind, name, *_ in origins})


class FirstStepProof:
    """Watches the first training step; converted layers that run only there count from then on.

    Attributes:
        report: the conversion as proven so far.
        probe: takes the dtypes of the first step.
        computation: fields of RunResult on what the first step computed in, once described.
    """

    def __init__(self, run: RunContext, state: TrainState, report: ConversionReport) -> None:
        self.report = report
        self.probe = DtypeProbe(state.model)
        self.computation: dict[str, Any] = {}
        self._run = run
        self._state = state
        self._loads = ExpertLoads(state.plain_model)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Return the context around the first step.

        Raises:
            ConfigError: the model reads a packed weight in training, though not in evaluation.
        """
        model = self._state.plain_model
        # Layers that did not run in the trial are converted all the same, and may run now.
        idle = {row.module for row in self.report.modules if row.why == NOT_RUN_REASON}
        watched = converted_layers(model, _with_fate(self.report, idle, True, NOT_RUN_REASON))
        # A compiled model runs past the watch.
        if self._run.spec.train.compile or not watched:
            yield
            return
        with ForwardWatch(model, watched) as watch:
            yield
        bypassed = _bypass_reasons(watch)
        if bypassed:
            raise ConfigError(
                f"precision={self._run.precision.name}: in the first step, and not in the "
                f"evaluation before it: {_reasons_text(bypassed)}. Type "
                f"precision.ignore_modules=[{','.join(bypassed)}]."
            )
        proven = idle & watch.executed
        if not proven:
            return
        self.report = _with_fate(self.report, proven, True, RAN_IN_TRAINING_REASON)
        run = self._run
        done, layers = self.report.layer_counts
        run.say(f"converted {done} of {layers} layers: {_names_text(proven)} ran in the first step")
        run.tracker.tags(self.report.tags())
        run.save_json("conversion.json", self.report.to_list())

    def describe(self) -> None:
        """Warn of what the first step did not compute as asked, and save what routers chose."""
        choices = self._loads.choices()
        self._loads.close()
        # A step on the weights that training starts from: precisions have them in common.
        if choices and self._state.step == 1:
            self._run.save_json(ROUTERS, choices)
        self.computation = describe_computation(self._run, self.probe, self.report)
