"""Turn results of runs into the rows of a table: one row per run, with named columns.

The names of the columns are an interface that docs/sweeps.md lists: add names, do not change them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.modes.result import RunResult

FIXED_COLUMNS = {
    "job": "number of the job in the sweep; null if unknown",
    "label": "name of the job in the report",
    "group": "the label without the seed",
    "precision": "name of the precision",
    "seed": "seed; null if unknown",
    "status": "finished, failed, unavailable or stopped",
    "outcome": "the status, or diverged",
    "error": "why the job did not finish",
    "model": "name of the model",
    "data": "name of the data",
    "device": "name of the device",
    "quality": "name of the metric that jobs are compared by",
    "direction": "max if a greater quality is better, min if a smaller one is",
    "quality_value": "last value of the quality",
    "quality_best": "best value of the quality",
    "train_loss": "last training loss",
    "steps": "optimizer steps that ran",
    "planned_steps": "optimizer steps of the whole training",
    "examples_per_second": "training speed, examples per second",
    "step_ms": "time of an optimizer step, milliseconds",
    "seconds": "time of the whole job, seconds",
    "peak_memory_mib": "peak memory of the device, or of the process on a CPU, MiB",
    "weights_mib": "parameters and buffers after conversion, MiB",
    "plain_weights_mib": "parameters and buffers in float32, MiB",
    "optimizer_mib": "state of the optimizers, MiB",
    "converted": "converted layers of all, such as 53/54",
    "fused_rounding": "rounding between fused operations: fused or eager; empty if not compiled",
    "trains": "share of the parameters' elements that train, 0 to 1",
    "skipped_steps": "optimizer steps that the loss scale skipped",
    "loss_scale": "loss scale in the last step",
    "stagnant_share": "share of the weights that did not move, 0 to 1",
    "kernels": "kernels of float16 on a CPU, or emulated",
    "diverged_step": "step for which a guard stopped the job",
    "trained_in": "precision that trained the checkpoint, of mode=evaluate",
    "left_out": "keys that the sweep sets and the precision does not take, separated by spaces",
    "folder": "folder of the job",
    "run_id": "id of the job's run in MLflow",
}
"""Name and meaning of the columns that every table has, in their order."""
METRIC_PREFIX = "metric."
"""Begins the columns of the job's last metrics, for example metric.val/loss."""
SETTING_PREFIX = "set."
"""Begins the columns of what the job's overrides set, for example set.optimizer.lr."""
_OWN_COLUMNS = ("precision", "seed")
"""Settings that have a fixed column."""


def setting_values(result: "RunResult") -> dict[str, str]:
    """Return the value of each key that a job's overrides set, in the order of the command.

    Where a job is recorded and how it is launched is not a setting.
    """
    values = {}
    for override in result.overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if equals and not key.startswith(("tracking.", "hydra.")):
            values[key] = value
    return values


def table_rows(results: Sequence["RunResult"]) -> list[dict[str, object]]:
    """Return one row per result, in their order; all rows have the same columns.

    The columns are FIXED_COLUMNS, then `metric.<name>` for each metric and `set.<key>` for each key
    that the command sets, if any job has it. A value is a text, a number (not rounded; it may be
    NaN or infinite) or None for one that the job does not have.
    """
    metrics = dict.fromkeys(name for result in results for name in result.metrics)
    settings = dict.fromkeys(key for result in results for key in setting_values(result))
    for key in _OWN_COLUMNS:
        settings.pop(key, None)
    return [_job_row(result, list(metrics), list(settings)) for result in results]


def _job_row(
    result: "RunResult", metrics: Sequence[str], settings: Sequence[str]
) -> dict[str, object]:
    """Return a job's row with the columns of the given metrics and settings."""
    number = Path(result.folder).name
    derived: dict[str, object] = {
        "job": int(number) if number.isdecimal() else None,
        "quality_value": result.metrics.get(result.quality),
        "quality_best": result.best,
        "left_out": " ".join(result.left_out),
    }
    row: dict[str, object] = {}
    for name in FIXED_COLUMNS:
        row[name] = derived[name] if name in derived else getattr(result, name)
    for name in metrics:
        row[f"{METRIC_PREFIX}{name}"] = result.metrics.get(name)
    values = setting_values(result)
    for key in settings:
        row[f"{SETTING_PREFIX}{key}"] = _number_or_text(values.get(key))
    return row


def _number_or_text(text: str | None) -> int | float | str | None:
    """Return the number that a text writes, else the text itself."""
    if text is None:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
