"""mode=evaluate: compute the metrics of a checkpoint's weights in the run's precision.

The tracker is open already; run.py closes it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch

from runner.config.trusted_targets import checkpoint_config
from runner.core import (
    ConfigError,
    LoadedCheckpoint,
    RunContext,
    TrainState,
    checkpoint_file,
    fmt,
    random_streams,
    run_context,
    targets,
    training_loop,
)
from runner.data.build import RunLoaders
from runner.data.stream_loader import DatasetLoader, StreamLoader
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.modes.execution import build_proven_model, build_result
from runner.modes.saved_run import changes, copy_key, merge, typed_overrides
from runner.modes.startup import check_evaluation, describe_model, prepare_loaders, try_batch
from runner.modes.training_outputs import describe_computation, make_evaluation_hook, save_dtypes
from runner.tracking import locate
from runner.training.compile import check_compile_options, prepare_model
from runner.training.model import restoring_builder
from runner.training.setup import build_state
from runner.training.weight_average import AVERAGE_KEY, with_averaged_weights

if TYPE_CHECKING:
    from runner.training.evaluation_hook import EvaluationHook

_TRAIN_KEYS = ("batch_size", "num_workers", "channels_last", "compile", "compile_rounding")
"""Keys of train that the numbers of an evaluation depend on, by the batches or by rounding."""
_COMPARED_KEYS = ("data", "task", "seed", "debug.overfit", "train.batch_size")
"""Keys, with those under them, whose values decide whether two evaluations can be compared."""
MIN_TIMED_SECONDS = 0.5
"""Shortest evaluation whose speed is reported; a shorter one measures the machine's noise."""


def plan_evaluation(plan: run_context.PlannedRun) -> run_context.PlannedRun:
    """Return a run with its checkpoint, whose settings it has where none was typed: those that the
    numbers of an evaluation depend on.

    Args:
        plan: its spec's checkpoint.path names the checkpoint.

    Raises:
        ConfigError: the settings do not resolve, name code that is not trusted, or an adapter was
            typed.
    """
    spec = plan.spec
    invocation = plan.invocation
    assert spec.checkpoint.path is not None
    path = locate.find_checkpoint(spec.checkpoint.path, spec.tracking.get("uri"))
    saved = LoadedCheckpoint(path, checkpoint_file.load(path))
    if invocation.overrides_key("adapter"):
        raise ConfigError(f"mode={spec.mode} takes the checkpoint's adapter. Leave adapter= out.")
    groups = ("model", "adapter", "data", "task", "precision")
    # A key within a group that was typed changes the checkpoint's group.
    config = checkpoint_config(saved, "checkpoint")
    typed = typed_overrides(invocation, config.values)
    untyped = [key for key in groups if key not in typed]
    choices = {key: saved.content["choices"].get(key, "") for key in untyped}
    trained = config.values.get("train", {})
    composed = (invocation.composed_config or spec.to_dict())["train"]
    # Another precision may not compile what the run's own did.
    kept = _TRAIN_KEYS if "precision" in untyped else _TRAIN_KEYS[:3]
    train = {**composed, **{key: trained[key] for key in kept if key in trained}}
    values = {**{key: {} for key in untyped}, **config.values, "train": train}
    keys = [*untyped, "seed", "deterministic", "train"]
    config = config._replace(values=values)
    spec, invocation = merge(config, spec, invocation, keys, choices)
    spec = replace(spec, checkpoint=replace(spec.checkpoint, path=str(path)))
    return run_context.PlannedRun(plan.folder, saved, spec, invocation)


def evaluate_checkpoint(run: RunContext, saved: LoadedCheckpoint) -> run_context.RunOutcome:
    """Compute the task's metrics of a checkpoint's weights, in the run's precision.

    Args:
        run: its parts.
        saved: the checkpoint.
    """
    spec = run.spec
    start = perf_counter()
    loaders = prepare_loaders(run, saved)
    validation = loaders.val
    average = saved.content.get(AVERAGE_KEY)
    if average is not None:
        decay = average["decay"]
        source = f"train.ema={decay:g}" if decay else "of the optimizer's eval()"
        run.say(f"evaluates the averaged weights ({source})")
        saved = saved._replace(content=with_averaged_weights(saved.content))
    make = restoring_builder(spec, run.precision, saved, loaders)
    built = build_proven_model(run.setup, make, lambda: next(validation.epoch(0))[0], saved)
    check_compile_options(spec, run.precision, run.device, built.model)
    with run.precision.session(built.model, run.device):
        sizes = describe_model(run, built)
        state = build_state(run.setup, built.model, plan=built.plan)
        run.begin_steps(state)
        with DtypeProbe(built.model) as probe:
            try_batch(run, state, validation)
        sizes |= describe_computation(run, probe, built.report)
        save_dtypes(run, probe, built.report)
        hook = make_evaluation_hook(run, state, saved.content["step"])
        check_evaluation(run, state, loaders.validation, hook)
        prepare_model(spec, run.precision, run.device, built.model)
        if spec.train.compile:
            _compile_for_batches(state, validation)
        metrics, rate = _timed_evaluation(run, state, loaders, hook)
    values = {**metrics, "memory/peak_mib": run.accelerator.peak_memory_mib()}
    if rate is not None:
        values["perf/examples_per_second"] = rate
    content = saved.content
    run.tracker.log_metrics([(content["step"], fmt.now_ms(), values)])
    for name, value in metrics.items():
        if not math.isfinite(value):
            run.say(f"warning: {name} is {value}: the weights, or this precision, diverge.")
    summary = {
        "metrics": metrics,
        "best": metrics[run.task.quality],
        "steps": content["step"],
        "peak_memory_mib": values["memory/peak_mib"],
        "examples_per_second": rate,
        **_metrics_as_trained(run, content),
    }
    result = build_result(run, sizes | summary, perf_counter() - start)
    return run_context.RunOutcome(result, built.report)


@torch.no_grad()
def _compile_for_batches(state: TrainState, validation: DatasetLoader) -> None:
    """Compile for the shapes of a full batch and of the last one, before time is measured."""
    # The last batch may hold fewer examples, which is a shape of its own. Where a stream has its
    # last batch is not known.
    last = 0 if isinstance(validation, StreamLoader) else len(validation) - 1
    with random_streams.saved_forward_state(state.plain_model, state.device):
        for start in {0, last}:
            inputs, _ = next(validation.epoch(0, start * validation.batch_size))
            with training_loop.evaluation_mode(state), state.precision.eval_context(state.model):
                state.call(inputs)


def _timed_evaluation(
    run: RunContext, state: TrainState, loaders: RunLoaders, hook: "EvaluationHook | None"
) -> tuple[dict[str, float], float | None]:
    """Return the metrics, and examples per second; None for less than MIN_TIMED_SECONDS.

    The time of the hook does not count.
    """
    start = perf_counter()
    found: dict[str, float] = {}
    examples = 0
    kinds: dict[Literal["val", "test"], Mapping[str, DatasetLoader]]
    kinds = {"val": loaders.validation, "test": loaders.test}
    for kind, sets in kinds.items():
        metrics = training_loop.evaluate_sets(kind, state, sets, run.stop_requested, hook)
        run.signals.check()
        assert metrics is not None
        found |= metrics
        examples += sum(loader.examples for loader in sets.values())
    seconds = perf_counter() - start - (hook.seconds if hook else 0.0)
    return found, examples / seconds if seconds >= MIN_TIMED_SECONDS else None


def _metrics_as_trained(run: RunContext, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the precision of the checkpoint, and its metrics where these can be compared.

    What prevents or disturbs the comparison is printed.
    """
    found = {"trained_in": content["precision"], "as_trained": {}}
    metrics = content.get("metrics")
    if not metrics:
        run.say("The checkpoint holds no evaluation of its own to compare with.")
        return found
    # debug.overfit evaluates on a few training examples, so its metrics are of other data, too.
    reasons: list[str] = []
    spec = content["spec"]
    saved: dict[str, Any] = {"debug": {}, "train": {}}
    for key in _COMPARED_KEYS:
        copy_key(spec, saved, key.split("."))
    for key, (old, new) in changes(saved, run.spec).items():
        is_added = key.startswith(tuple(f"task.{name}" for name in targets.GROUPS["task"].own_keys))
        if not is_added and any(f"{key}.".startswith(f"{each}.") for each in _COMPARED_KEYS):
            reasons.append(f"{key}={old} in its run, {new} here")
    if reasons:
        run.say(
            "warning: the checkpoint's own metrics cannot be compared, for they are of other "
            f"settings: {fmt.first_names(reasons, 3, '; ')}. Give these keys the run's values."
        )
        return found
    before = content.get("device", run.device_name)
    if before != run.device_name:
        run.say(
            f"The checkpoint's own metrics were computed on {before}, these on {run.device_name}: "
            "they may differ by rounding, and by what is drawn at random."
        )
    return found | {"as_trained": metrics}
