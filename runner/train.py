"""The body of a training run and of an evaluation, between the tracker's open and close."""

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from runner import artifacts, checkpoint
from runner.accelerator import MIB, Accelerator
from runner.build import build_driven, build_loaders, build_splits
from runner.data.loading import Loader
from runner.describe import describe
from runner.errors import ConfigError, RunnerError
from runner.isolation import StopSignals, make_deterministic, seed_all
from runner.leave import leave_dtypes, leave_loss_scale, leave_model, tell_inputs
from runner.loop import evaluate, fit, total_steps
from runner.memory_error import is_out_of_memory
from runner.model import build_model, restore_model
from runner.observers.base import Observer, tell
from runner.observers.checkpoints import Checkpoints
from runner.observers.early_stop import EarlyStop
from runner.observers.guard import Guard
from runner.observers.profile import Profile
from runner.observers.progress import progress
from runner.observers.recorder import Recorder
from runner.observers.tally import Tally
from runner.precision.base import ConversionReport, Precision
from runner.precision.memory import tensor_bytes
from runner.precision.probe import DtypeProbe
from runner.result import RunResult
from runner.secrets import hide
from runner.spec import Origin, RunSpec
from runner.state import TrainState
from runner.step import loss_of
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
    seed_all(spec.seed)
    built = build_model(spec, this.precision, this.device, start=_start(this))
    with this.precision.session(built.model, this.device):
        sizes = describe(this, built)
        steps = total_steps(spec.train, loaders[0])
        state = TrainState(
            built.model, this.precision, this.task, this.precision.scale(this.device),
            build_driven(spec, built.model, this.precision, steps), this.device,
            spec.train.clip_norm,
        )  # fmt: skip
        this.state = state
        _try(this, state, loaders[1])
        tally = _loop(this, state, loaders, steps)
        sizes["peak_memory_mib"] = this.accelerator.peak_memory_mib()  # the export has its own
        leave_model(this, state, loaders[1])
        sizes["optimizer_mib"] = tensor_bytes(*state.state_tensors()) / MIB
    return _result(this, sizes | tally.summary(), perf_counter() - started)


def _start(this: Run) -> checkpoint.Saved | None:
    """The checkpoint that init.weights names."""
    where = this.spec.init.weights
    if where is None:
        return None
    path = checkpoint.find(where, this.spec.tracking.get("uri"), key="init.weights")
    return checkpoint.Saved(path, checkpoint.load(path))


def _prepare(this: Run) -> None:
    this.accelerator.reset_peak_memory()
    seed_all(this.spec.seed)
    if this.spec.deterministic:
        make_deterministic()
    torch.set_anomaly_enabled(this.spec.debug.anomaly)


def _try(this: Run, state: TrainState, loader: Loader) -> None:
    """One forward and loss in evaluation mode, which changes nothing, so that a model that does
    not fit its data or task is told from a run that fails."""
    inputs, target = next(loader.epoch(0))
    state.model.eval()
    try:
        with torch.no_grad(), this.precision.evaluating(state.plain_model):
            loss_of(state, inputs, target)
    except RunnerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        (this.out / "error.txt").write_text(traceback.format_exc())
        shape = list(getattr(inputs, "shape", [])) or type(inputs).__name__
        names = {
            key: this.origin.chosen(key, getattr(this.spec, key))
            for key in ("model", "data", "task")
        }
        raise ConfigError(
            f"model={names['model']} fails on the first batch of data={names['data']} (inputs "
            f"{shape}) with task={names['task']}: {type(error).__name__}: {error} "
            f"Choose ones that fit; the traceback is in {this.out / 'error.txt'}."
        ) from error


def _observers(
    this: Run, state: TrainState, steps: int, save: Callable[[], object]
) -> list[Observer]:
    spec, task = this.spec, this.task
    observers: list[Observer] = [
        Recorder(this.tracker, state, this.accelerator),
        progress(this.console, steps, this.label),
        Guard(this.say, this.precision.name),
    ]
    if spec.checkpoint.every_steps:
        observers.append(Checkpoints(save, spec.checkpoint.every_steps))
    if spec.train.early_stop:
        observers.append(EarlyStop(task.quality, task.direction, spec.train.early_stop))
    if spec.debug.profile:
        observers.append(Profile(this.out, spec.debug.profile))
    return observers


def _loop(this: Run, state: TrainState, loaders: tuple[Loader, Loader], steps: int) -> Tally:
    """Train, with every observer reading along; leaves a checkpoint however it ends."""
    spec, model = this.spec, state.model
    if spec.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if spec.train.compile:
        state.model = torch.compile(model)  # type: ignore[assignment]
    folder = this.out / "checkpoints"

    tally = Tally(this.task.quality, this.task.direction)

    def save() -> Path:
        found = tally.metrics if tally.evaluated == state.step else {}
        return checkpoint.save(
            folder, state, spec, spec.checkpoint.keep, this.origin.choices, found
        )

    observers = _observers(this, state, steps, save)
    early = [o for o in observers if isinstance(o, EarlyStop)]
    probe = DtypeProbe(state.model)
    records = fit(
        state, *loaders, spec.train, first=probe,
        flush_every=spec.checkpoint.every_steps, stopped=this.signals.requested,
    )  # fmt: skip
    try:
        for record in records:
            tell([tally, *observers], record)
            if any(o.reached for o in early):
                break
    finally:
        for observer in observers:
            observer.close()
    if spec.checkpoint.final or this.signals.requested():
        path = save()
        if this.signals.requested():
            this.say(f"checkpoint: {path}")
    leave_dtypes(this, probe)
    leave_loss_scale(this, tally, state.step)
    return tally


def evaluate_checkpoint(this: Run) -> RunResult:
    """The task's metrics of a checkpoint's weights, in this run's precision."""
    spec, started = this.spec, perf_counter()
    _prepare(this)
    path = Path(spec.checkpoint.path or "")
    content = checkpoint.load(path)
    splits = build_splits(spec)
    _, validation = build_loaders(spec, splits, this.device)
    tell_inputs(this, splits)
    seed_all(spec.seed)
    saved = checkpoint.Saved(path, content)
    built = restore_model(spec, this.precision, this.device, saved)
    with this.precision.session(built.model, this.device):
        sizes = describe(this, built)
        state = TrainState(built.model, this.precision, this.task,
                           this.precision.scale(this.device), [], this.device)  # fmt: skip
        this.state = state
        with DtypeProbe(built.model) as probe:
            _try(this, state, validation)
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
