"""Save what a training produces and log it: weights, exported model, dtypes, loss-scale chart."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from platform import node
from typing import Any, NoReturn

from runner.checkpoint.export import export, line
from runner.data import fingerprint
from runner.data.loader import Loader
from runner.data.splits import Splits
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.modes import artifacts
from runner.modes.context import RunContext
from runner.modes.result import RunResult
from runner.modes.tables import print_result
from runner.precision.precision import ConversionReport
from runner.training.callbacks.summary import RunSummary
from runner.training.state import TrainState
from runner.utils.errors import CheckpointError
from runner.utils.files import write_table
from runner.utils.formatting import format_number, relative_path
from runner.utils.layout import RESULT
from runner.utils.secrets import redact_values


def log_data_sets(run: RunContext, splits: Splits) -> None:
    """Record which data sets the run reads."""
    if run.tracker.takes_runs:
        name = run.origin.option_name("data", run.spec.data)
        run.tracker.inputs(fingerprint.describe_data(name, redact_values(run.spec.data), splits))


def log_workers(run: RunContext, loader: Loader) -> None:
    """Say that train.num_workers has no effect where the data is in memory."""
    if loader.workers and not loader.uses_workers:
        name = run.origin.option_name("data", run.spec.data)
        run.say(
            f"train.num_workers={loader.workers} starts no process: data={name} is in memory, and "
            "its batches are slices of it."
        )


def save_dtypes(run: RunContext, probe: DtypeProbe, report: ConversionReport) -> None:
    """Save in which dtypes each module stores and computes, a table on MLflow's page."""
    fates = {m.module: "converted" if m.done else f"skipped: {m.why}" for m in report.modules}
    rows = probe.table()
    if fates:
        rows = [{**row, "conversion": fates.get(row["module"], "")} for row in rows]
    if run.save_artifact(run.out / "dtypes.json", lambda path: write_table(path, rows)):
        run.tracker.tags(artifacts.tables_tag("dtypes.json"))


def save_processes(run: RunContext, summary: Mapping[str, Any]) -> float:
    """Save the time and memory of each process; return the highest peak of memory, in MiB."""
    peak, milliseconds = run.accelerator.peak_memory_mib(), summary["step_ms"]
    place = run.strategy.place
    mine = {
        "process": str(place.rank),
        "host": node(),
        "device": run.accelerator.name,
        "ms per step": format_number(milliseconds),
        "peak MiB": format_number(peak),
    }
    found = run.strategy.gather_object((peak, mine))
    if place.world_size > 1 and place.is_main:
        rows = [row for _, row in found]
        if run.save_artifact(run.out / "processes.json", lambda path: write_table(path, rows)):
            run.tracker.tags(artifacts.tables_tag("dtypes.json", "processes.json"))
    return max((peak for peak, _ in found), default=peak)


def save_loss_scale(run: RunContext, tally: RunSummary, steps: int) -> None:
    """Draw the loss scale over the steps, for a precision that has one."""
    if tally.scales:
        seen = tally.scales, tally.overflows, steps
        run.save_artifact(
            run.out / "loss_scale.png", lambda path: artifacts.draw_loss_scale(path, *seen)
        )


def save_weights(run: RunContext, state: TrainState) -> str:
    """Write the weights alone as safetensors, packed ones as they are packed.

    All processes must call it: sharded weights are gathered from each.

    Returns:
        Why the file was not written; empty where it was.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file, save_model

    path = run.out / "model.safetensors"
    facts = {"precision": run.precision.name}
    model = state.plain_model
    strategy = state.strategy
    whole = strategy.full_state_dict(model) if strategy.shards else {}
    if not strategy.place.is_main:
        return ""
    try:
        if whole:
            save_file(whole, path, facts)
        else:
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


def save_model(run: RunContext, state: TrainState, loader: Loader) -> None:
    """Export the trained model and upload it; a model that cannot be exported is reported."""
    if not run.tracker.takes_models or run.signals.is_stop_requested():
        return
    with run.signals.interruptible():
        try:
            inputs, _ = next(loader.epoch(0))
            made = export(state.plain_model, run.precision, inputs, run.out / "model")
        except Exception as error:
            run.signals.check()
            run.say(f"The model is not in MLflow, its checkpoint has the weights: {line(error)}.")
            return
    run.tracker.model(made.path.parent, {**made.facts, "step": state.step})
