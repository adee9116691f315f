"""Save what a training produces and upload it: weights, exported model, dtypes, loss-scale chart.

The run's config, environment and commit are written by run_metadata.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from platform import node
from typing import Any, NoReturn

from torch import nn

from runner.checkpoint.export import ExportedModel, export
from runner.checkpoint.program_inputs import ExportError, error_line
from runner.data.batch_layout import TARGET_FIELDS, KeywordInputs
from runner.data.stream_loader import BatchLoader
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.modes.context import RunContext
from runner.modes.result import RunResult
from runner.modes.tables import print_result
from runner.precision.conversion import ConversionReport
from runner.training.callbacks.summary import RunSummary
from runner.training.compile import compiled_modules, fused_rounding
from runner.training.evaluation_hook import EvaluationHook, HookOutput
from runner.training.model_call import call_model, taken_inputs
from runner.training.state import TrainState
from runner.training.tasks.model_loss import ModelLoss
from runner.training.tasks.tensor_task import TensorTask
from runner.utils.errors import CheckpointError
from runner.utils.files import write_table
from runner.utils.formatting import format_number, relative_path
from runner.utils.layout import RESULT

DTYPES_FILE = "dtypes.json"
ROUNDING_COLUMN = "rounding between fused operations"
"""Column of dtypes.json in a run that compiles: eager, fused or not compiled."""
_PROCESSES_FILE = "processes.json"


def save_dtypes(run: RunContext, probe: DtypeProbe, report: ConversionReport) -> None:
    """Save in which dtypes each module stores and computes, a table on MLflow's page."""
    conversions = {}
    for module in report.modules:
        conversions[module.module] = "converted" if module.done else f"skipped: {module.why}"
    rows = probe.table()
    if conversions:
        rows = [{**row, "conversion": conversions.get(row["module"], "")} for row in rows]
    rounding = fused_rounding(run.spec.train)
    if rounding:
        names = {name or "(model)" for name in compiled_modules(run.spec.train, probe.model)}
        for row in rows:
            row[ROUNDING_COLUMN] = rounding if row["module"] in names else "not compiled"
    if run.save_artifact(run.out / DTYPES_FILE, lambda path: write_table(path, rows)):
        run.tracker.tags(tables_tag(DTYPES_FILE))


def set_evaluation_hook(
    run: RunContext, state: TrainState, step: int | None = None
) -> EvaluationHook | None:
    """Have the run's task.after_evaluation called after each evaluation, and return what calls it.

    Args:
        run: the run; None is returned where its task has no hook.
        state: of the run.
        step: that the weights are of; None for the state's own.
    """
    if run.task.additions.hook is None:
        return None
    output = HookOutput(run.out, _uploader(run), run.save_traceback)
    hook = EvaluationHook(state, output, None if step is None else lambda: step)
    state.set_evaluation_hook(hook)
    return hook


def _uploader(run: RunContext) -> Callable[[Path, str], None]:
    """Return what uploads a folder; the files of other processes than the main one stay."""

    def upload(folder: Path, name: str) -> None:
        if run.strategy.place.is_main:
            run.tracker.artifact(folder, name)

    return upload


def save_processes(run: RunContext, summary: Mapping[str, Any]) -> float:
    """Save the time and memory of each process; return the highest peak of memory, in MiB.

    All processes must call it: their rows are gathered.
    """
    peak = run.accelerator.peak_memory_mib()
    place = run.strategy.place
    own_row = {
        "process": str(place.rank),
        "host": node(),
        "device": run.accelerator.name,
        "ms per step": format_number(summary["step_ms"]),
        "peak MiB": format_number(peak),
    }
    gathered = run.strategy.gather_object((peak, own_row))
    if place.world_size > 1 and place.is_main:
        rows = [row for _, row in gathered]
        if run.save_artifact(run.out / _PROCESSES_FILE, lambda path: write_table(path, rows)):
            # MLflow keeps the last value of a tag, so this one names both tables.
            run.tracker.tags(tables_tag(DTYPES_FILE, _PROCESSES_FILE))
    return max((peak for peak, _ in gathered), default=peak)


def tables_tag(*names: str) -> dict[str, str]:
    """Return the tag by which MLflow's page knows which artifacts of a run are tables."""
    return {"mlflow.loggedArtifacts": json.dumps([{"path": n, "type": "table"} for n in names])}


def save_loss_scale(run: RunContext, tally: RunSummary, steps: int) -> None:
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

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    # The last scale holds until the run ends, so its line is drawn up to there.
    steps = [step for step, _ in scales] + [last]
    values = [scale for _, scale in scales] + [scales[-1][1]]
    axes.step(steps, values, where="post", color="#1f77b4", label="loss scale")
    axes.set_yscale("log", base=2)
    for i, step in enumerate(overflows):
        # One entry of the legend stands for all marks.
        axes.axvline(step, color="#d62728", lw=0.8, alpha=0.6, label=None if i else "skipped step")
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    axes.set_ylim(min(values) / 2, max(values) * 2)
    axes.legend(loc="best")
    figure.savefig(path, dpi=120)
    return path


def save_weights(run: RunContext, state: TrainState) -> str:
    """Write the weights alone as safetensors; packed weights stay packed.

    With train.ema the averaged weights are written, too, to `model.ema.safetensors`. All processes
    must call it: sharded weights are gathered from each.

    Returns:
        Why a file was not written; empty where each was.
    """
    problem = _save_weights(run, state, "model.safetensors", {})
    if state.average is None or problem:
        return problem
    with state.evaluated_weights():
        facts = {"ema": f"{state.average.decay:g}"}
        return _save_weights(run, state, "model.ema.safetensors", facts)


def _save_weights(
    run: RunContext, state: TrainState, name: str, more_facts: Mapping[str, str]
) -> str:
    """Write the model's weights to a file; return why it was not written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file, save_model

    path = run.out / name
    facts = {"precision": run.precision.name, **more_facts}
    model = state.plain_model
    strategy = state.strategy
    gathered = strategy.full_state_dict(model) if strategy.shards else {}
    if not strategy.place.is_main:
        return ""
    try:
        if gathered:
            save_file(gathered, path, facts)
        else:
            # save_file refuses tensors that share memory; save_model stores tied weights once.
            save_model(model, str(path), facts)
    except SafetensorError as error:
        return f"{relative_path(path)} was not written: {str(error).rpartition(': ')[2]}."
    run.tracker.artifact(path)
    return ""


def raise_unsaved_weights(run: RunContext, result: RunResult, problems: Sequence[str]) -> NoReturn:
    """End a run whose weights could not be written; its result is printed and written.

    Raises:
        CheckpointError: with the problems.
    """
    error = CheckpointError("\n".join(problems))
    failed = replace(result, status="failed", error=str(error))
    run.save_artifact(run.out / RESULT, lambda _: failed.write(run.out))
    print_result(run.console, failed)
    error.finished = True
    raise error


def save_model(run: RunContext, state: TrainState, loader: BatchLoader) -> None:
    """Export the trained model and upload it; a model that cannot be exported is reported."""
    if not run.tracker.takes_models or run.signals.is_stop_requested():
        return
    # An export may take minutes and has nothing to lose, so a signal ends it at once.
    with run.signals.interruptible():
        try:
            inputs, _ = next(loader.epoch(0))
            # The metrics of the run are those of the weights that are evaluated.
            with state.evaluated_weights():
                made = _export(run, state, inputs)
        except Exception as error:
            run.signals.check()
            reason = error_line(error)
            run.say(f"The model is not in MLflow, its checkpoint has the weights: {reason}.")
            return
    run.tracker.model(made.path.parent, {**made.facts, "step": state.step})


def _export(run: RunContext, state: TrainState, inputs: Any) -> ExportedModel:
    """Write model.pt2 into the run's folder for inputs of any layout of a batch."""
    task = state.task

    def call(model: nn.Module, inputs: Any) -> Any:
        output = call_model(model, inputs)
        return task.select(output) if isinstance(task, TensorTask) else output

    inputs = taken_inputs(state.plain_model, inputs)
    write = partial(export, state.plain_model, run.precision, folder=run.out / "model", call=call)
    if isinstance(task, ModelLoss) and isinstance(inputs, KeywordInputs):
        # Who asks a model for its outputs has no labels; a model that cannot run without them is
        # exported with them.
        with suppress(ExportError):
            return write(_without_labels(task, inputs))
    return write(inputs)


def _without_labels(task: ModelLoss, inputs: KeywordInputs) -> KeywordInputs:
    """Return the fields of a batch without the target, which a model takes for its loss."""
    labels = (task.target_field,) if task.target_field else TARGET_FIELDS
    return KeywordInputs({name: part for name, part in inputs.items() if name not in labels})
