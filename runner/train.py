"""The body of a training run and of an evaluation, between the tracker's open and close."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from runner import artifacts, checkpoint
from runner.accelerator import MIB, Accelerator
from runner.build import build_driven, build_loaders, build_splits
from runner.course import Course
from runner.data.loading import Loader
from runner.describe import describe
from runner.guards import check_data, diverged, mishaps, try_batch
from runner.isolation import StopSignals, make_deterministic, seed_all
from runner.leave import leave_dtypes, leave_loss_scale, leave_model, leave_weights, tell_inputs
from runner.loop import evaluate, fit, total_steps
from runner.model import build_model, restore_model, start
from runner.observers.base import tell
from runner.observers.tally import Tally
from runner.precision.base import ConversionReport, Precision
from runner.precision.memory import tensor_bytes
from runner.precision.probe import DtypeProbe
from runner.result import RunResult
from runner.secrets import hide
from runner.shown import typed
from runner.spec import Origin, RunSpec
from runner.state import TrainState
from runner.tasks.base import Task
from runner.tracking.base import Tracker

LEAST_SECONDS = 0.5  # of an evaluation whose speed is told


@dataclass
class Run:
    """What the parts of a run share."""

    spec: RunSpec
    origin: Origin
    out: Path
    console: Console
    accelerator: Accelerator
    precision: Precision
    task: Task
    tracker: Tracker
    signals: StopSignals
    report: ConversionReport = field(default_factory=ConversionReport)
    resumed: checkpoint.Saved | None = None
    trouble: str = ""  # what a guard stopped it for
    state: TrainState | None = None

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def label(self) -> str:
        return self.origin.label(self.spec)

    def say(self, message: str) -> None:
        self.console.print(message, markup=False)


def train(this: Run) -> RunResult:
    """Data, model, optimizer, then the loop. Raises ConfigError where they do not fit together."""
    spec, started = this.spec, perf_counter()
    _prepare(this)
    splits = build_splits(spec)
    loaders = build_loaders(spec, splits, this.device)
    tell_inputs(this, splits)
    check_data(this, loaders)
    seed_all(spec.seed)
    built = build_model(
        spec, this.precision, this.device, start=this.resumed or start(spec),
        whole=this.resumed is not None,
    )  # fmt: skip
    with this.precision.session(built.model, this.device):
        sizes = describe(this, built)
        steps = total_steps(spec.train, loaders[0])
        state = TrainState(
            built.model, this.precision, this.task, this.precision.scale(this.device),
            build_driven(spec, built.model, this.precision, steps), this.device,
            spec.train.clip_norm,
        )  # fmt: skip
        this.state = state
        try_batch(this, state, loaders[1])
        tally = _loop(this, state, loaders, steps)
        sizes["peak_memory_mib"] = this.accelerator.peak_memory_mib()  # the export has its own
        if not this.trouble:
            leave_model(this, state, loaders[1])
        sizes["optimizer_mib"] = tensor_bytes(*state.state_tensors()) / MIB
    result = _result(this, sizes | tally.summary(), perf_counter() - started)
    if this.trouble:
        diverged(this, result)
    return result


def _prepare(this: Run) -> None:
    this.accelerator.reset_peak_memory()
    seed_all(this.spec.seed)
    if this.spec.deterministic:
        make_deterministic()
    torch.set_anomaly_enabled(this.spec.debug.anomaly)


def _loop(this: Run, state: TrainState, loaders: tuple[Loader, Loader], steps: int) -> Tally:
    """Train, with every observer reading along; leaves a checkpoint however it ends."""
    spec = this.spec
    _shape(spec, state)
    course = Course(this, state, loaders[0])
    if this.resumed is not None:
        course.restore(this.resumed)
        this.say(f"resumed at step {state.step} of {steps}: {this.resumed.path}")
    probe = DtypeProbe(state.model)
    records = fit(
        state, *loaders, spec.train, first=probe,
        flush_every=spec.checkpoint.every_steps, stopped=this.signals.requested,
    )  # fmt: skip
    try:
        with mishaps(this, state, loaders):
            for record in records:
                tell(course.observers, record)
                if course.over:
                    break
    finally:
        course.close()
    if spec.checkpoint.final or this.signals.requested():
        path = course.save_last()
        if this.signals.requested() and path:
            this.say(f"checkpoint: {path}")
            this.say(f"to go on: {typed(this.origin.resuming(this.out))}")
    if spec.checkpoint.safetensors and course.sound():
        leave_weights(this, state)
    this.trouble = course.trouble
    leave_dtypes(this, probe)
    leave_loss_scale(this, course.tally, state.step)
    return course.tally


def _shape(spec: RunSpec, state: TrainState) -> None:
    """Memory format and compilation, as the loop runs the model."""
    model = state.model
    if spec.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if spec.train.compile:
        state.model = torch.compile(model)  # type: ignore[assignment]


def evaluate_checkpoint(this: Run) -> RunResult:
    """The task's metrics of a checkpoint's weights, in this run's precision."""
    spec, started = this.spec, perf_counter()
    _prepare(this)
    path = Path(spec.checkpoint.path or "")
    content = checkpoint.load(path)
    splits = build_splits(spec)
    _, validation = build_loaders(spec, splits, this.device)
    tell_inputs(this, splits)
    check_data(this, (None, validation))
    seed_all(spec.seed)
    saved = checkpoint.Saved(path, content)
    built = restore_model(spec, this.precision, this.device, saved)
    with this.precision.session(built.model, this.device):
        sizes = describe(this, built)
        state = TrainState(built.model, this.precision, this.task,
                           this.precision.scale(this.device), [], this.device)  # fmt: skip
        this.state = state
        with DtypeProbe(built.model) as probe:
            try_batch(this, state, validation)
        leave_dtypes(this, probe)
        began = perf_counter()
        metrics = evaluate(state, validation)
        seconds = perf_counter() - began
    # Shorter evaluations measure the machine's moods.
    rate = validation.examples / seconds if seconds >= LEAST_SECONDS else None
    values = {**metrics, "memory/peak_mib": this.accelerator.peak_memory_mib()}
    if rate is not None:
        values["perf/examples_per_second"] = rate
    this.tracker.metrics(content["step"], artifacts.now_ms(), values)
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
    return _result(this, sizes | summary, perf_counter() - started)


def _as_trained(this: Run, content: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint reached in its own precision, where it was on the same data."""
    known = {"trained_in": content["precision"]}
    metrics, saved = content.get("metrics", {}), content["spec"]
    same = saved["data"] == this.spec.data
    if not same or saved["debug"]["overfit"] != this.spec.debug.overfit:
        return known
    if not metrics:
        this.say("The checkpoint holds no evaluation of its own to compare with.")
    return {**known, "as_trained": metrics}


def _result(this: Run, summary: dict[str, Any], seconds: float) -> RunResult:
    spec, origin = this.spec, this.origin
    return RunResult(
        precision=this.precision.name,
        label=this.label,
        folder=str(this.out),
        group=origin.group(spec),
        seed=spec.seed,
        overrides=origin.overrides,
        model=origin.chosen("model", spec.model),
        data=origin.chosen("data", spec.data),
        device=this.accelerator.name,
        quality=this.task.quality,
        direction=this.task.direction,
        kernels=this.precision.kernels(),
        seconds=seconds,
        tracking_uri=hide(getattr(this.tracker, "uri", "")) or None,
        experiment=getattr(this.tracker, "experiment", ""),
        **summary,
    )
