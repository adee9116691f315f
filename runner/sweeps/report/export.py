"""Export a sweep's jobs as rows, and write them beside the report: CSV, JSON and LaTeX.

The names of the columns are an interface that docs/sweeps.md lists: add names, do not change them.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.modes.result import RunResult
from runner.sweeps.report.jobs import SweepData
from runner.sweeps.report.swept import setting_values
from runner.utils.files import write_text
from runner.utils.secrets import redact_values

SCHEMA_VERSION = 1
"""Version of report.json; a new column does not change it."""
FIXED_COLUMNS = {
    "job": "number of the job in the sweep; null if unknown",
    "label": "name of the job in the report",
    "group": "the label without the seed",
    "precision": "name of the precision",
    "seed": "seed; null if unknown",
    "status": "finished, failed, unavailable, stopped or pruned",
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


def job_rows(data: SweepData) -> list[dict[str, object]]:
    """Return one row per job, in the order of the jobs; all rows have the same columns.

    The columns are FIXED_COLUMNS, then `metric.<name>` for each metric and `set.<key>` for each key
    that the command sets, if any job has it. A value is a text, a number (not rounded; it may be
    NaN or infinite) or None for one that the job does not have.
    """
    results = [job.result for job in data.jobs]
    metrics = dict.fromkeys(name for result in results for name in result.metrics)
    settings = dict.fromkeys(key for result in results for key in setting_values(result))
    for key in _OWN_COLUMNS:
        settings.pop(key, None)
    return [_job_row(result, list(metrics), list(settings)) for result in results]


def _job_row(
    result: RunResult, metrics: Sequence[str], settings: Sequence[str]
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


def write_rows(rows: Sequence[Mapping[str, object]], folder: Path) -> list[Path]:
    """Write rows of job_rows() as report.csv and report.json into a folder; return the paths.

    Raises:
        OSError: the folder cannot be written to.
    """
    # Errors and commands may hold secrets where an older version stored them.
    safe_rows = redact_values([dict(row) for row in rows])
    return [
        write_text(folder / "report.csv", _csv_text(safe_rows)),
        write_text(folder / "report.json", _json_text(safe_rows)),
    ]


def _csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as CSV with a line of names; None is an empty field."""
    columns = list(rows[0]) if rows else list(FIXED_COLUMNS)
    text = io.StringIO()
    # "\n": csv's own "\r\n" would become "\r\r\n" where the platform writes line ends of two.
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _json_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows with the meaning of their columns as JSON, in which all numbers are finite."""
    plain = [{name: _json_value(value) for name, value in row.items()} for row in rows]
    content = {"version": SCHEMA_VERSION, "columns": _column_meanings(rows), "rows": plain}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _json_value(value: object) -> object:
    """Return a value as JSON can hold it: a number that is not finite as its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _column_meanings(rows: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return the meaning of each column of the rows."""
    meanings = dict(FIXED_COLUMNS)
    for name in rows[0] if rows else ():
        if name.startswith(METRIC_PREFIX):
            meanings[name] = f"last value of {name.removeprefix(METRIC_PREFIX)}"
        elif name.startswith(SETTING_PREFIX):
            meanings[name] = f"value of {name.removeprefix(SETTING_PREFIX)} that the command sets"
    return meanings
