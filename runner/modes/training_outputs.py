"""Save what a training produces and upload it: weights, exported model, dtypes, loss-scale chart,
and the folders of other libraries: peft's adapter, transformers' model.

The run's config, environment and commit are written by run_context.py.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from platform import node
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runner.core import (
    ConfigError,
    ConversionReport,
    Fate,
    RunContext,
    RunOutput,
    TrainState,
    batch_layout,
    files,
    fmt,
    layout,
    model_call,
    tensor_facts,
)
from runner.data.stream_loader import DatasetLoader
from runner.diagnostics.dtype_trace import DtypeProbe, computation
from runner.output.plots import chart_style
from runner.precision.conversion_proof import RAN_IN_TRAINING_REASON, watch_first_step
from runner.training.callbacks.runner_callbacks import RunSummary
from runner.training.compile import compiled_modules, fused_rounding
from runner.training.expert_loads import ExpertLoads
from runner.training.formats.export import (
    ExportedModel,
    ExportError,
    check_layers,
    error_line,
    export,
)
from runner.training.pretrained_folder import (
    is_pretrained_model,
    lora_layers,
    write_adapter,
    write_pretrained,
)
from runner.training.tasks.model_loss import ModelLoss
from runner.training.tasks.tensor_task import TensorTask

if TYPE_CHECKING:
    from runner.training.evaluation_hook import EvaluationHook

DTYPES_FILE = "dtypes.json"
ROUNDING_COLUMN = "rounding between fused operations"
"""Column of dtypes.json in a run that compiles: eager, fused or not compiled."""
_PROCESSES_FILE = "processes.json"


def save_dtypes(run: RunContext, probe: DtypeProbe, report: ConversionReport) -> None:
    """Save in which dtypes each module stores and computes, a table on MLflow's page."""
    rows = probe.table()
    conversions = {
        row.module: "converted" if row.is_converted else f"skipped: {row.why}"
        for row in report.modules
    }
    if conversions:
        for row in rows:
            row["conversion"] = conversions.get(row["module"], "")
    rounding = fused_rounding(run.spec)
    if rounding:
        names = {
            name or "(model)" for name in compiled_modules(run.spec.train.compile, probe.model)
        }
        for row in rows:
            row[ROUNDING_COLUMN] = rounding if row["module"] in names else "not compiled"
    if run.save_artifact(run.out / DTYPES_FILE, lambda path: files.write_table(path, rows)):
        run.tracker.tags(tables_tag(DTYPES_FILE))


def describe_computation(
    run: RunContext, probe: DtypeProbe, report: ConversionReport
) -> dict[str, Any]:
    """Warn of what the watched forward did not compute as asked; return its fields of RunResult."""
    found = computation(probe, run.precision, report)
    if len(found.matrix_formats) > 1:
        run.say(f"matrix work: {found.matrix_work}")
    for caveat in found.caveats:
        run.say(f"warning: {caveat}")
    # Every mixed run on a CPU has one: a sweep would print a warning for each job.
    if found.cast_note:
        run.say(f"note: {found.cast_note}")
    caveats = " ".join(filter(None, [*found.caveats, found.cast_note]))
    tags = {"matrix_work": found.matrix_work, "caveats": caveats}
    run.tracker.tags({key: text for key, text in tags.items() if text})
    return found._asdict()


class FirstStep:
    """Watches the first training step, shows what it computed in, and saves what routers chose.

    Attributes:
        report: the conversion as proven so far: converted layers that run only in this step count
            from then on.
        probe: takes the dtypes of the step.
        computation: fields of RunResult on what the step computed in, once described.
        loads: what routers choose; the caller closes it.
    """

    def __init__(self, run: RunContext, state: TrainState, report: ConversionReport) -> None:
        self.report = report
        self.probe = DtypeProbe(state.model)
        self.computation: dict[str, Any] = {}
        self._run = run
        self._state = state
        self.loads = ExpertLoads(state.plain_model)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Return the context around the step; see conversion_proof.watch_first_step."""
        run = self._run
        # A compiled model runs past the watch.
        if run.spec.train.compile:
            yield
            return
        with watch_first_step(run.precision, self._state.plain_model, self.report) as proven:
            yield
        if not proven:
            return
        self.report = self.report.change(proven, Fate.CONVERTED, RAN_IN_TRAINING_REASON)
        done, layers = self.report.layer_counts
        names = fmt.first_names(sorted(proven))
        run.say(f"converted {done} of {layers} layers: {names} ran in the first step")
        run.tracker.tags(self.report.tags())
        run.save_json("conversion.json", self.report.to_list())

    def describe(self) -> None:
        """Warn of what the step did not compute as asked, and save what routers chose."""
        choices = self.loads.choices()
        # A step on the weights that training starts from: precisions have them in common.
        if choices and self._state.step == 1:
            self._run.save_json(layout.ROUTERS, choices)
        self.computation = describe_computation(self._run, self.probe, self.report)


def make_evaluation_hook(
    run: RunContext, state: TrainState, step: int | None = None
) -> "EvaluationHook | None":
    """Return what calls the run's task.after_evaluation; None where its task has no such hook.

    Args:
        run: the run.
        state: of the run.
        step: that the weights are of; None for the state's own.
    """
    if run.task.additions.hook is None:
        return None
    from runner.training.evaluation_hook import EvaluationHook

    return EvaluationHook(state, run.out, run.tracker, run.save_traceback, step)


def save_processes(run: RunContext, summary: Mapping[str, Any]) -> float:
    """Save the time and memory of each process; return the highest peak of memory, in MiB.

    All processes must call it: their rows are gathered.
    """
    peak = run.accelerator.peak_memory_mib()
    rank = run.strategy.rank
    own_row = {
        "process": str(rank.index),
        "host": node(),
        "device": run.accelerator.name,
        "ms per step": fmt.format_number(summary["step_ms"]),
        "peak MiB": fmt.format_number(peak),
    }
    gathered = run.strategy.gather_object((peak, own_row))
    if rank.world_size > 1 and rank.is_main:
        rows = [row for _, row in gathered]
        if run.save_artifact(run.out / _PROCESSES_FILE, lambda path: files.write_table(path, rows)):
            # MLflow keeps the last value of a tag, so this one names both tables.
            run.tracker.tags(tables_tag(DTYPES_FILE, _PROCESSES_FILE))
    return max((peak for peak, _ in gathered), default=peak)


def tables_tag(*names: str) -> dict[str, str]:
    """Return the tag by which MLflow's page knows which artifacts of a run are tables."""
    return {"mlflow.loggedArtifacts": json.dumps([{"path": n, "type": "table"} for n in names])}


def save_loss_scale(run: RunOutput, tally: RunSummary, steps: int) -> None:
    """Draw the loss scale over the steps, for a precision that has one."""
    if not tally.scales:
        return
    run.save_artifact(
        run.out / "loss_scale.png",
        lambda path: draw_loss_scale(path, tally.scales, tally.overflows, steps),
    )


def draw_loss_scale(
    path: Path, scales: Sequence[tuple[int, float]], overflows: Sequence[int], last: int
) -> Path:
    """Draw the loss scale over the steps on a log axis, with the skipped steps marked.

    Args:
        path: a .png.
        scales: (step, scale from this step on), one for each change.
        overflows: steps that were skipped because a gradient was not finite.
        last: the run's last step.

    Returns:
        The path.
    """
    from matplotlib.figure import Figure

    with chart_style():
        figure = Figure(figsize=(8, 3))
        # Fixed margins: to compute them would draw the picture twice.
        axes = figure.add_axes((0.08, 0.16, 0.914, 0.80))
        # The last scale holds until the run ends, so its line is drawn up to there.
        steps = [step for step, _ in scales] + [last]
        values = [scale for _, scale in scales] + [scales[-1][1]]
        axes.step(steps, values, where="post", color="#1f77b4", label="loss scale")
        axes.set_yscale("log", base=2)
        # Plain text: matplotlib's own labels start its parser of mathematics.
        axes.yaxis.set_major_formatter(lambda scale, _: f"2^{math.log2(scale):.0f}")
        for i, step in enumerate(overflows):
            # One entry of the legend stands for all marks.
            label = None if i else "skipped step"
            axes.axvline(step, color="#d62728", lw=0.8, alpha=0.6, label=label)
        axes.set_xlabel("step")
        axes.set_ylabel("loss scale")
        axes.set_ylim(min(values) / 2, max(values) * 2)
        axes.legend(loc="best")
        figure.savefig(path, dpi=120)
    return path


def wants_weights(run: RunContext, state: TrainState) -> bool:
    """Return whether a run's keys ask for its weights in files of other libraries."""
    checkpoint = run.spec.checkpoint
    return checkpoint.safetensors or checkpoint.pretrained or _wants_adapter(run, state)


def save_weights(run: RunContext, state: TrainState) -> list[str]:
    """Write the weights in the files and folders that a run's keys ask for.

    The safetensors file keeps packed weights packed; with train.ema the averaged weights are
    written, too, to `model.ema.safetensors`. Folders have the weights that are evaluated.
    All processes must call it: sharded weights are gathered from each.

    Returns:
        Why a file or folder was not written, a sentence each.
    """
    problem = ""
    if run.spec.checkpoint.safetensors:
        decay = 0.0 if state.evaluated is None else state.evaluated.decay
        # With train.ema those that train and the average; else those that are evaluated.
        with nullcontext() if decay else state.evaluated_weights():
            problem = _save_weights(run, state, "model.safetensors", {})
        if decay and not problem:
            with state.evaluated_weights():
                facts = {"ema": f"{decay:g}"}
                problem = _save_weights(run, state, "model.ema.safetensors", facts)
    problems = [problem]
    if run.spec.checkpoint.pretrained or _wants_adapter(run, state):
        problems.append(_save_folders(run, state))
    return [*filter(None, problems)]


def _save_weights(
    run: RunContext, state: TrainState, name: str, more_facts: Mapping[str, str]
) -> str:
    """Write the model's weights to a file; return why it was not written."""
    from safetensors.torch import save_file, save_model

    facts = {"precision": run.precision.name, **more_facts}
    model = state.plain_model
    strategy = state.strategy
    gathered = strategy.full_state_dict(model) if strategy.shards else {}
    if not strategy.rank.is_main:
        return ""

    def write(path: Path) -> None:
        files.prepare_output(path)
        if gathered:
            save_file(gathered, path, facts)
        else:
            # save_file refuses tensors that share memory; save_model stores tied weights once.
            save_model(model, str(path), facts)

    return _write(run, run.out / name, write)


def save_model(run: RunContext, state: TrainState, loader: DatasetLoader) -> None:
    """Export the trained model and upload it; a model that cannot be exported is reported."""
    if not run.tracker.takes_models or run.signals.is_stop_requested():
        return
    layers = sum(not module._modules for module in state.plain_model.modules())
    # An export may take minutes and has nothing to lose, so a signal ends it at once.
    with run.signals.interruptible():
        try:
            check_layers(state.plain_model, run.precision)
            # Tracing, writing, reading and comparing take about a tenth of a second for each.
            if layers > 50:
                what = f"exporting {layers} layers for MLflow, about {layers / 10:.0f} s"
                run.say(f"{what}; tracking.log_model=false leaves it out")
            inputs, _ = next(loader.epoch(0))
            # The metrics of the run are those of the weights that are evaluated.
            with state.evaluated_weights():
                made = _export(run, state, inputs)
        except Exception as error:
            run.signals.check()
            reason = error_line(error).rstrip(".")
            run.say(f"The model is not in MLflow, its checkpoint has the weights: {reason}.")
            return
    run.tracker.model(made.path.parent, {**made.facts, "step": state.step})


def _export(run: RunContext, state: TrainState, inputs: Any) -> ExportedModel:
    """Write model.pt2 into the run's folder for inputs of any layout of a batch."""
    task = state.task

    def call(model: nn.Module, inputs: Any) -> Any:
        output = model_call.call_model(model, inputs)
        return task.select(output) if isinstance(task, TensorTask) else output

    inputs = model_call.taken_inputs(state.plain_model, inputs)
    folder = run.out / "model"
    write = partial(
        export, state.plain_model, run.precision, folder=folder, call=call, plan=state.plan
    )
    is_model_loss = isinstance(task, ModelLoss) and not task.evaluates_losses
    if is_model_loss and isinstance(inputs, batch_layout.KeywordInputs):
        # Who asks a model for its outputs has no labels; a model that cannot run without them is
        # exported with them.
        labels = (task.target_field,) if task.target_field else batch_layout.TARGET_FIELDS
        kept = {name: part for name, part in inputs.items() if name not in labels}
        with suppress(ExportError):
            return write(batch_layout.KeywordInputs(kept))
    return write(inputs)


def check_model_folders(run: RunContext, model: nn.Module) -> None:
    """Raise ConfigError where checkpoint.pretrained is set for a model of another library, or
    checkpoint.safetensors for a dtype that its files cannot hold."""
    if run.spec.checkpoint.safetensors:
        from safetensors.torch import save

        for name, value in model.state_dict().items():
            try:
                save({name: torch.empty(0, dtype=value.dtype)})
            except (KeyError, AttributeError, TypeError) as error:
                is_tensor = isinstance(value, torch.Tensor)
                kind = tensor_facts.dtype_name(value.dtype) if is_tensor else type(value).__name__
                raise ConfigError(
                    f"checkpoint.safetensors=true: safetensors holds no {kind}, and {name} is one. "
                    "Leave it out (checkpoints hold it)."
                ) from error
    if run.spec.checkpoint.pretrained and not is_pretrained_model(model):
        raise ConfigError(
            f"checkpoint.pretrained=true: {type(model).__name__} is no model of transformers. Type "
            "checkpoint.safetensors=true for its weights."
        )


def _save_folders(run: RunContext, state: TrainState) -> str:
    """Write the folders that the run's keys ask for; return why one was not written."""
    spec = run.spec
    model = state.plain_model
    with state.evaluated_weights():
        # Inside: the averaged weights are in the model as long as the context lasts.
        if state.strategy.shards:
            weights = state.strategy.full_state_dict(model)
        else:
            # With the scales of packed weights, which are neither parameters nor buffers.
            weights = dict(model.state_dict())
        if not run.strategy.rank.is_main:
            return ""
        if _wants_adapter(run, state):
            init = str(spec.adapter.get("init", "default"))
            warning = _write(
                run,
                run.out / layout.ADAPTER_FOLDER,
                lambda folder: write_adapter(model, weights, folder, spec.model, init),
                layout.ADAPTER_FOLDER,
            )
            # Nobody has to have asked for it, so a run does not fail for the lack of it.
            if warning:
                run.say(f"warning: {warning}")
        if not spec.checkpoint.pretrained:
            return ""
        named = (spec.data.get("tokenizer"), spec.model.get("path"))
        beside = [Path(text) for text in named if isinstance(text, str) and Path(text).is_dir()]

        def write(folder: Path) -> None:
            said = write_pretrained(model, weights, folder, spec.model, beside)
            run.say(f"from_pretrained loads {fmt.relative_path(folder)} ({said})")

        name = layout.PRETRAINED_FOLDER
        return _write(run, run.out / name, write, name)


def _write(run: RunContext, path: Path, write: Callable[[Path], object], folder: str = "") -> str:
    """Write a file or folder of weights and upload it; return why it was not written."""
    from safetensors import SafetensorError

    try:
        write(path)
    except (OSError, ValueError, SafetensorError) as error:
        # An unfinished folder would be taken for a whole one.
        rmtree(path, ignore_errors=True)
        reason = files.os_error_reason(error)
        if isinstance(error, SafetensorError):  # it begins with the name of safetensors' own error
            reason = reason.rpartition(": ")[2]
        return f"{fmt.relative_path(path)} was not written: {reason}."
    run.tracker.artifact(path, folder)
    return ""


def _wants_adapter(run: RunContext, state: TrainState) -> bool:
    """Return whether the run saves adapters, and its model has one of peft."""
    if not run.spec.checkpoint.adapter or not run.spec.adapter.get("_target_"):
        return False
    return bool(lora_layers(state.plain_model))
