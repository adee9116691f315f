"""The body of mode=evaluate, between the tracker's open and close."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from runner.checkpoint import checkpoint_file
from runner.data.build import build_loaders, build_splits
from runner.data.loader import Loader
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.modes.context import RunContext, build_result, prepare_process
from runner.modes.failures import check_data, try_batch
from runner.modes.model_summary import describe_model
from runner.modes.result import RunResult
from runner.modes.run_artifacts import (
    log_data_sets,
    save_dtypes,
)
from runner.modes.trial_forward import prove_conversion
from runner.training.compile import check_compile_options, prepare_model
from runner.training.evaluation import evaluate
from runner.training.model import restore_model
from runner.training.setup import TrainingSetup, build_state
from runner.training.state import TrainState
from runner.utils.formatting import now_ms
from runner.utils.reproducibility import seed_all

LEAST_SECONDS = 0.5  # of an evaluation whose speed is told


def evaluate_checkpoint(this: RunContext) -> RunResult:
    """The task's metrics of a checkpoint's weights, in this run's precision."""
    with this.signals.at_once():
        return _evaluated(this)


def _evaluated(this: RunContext) -> RunResult:
    spec, started = this.spec, perf_counter()
    prepare_process(this)
    path = Path(spec.checkpoint.path or "")
    content = checkpoint_file.load(path)
    validation = _validation(this)
    seed_all(spec.seed)
    saved = checkpoint_file.LoadedCheckpoint(path, content)
    make = partial(restore_model, spec, this.precision, this.device, saved)
    built = prove_conversion(this, make, validation)
    check_compile_options(spec, this.precision, this.device, built.model)
    with this.precision.session(built.model, this.device):
        sizes = describe_model(this, built)
        setup = TrainingSetup(spec, this.precision, this.task, this.device, this.strategy)
        this.state = state = build_state(setup, built.model)
        with DtypeProbe(built.model) as probe:
            try_batch(this, state, validation)
        save_dtypes(this, probe)
        prepare_model(spec, this.precision, this.device, built.model)
        if spec.train.compile:
            _warm(state, validation)
        metrics, rate = _measured(this, state, validation)
    values = {**metrics, "memory/peak_mib": this.accelerator.peak_memory_mib()}
    if rate is not None:
        values["perf/examples_per_second"] = rate
    this.tracker.metrics(content["step"], now_ms(), values)
    for name in (key for key, value in metrics.items() if not math.isfinite(value)):
        this.say(f"warning: {name} is {metrics[name]}: the weights, or this precision, diverge.")
    summary = {
        "metrics": metrics,
        "best": metrics[this.task.quality],
        "steps": content["step"],
        "peak_memory_mib": values["memory/peak_mib"],
        "examples_per_second": rate,
        **_as_trained(this, content),
    }
    return build_result(this, sizes | summary, perf_counter() - started)


def _validation(this: RunContext) -> Loader:
    """Its batches; told, and looked at."""
    splits = build_splits(this.spec)
    _, loader = build_loaders(this.spec, splits, this.device, this.strategy.place)
    log_data_sets(this, splits)
    check_data(this, (None, loader))
    return loader


@torch.no_grad()
def _warm(state: TrainState, validation: Loader) -> None:
    """Compiles for a full batch and for the last one, before time is taken."""
    state.model.eval()
    for start in {0, len(validation) - 1}:
        inputs, _ = next(validation.epoch(0, start))
        with state.precision.evaluating(state.model), state.precision.forward(state.device):
            state.model(state.precision.cast(inputs))


def _measured(
    this: RunContext, state: TrainState, validation: Loader
) -> tuple[dict[str, float], float | None]:
    """An evaluation, and its examples in a second; shorter ones measure the machine's moods."""
    began = perf_counter()
    metrics = evaluate(state, validation, this.stopping)
    this.signals.check()
    assert metrics is not None
    seconds = perf_counter() - began
    return metrics, validation.examples / seconds if seconds >= LEAST_SECONDS else None


def _as_trained(this: RunContext, content: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint reached in its own precision, where it was on the same data."""
    known = {"trained_in": content["precision"]}
    metrics, saved = content.get("metrics", {}), content["spec"]
    same = saved["data"] == this.spec.data
    if not same or saved["debug"]["overfit"] != this.spec.debug.overfit:
        return known
    if not metrics:
        this.say("The checkpoint holds no evaluation of its own to compare with.")
    return {**known, "as_trained": metrics}
