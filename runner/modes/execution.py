"""Build what a run computes with: its model, proven by a trial forward, and its training state.

Training, evaluation, mode=diff, mode=explain and mode=replay build both here, in one order: a
replay that assembled them otherwise than training would not be bit-exact. The trial forward proves
a conversion before it is announced and before anything trains.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.core import (
    ConversionPlan,
    LoadedCheckpoint,
    RunContext,
    RunnerError,
    RunResult,
    RunSpec,
    TrainState,
    checkpoint_file,
    model_call,
    module_tree,
    random_streams,
    run_context,
    secrets,
)
from runner.data.build import RunLoaders
from runner.data.loader import restored_random_state
from runner.precision.casting import CastCacheWatch
from runner.precision.conversion_proof import prove_model
from runner.precision.forward_watch import ModelTrial
from runner.training.model import BuiltModel, ModelBuilder, restore_precision_state
from runner.training.setup import build_state


def build_execution(
    setup: run_context.TrainingSetup,
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
    # Training watches casts in its trial of a batch, see startup.watched_casts.
    if precision.compute is not precision.storage:
        watch = CastCacheWatch(built.model)
        _completes_forward(setup, built.model, inputs, plan, watch)
        plan = replace(plan, caches_casts=not watch.rewritten)
    with precision.session(built.model, setup.device):
        return built, build_state(setup, built.model, total_steps, plan)


def starting_model(
    setup: run_context.TrainingSetup,
    resumed: LoadedCheckpoint | None = None,
    loaders: RunLoaders | None = None,
) -> ModelBuilder:
    """Return the builder of the model that training starts from.

    Args:
        setup: its spec's model, adapter and init sections are read.
        resumed: a checkpoint whose weights, packing and adapter are restored exactly as they were;
            None starts from init.weights, or from seeded weights.
        loaders: of the run's data sets, if they are loaded.

    Raises:
        ConfigError: init.weights names no checkpoint.
    """
    # The model may be built twice, see build_proven_model; the checkpoint is read once, here.
    start = resumed or read_initial_weights(setup.spec)
    exact = resumed is not None
    return ModelBuilder(setup.spec, setup.precision, start, exact, loaders)


def build_proven_model(
    setup: run_context.TrainingSetup,
    make: ModelBuilder,
    inputs: Callable[[], Any],
    saved: LoadedCheckpoint | None = None,
) -> BuiltModel:
    """Build a model, sharded where the strategy shards, whose conversion forwards prove.

    Args:
        setup: its precision converts the model; the processes of its strategy agree on the plan.
        make: builds the model from a freshly seeded generator.
        inputs: loads the model inputs of the first batch.
        saved: a checkpoint whose precision state the model has in the forward; None for none.

    Raises:
        ConfigError: the model cannot compute in the precision as it was converted.
    """
    precision = setup.precision
    plan = ConversionPlan(finds_experts=True)
    is_rebuilt = False
    while True:
        if setup.strategy.shards:
            built = make.build_sharded(plan, setup.strategy, setup.device)
        else:
            built = make.build(setup.device, plan)
        # Once shards have their values: on the meta device nothing could be restored.
        if saved is not None:
            restore_precision_state(built.model, precision, saved)
        trial = ModelTrial(
            built.model,
            built.report,
            built.plan,
            restored_random_state()(inputs),
            partial(_completes_forward, setup, built.model),
            setup.strategy,
            has_label=setup.task.passes_target,
            has_adapter=bool(setup.spec.adapter.get("_target_")),
        )
        proof = prove_model(precision, trial, is_rebuilt)
        if is_rebuilt or not proof.needs_rebuild:
            return built._replace(plan=proof.plan, report=proof.report)
        del built, trial  # else both models would be in memory
        plan, is_rebuilt = proof.plan, True
        random_streams.seed_all(setup.spec.seed)


def _completes_forward(
    setup: run_context.TrainingSetup,
    model: nn.Module,
    inputs: Callable[[], Any],
    plan: ConversionPlan,
    watch: AbstractContextManager[Any],
    trains: bool = False,
) -> bool:
    """Compute a forward of this process that leaves no trace; return whether it ended without an
    error. See TrialForward."""
    precision = setup.precision
    completed = False
    # Batch norm and FP8 layers change buffers in a forward, and dropout draws random numbers.
    with random_streams.saved_forward_state(model, setup.device):
        try:
            first = precision.cast(inputs(), plan)
            # In evaluation mode, so that no statistics of the first batch get into the model.
            model.eval()
            if trains:
                module_tree.set_training(model)
            with (
                torch.no_grad(),
                precision.session(model, setup.device),
                precision.eval_context(model),
                torch.compiler.set_stance("force_eager"),  # compiled code runs past the watch
                precision.forward(setup.device, plan),
                watch,
            ):
                model_call.call_model(model, first)
            completed = True
        except RunnerError:
            raise
        except Exception:  # try_batch reports it, where the packing is not the cause
            pass
    # What the optimizer is built on, and what is counted, are the shards.
    setup.strategy.drop_gathered_weights()
    return completed


def read_initial_weights(spec: RunSpec) -> LoadedCheckpoint | None:
    """Return the weights that init.weights names, as a checkpoint; None where it names none.

    Raises:
        ConfigError: it names none, or init.rename does not fit their names.
    """
    where = spec.init.weights
    if where is None:
        return None
    from runner.tracking import locate
    from runner.training.formats import weight_files
    from runner.training.initial_weights import rename

    read = weight_files.read_weights(where)
    if read is None:
        path = locate.find_checkpoint(where, spec.tracking.get("uri"), key="init.weights")
        content = checkpoint_file.load(path)
        source = "a checkpoint of this runner"
    else:
        path = Path(where)
        layout = weight_files.packed_layout(read.weights)
        content = {"spec": {}, "precision": "", "layout": layout, "model": read.weights}
        source = read.source
    weights = rename(content["model"], spec.init.rename, path)
    return LoadedCheckpoint(path, {**content, "model": weights}, source)


def prepare_process(run: RunContext) -> None:
    """Seed the generators and set the process's switches, before anything is built."""
    run.accelerator.reset_peak_memory()
    seed_process(run.spec)
    torch.set_anomaly_enabled(run.spec.debug.anomaly)


def seed_process(spec: RunSpec) -> None:
    """Seed the generators, and have torch compute deterministically where the spec asks for it."""
    random_streams.seed_all(spec.seed)
    if spec.deterministic:
        make_deterministic()


def make_deterministic() -> None:
    """Have torch raise an error for operations whose result can differ between runs."""
    # cuBLAS is deterministic with a workspace of a fixed size only (CUDA's cuBLAS documentation,
    # "Results reproducibility"); the user's own setting stays.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def build_result(run: RunContext, summary: dict[str, Any], seconds: float) -> RunResult:
    """Return the result of a run that finished.

    Args:
        run: the run.
        summary: fields of RunResult that training or the evaluation found.
        seconds: wall-clock time of the mode.
    """
    spec = run.spec
    invocation = run.invocation
    emulated = run.precision.emulated
    if emulated:  # its speed is that of the emulation, not of the precision
        summary |= {"kernels": "emulated", "examples_per_second": None, "step_ms": None}
    if invocation.caveat:
        summary = summary | {"caveats": [invocation.caveat, *summary.get("caveats", ())]}
    return RunResult(
        precision=run.precision.name,
        label=run.label,
        folder=str(run.out),
        group=invocation.group_label(spec),
        settings=invocation.settings(spec),
        seed=spec.seed,
        overrides=invocation.overrides,
        left_out=[*invocation.omitted_keys],
        model=invocation.option_name("model", spec.model),
        data=invocation.option_name("data", spec.data),
        device=run.device_name,
        device_type=run.device.type,
        quality=run.task.quality,
        direction=run.task.direction,
        seconds=seconds,
        note=getattr(run.tracker, "own_note", ""),
        tracking_uri=secrets.redact(getattr(run.tracker, "uri", "")) or None,
        experiment=getattr(run.tracker, "experiment", ""),
        **summary,
    )
