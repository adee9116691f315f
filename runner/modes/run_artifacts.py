"""What a run leaves beside its metrics: data sets, dtypes, the loss scale's picture, the model."""

from collections.abc import Mapping
from dataclasses import replace
from platform import node
from typing import TYPE_CHECKING, Any, NoReturn

from runner.checkpoint.export import export, line
from runner.data import fingerprint
from runner.data.loader import Loader
from runner.data.splits import Splits
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.modes import artifacts
from runner.modes.result import RunResult, print_result
from runner.training.callbacks.summary import RunSummary
from runner.training.state import TrainState
from runner.utils.errors import CheckpointError
from runner.utils.files import write_table
from runner.utils.formatting import format_number, relative_path
from runner.utils.layout import RESULT
from runner.utils.secrets import redact_values

if TYPE_CHECKING:
    from runner.modes.context import RunContext


def log_data_sets(this: "RunContext", splits: Splits) -> None:
    """The data sets that the run reads."""
    if this.tracker.takes_runs:
        name = this.origin.option_name("data", this.spec.data)
        this.tracker.inputs(fingerprint.describe_data(name, redact_values(this.spec.data), splits))


def log_workers(this: "RunContext", loader: Loader) -> None:
    """Say that loading processes which were asked for have nothing to do."""
    if loader.workers and not loader.uses_workers:
        name = this.origin.option_name("data", this.spec.data)
        this.say(
            f"train.num_workers={loader.workers} starts no process: data={name} is in memory, and "
            "its batches are slices of it."
        )


def save_dtypes(this: "RunContext", probe: DtypeProbe) -> None:
    """Module by module what stores and computes in which dtype, a table on MLflow's page."""
    fates = {m.module: "converted" if m.done else f"skipped: {m.why}" for m in this.report.modules}
    rows = probe.table()
    if fates:
        rows = [{**row, "conversion": fates.get(row["module"], "")} for row in rows]
    if this.leave(this.out / "dtypes.json", lambda path: write_table(path, rows)):
        this.tracker.tags(artifacts.tables_tag("dtypes.json"))


def save_processes(this: "RunContext", summary: Mapping[str, Any]) -> float:
    """What each process took, a table on MLflow's page; the greatest peak of memory, in MiB."""
    peak, milliseconds = this.accelerator.peak_memory_mib(), summary["step_ms"]
    place = this.strategy.place
    mine = {
        "process": str(place.rank),
        "host": node(),
        "device": this.accelerator.name,
        "ms per step": format_number(milliseconds),
        "peak MiB": format_number(peak),
    }
    found = this.strategy.gather_object((peak, mine))
    if place.world_size > 1 and place.is_main:
        rows = [row for _, row in found]
        if this.leave(this.out / "processes.json", lambda path: write_table(path, rows)):
            this.tracker.tags(artifacts.tables_tag("dtypes.json", "processes.json"))
    return max((peak for peak, _ in found), default=peak)


def save_loss_scale(this: "RunContext", tally: RunSummary, steps: int) -> None:
    """The picture of the loss scale, where there is one."""
    if tally.scales:
        seen = tally.scales, tally.overflows, steps
        this.leave(this.out / "loss_scale.png", lambda path: artifacts.draw_loss_scale(path, *seen))


def save_weights(this: "RunContext", state: TrainState) -> None:
    """The weights alone, in the format that other tools read; packed ones as they are packed.
    Called by all processes."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file, save_model

    path, facts = this.out / "model.safetensors", {"precision": this.precision.name}
    model, strategy = state.plain_model, state.strategy
    whole = strategy.full_state_dict(model) if strategy.shards else {}
    if not strategy.place.is_main:
        return
    try:
        save_file(whole, path, facts) if whole else save_model(model, str(path), facts)
    except SafetensorError as error:
        this.lost.append(
            f"{relative_path(path)} was not written: {str(error).rpartition(': ')[2]}."
        )
    else:
        this.tracker.artifact(path)


def raise_unsaved_weights(this: "RunContext", result: RunResult) -> NoReturn:
    """End a run whose weights could not be written: what it reached is told and kept."""
    error = CheckpointError("\n".join(this.lost))
    failed = replace(result, status="failed", error=str(error))
    this.leave(this.out / RESULT, lambda _: failed.write(this.out))
    print_result(this.console, failed)
    error.finished = True
    raise error


def save_model(this: "RunContext", state: TrainState, loader: Loader) -> None:
    """The trained model for MLflow. One that cannot be exported costs no run its end."""
    if not this.tracker.takes_models or this.signals.requested():
        return
    with this.signals.at_once():
        try:
            inputs, _ = next(loader.epoch(0))
            made = export(state.plain_model, this.precision, inputs, this.out / "model")
        except Exception as error:
            this.signals.check()
            this.say(f"The model is not in MLflow, its checkpoint has the weights: {line(error)}.")
            return
    this.tracker.model(made.path.parent, {**made.facts, "step": state.step})
