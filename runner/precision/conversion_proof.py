"""Prove by a forward on the first batch that a model computes with what was converted of it.

Layers that the model bypasses stay unconverted, and experts that the forward finds are converted:
for that a model is built a second time.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from runner.core import (
    ConfigError,
    ConversionPlan,
    ConversionReport,
    Fate,
    Precision,
    fmt,
    module_tree,
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
from runner.precision.wide_values import find_wide_values

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

    def watch() -> ForwardWatch:
        return ForwardWatch(model, adapted | converted)

    plan, lines = find_wide_values(precision, trial, watch)
    report = replace(trial.report, kept=(*trial.report.kept, *lines))
    experts = expert_layouts(model)
    if not (experts or converted or adapted):
        return Proof(plan, report)
    result = _try_together(trial, plan, watch())
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
            "forward "
            "call them. Type a precision without conversion, for example precision=bf16-mixed."
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
        # Of several the last one counts.
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
