"""The table of a run, its row in a table of results, and the addresses of its pages.

The names of the columns are an interface that docs/sweeps.md lists: add names, do not change them.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.table import Table

from runner.core import Console, RunResult, fmt, layout, run_result, secrets, terminal
from runner.tracking.dashboard import run_path
from runner.tracking.uri import local_server, resolve_experiment, resolve_uri

METRIC_PREFIX = "metric."
"""Begins the columns of the job's last metrics, for example metric.val/loss."""


SETTING_PREFIX = "set."
"""Begins the columns of what the job's overrides set, for example set.optimizer.lr."""


FIXED_COLUMNS = {
    each.metadata["column"] or each.name: each
    for each in fields(RunResult)
    if each.metadata.get("meaning")
}
"""The facts that every table has a column for, by the column's name, in their order."""


def setting_values(result: RunResult) -> dict[str, str]:
    """Return the value of each key that a job's overrides set, in the order of the command.

    Where a job is recorded and how it is launched is not a setting.
    """
    values = {}
    for override in result.overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if equals and not key.startswith(("tracking.", "hydra.")):
            values[key] = value
    return values


def table_columns(results: Sequence[RunResult]) -> dict[str, str]:
    """Return name and meaning of each column of table_rows()."""
    columns = {name: each.metadata["meaning"] for name, each in FIXED_COLUMNS.items()}
    columns = {"job": "number of the job in the sweep; null if unknown", **columns}
    for name in dict.fromkeys(name for result in results for name in result.metrics):
        columns[f"{METRIC_PREFIX}{name}"] = f"last value of {name}"
    for key in dict.fromkeys(key for result in results for key in setting_values(result)):
        if key not in ("precision", "seed"):
            columns[f"{SETTING_PREFIX}{key}"] = f"value of {key} that the command sets"
    return columns


def table_rows(results: Sequence[RunResult]) -> list[dict[str, object]]:
    """Return one row per result, in their order; all rows have the same columns.

    The columns are the facts, then `metric.<name>` for each metric and `set.<key>` for each key
    that the command sets, if any job has it. A value is a text, a number (not rounded; it may be
    NaN or infinite) or None for one that the job does not have.
    """
    columns = table_columns(results)
    rows = []
    for result in results:
        number = Path(result.folder).name
        row: dict[str, object] = {"job": int(number) if number.isdecimal() else None}
        for name, each in FIXED_COLUMNS.items():
            value = getattr(result, name, getattr(result, each.name))
            row[name] = " ".join(value) if isinstance(value, list) else value
        row["step_ms"] = result.timed_step_ms
        for name, number in result.metrics.items():
            row[f"{METRIC_PREFIX}{name}"] = number
        for key, text in setting_values(result).items():
            row[f"{SETTING_PREFIX}{key}"] = _number_or_text(text)
        rows.append({name: row.get(name) for name in columns})
    return rows


def _number_or_text(text: str) -> int | float | str:
    """Return the number that a text writes, else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def result_line(result: RunResult) -> str:
    """Return a run's result in one line: its name, the quality, the speed and how it ended."""
    # Most names of a precision with a seed fit, so that the lines of a sweep are aligned.
    parts = [f"{result.label:<26}"]
    if result.quality in result.metrics:
        parts.append(f"{result.quality} {fmt.format_number(result.objective)}")
    if result.examples_per_second:
        parts.append(f"{fmt.format_number(result.examples_per_second)} examples/s")
    outcome = "not tried" if result.status in run_result.UNTRIED else result.outcome
    return "  ".join([*parts, outcome])


def print_result(console: Console, result: RunResult) -> None:
    """Print the table of one run, and the addresses of its pages on lines that are never cut."""
    table = Table(
        title=f"{result.label}  {result.outcome}", title_justify="left", show_header=False
    )
    table.add_column()
    # A folder is typed again: where it does not fit, it takes two lines.
    table.add_column(overflow="fold")
    for name, text in result_rows(result):
        table.add_row(name, text)
    console.print(table)
    for name, text in page_lines(result):
        console.print(f"{name}: {text}", markup=False, soft_wrap=True)


def result_rows(result: RunResult) -> list[tuple[str, str]]:
    """Return name and text of each row of a run's table; rows without a text are left out."""
    rows = []
    for name, value in result.metrics.items():
        rows.append((name, fmt.format_number(value)))
        change = change_since_training(name, result)
        # Below it, its value in the precision that trained the checkpoint.
        if change is not None:
            before = fmt.format_number(result.as_trained[name])
            rows.append(("  as trained", f"{before} in {result.trained_in}; change {change:+.4g}"))
    if result.best is not None and result.best != result.quality_value:
        rows.append((f"best {result.quality}", fmt.format_number(result.best)))
    rows += [
        ("steps", str(result.steps)),
        ("stopped by", result.stopped_by),
        ("examples per second", fmt.format_number(result.examples_per_second)),
        ("peak memory", f"{fmt.format_number(result.peak_memory_mib)} MiB"),
    ]
    if result.converted:
        weights = f"{fmt.format_number(result.weights_mib)} MiB, {memory_saving(result)} saved"
        rows.append(("converted", result.converted_share))
        rows.append(("converted layers", result.converted))
        rows.append(("weights", weights))
    if result.optimizer_mib:
        rows.append(("optimizer state", f"{fmt.format_number(result.optimizer_mib)} MiB"))
    if result.loss_scale is not None:
        rows.append(("skipped steps", str(result.skipped_steps)))
        rows.append(("final loss scale", fmt.format_number(result.loss_scale)))
    rows += [
        ("matrix work", result.matrix_work),
        ("kernels", result.kernels),
        ("device", result.device),
        ("folder", result.folder),
    ]
    return [row for row in rows if row[1]]


def page_lines(result: RunResult, what: str = "run", artifact: str = "") -> list[tuple[str, str]]:
    """Return name and text of each line on where MLflow shows a run; none without tracking.

    Pages have an address only while a server shows them, see local_server.

    Args:
        result: of the run, with its ids in the store.
        what: the word for the run.
        artifact: of the run, which the page opens; empty for its overview.
    """
    # runner.load keeps no store that this command does not name.
    uri = result.tracking_uri or "<its store>"
    server = uri.rstrip("/") if uri.startswith("http") else None
    lines = []
    if result.run_id:
        text = f"{what} {result.run_id}"
        if not server:
            text += f"; to see it: {ui_command(uri, result.experiment)}"
            server = local_server(uri, result.run_id)
        lines.append(("MLflow", text))
    if server and result.run_id:
        page = run_path(result.experiment_id, result.run_id, artifact)
        lines.append(("page", f"{server}{page}"))
    if server and result.dashboard:
        lines.append(("dashboard", f"{server}{result.dashboard}"))
    return lines


def ui_command(uri: str | None, experiment: str) -> str:
    """Return the command that serves the pages of a store without a server."""
    words = ["python", "-m", "runner", "ui"]
    # Only what differs from the defaults is shown: a short command is easier to copy.
    if uri and uri != secrets.redact(resolve_uri(None)):
        words.append(f"tracking.uri={uri}")
    if experiment and experiment != resolve_experiment(None):
        words.append(f"tracking.experiment={experiment}")
    return terminal.quote_command(words)


def memory_saving(result: RunResult) -> str:
    """Return the share of the weights' memory that the precision saves, in percent."""
    if result.weights_mib is None or not result.plain_weights_mib:
        return ""
    if result.weights_mib > result.plain_weights_mib:
        return "none"  # packed formats have scales, which may outweigh small layers
    return f"{1 - result.weights_mib / result.plain_weights_mib:.0%}"


def read_results(folder: Path) -> list[RunResult]:
    """Return the results of a sweep's jobs, in the order of their numbers.

    A job without a readable `result.json` counts as failed.
    """
    # Other folders of a sweep, such as checkpoints, have names.
    jobs = [path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]
    results = []
    # Sorted by name, job 10 would come before job 2.
    for job in sorted(jobs, key=lambda path: int(path.name)):
        try:
            result = RunResult.read(job)
        except (OSError, ValueError):
            is_damaged = (job / layout.RESULT).exists()
            why = f"its {layout.RESULT} is damaged" if is_damaged else "died without a result"
            result = RunResult(
                precision="", label=f"job {job.name}", folder=str(job), status="failed", error=why
            )
        results.append(result)
    return results


def shared_settings(settings: Sequence[str]) -> tuple[str, ...]:
    """Return settings without precision.<key>=..., which the baseline need not share."""
    return tuple(word for word in settings if not word.lstrip("+~").startswith("precision."))


def change_since_training(
    name: str, result: RunResult, others: Sequence[RunResult] = ()
) -> float | None:
    """Return a metric less its value in the precision that trained the checkpoint.

    Args:
        name: of the metric.
        result: of an evaluation.
        others: jobs of the same sweep. Where the checkpoint holds no metrics, those of the job with
            the same settings and device are taken that evaluated it in its own precision.

    Returns:
        The difference; None where one of both values is not known.
    """
    before = (result.as_trained or _metrics_as_trained(result, others)).get(name)
    after = result.metrics.get(name)
    if before is None or after is None:
        return None
    return after - before


def _metrics_as_trained(result: RunResult, others: Sequence[RunResult]) -> dict[str, float]:
    by_settings: dict[tuple[str, ...], dict[str, float]] = {}
    for other in others:
        in_own_precision = other.precision == other.trained_in == result.trained_in
        if in_own_precision and other.device == result.device:
            by_settings.setdefault(tuple(other.settings), other.metrics)
    # The job in the trained precision need not share precision.<key>=..., a key it may not have.
    exact = by_settings.get(tuple(result.settings))
    return exact or by_settings.get(shared_settings(result.settings), {})
