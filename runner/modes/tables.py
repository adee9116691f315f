"""Print the result table of one run; compute its metric changes and its place in MLflow.

The table of a sweep's jobs is in runner/sweeps/report/columns.py.
"""

import html
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from runner.modes.result import RunResult
from runner.tracking.uri import resolve_experiment, resolve_uri
from runner.utils.formatting import format_number
from runner.utils.secrets import redact
from runner.utils.terminal import quote_command, sanitize

UI_ADDRESS = "http://127.0.0.1:5000"
"""Where `runner ui` serves the pages of a store without a server."""


def print_result(console: Console, result: RunResult) -> None:
    """Print the table of one run."""
    table = Table(
        title=f"{result.label}  {result.outcome}", title_justify="left", show_header=False
    )
    for name, text in result_rows(result):
        table.add_row(name, text)
    console.print(table)


def result_rows(result: RunResult) -> list[tuple[str, str]]:
    """Return name and text of each row of a run's table; rows without a text are left out."""
    rows = []
    for name, value in result.metrics.items():
        rows.append((name, format_number(value)))
        change = change_since_training(name, result)
        # Below it, its value in the precision that trained the checkpoint.
        if change is not None:
            before = format_number(result.as_trained[name])
            rows.append(("  as trained", f"{before} in {result.trained_in}; change {change:+.4g}"))
    if result.best is not None and result.best != result.metrics.get(result.quality):
        rows.append((f"best {result.quality}", format_number(result.best)))
    rows += [
        ("steps", str(result.steps)),
        ("examples per second", format_number(result.examples_per_second)),
        ("peak memory", f"{format_number(result.peak_memory_mib)} MiB"),
    ]
    if result.converted:
        weights = f"{format_number(result.weights_mib)} MiB, {memory_saving(result)} saved"
        rows.append(("converted layers", result.converted))
        rows.append(("converted matrix weights", result.converted_weights))
        rows.append(("weights", weights))
    if result.optimizer_mib:
        rows.append(("optimizer state", f"{format_number(result.optimizer_mib)} MiB"))
    if result.loss_scale is not None:
        rows.append(("skipped steps", str(result.skipped_steps)))
        rows.append(("final loss scale", format_number(result.loss_scale)))
    rows += [
        ("kernels", result.kernels),
        ("device", result.device),
        ("folder", result.folder),
        ("MLflow", mlflow_location(result)),
    ]
    if result.dashboard:
        rows.append(("dashboard", page_url(result.tracking_uri, result.dashboard)))
    return [row for row in rows if row[1]]


def result_html(result: RunResult) -> str:
    """Return the table of one run as HTML, for a notebook."""
    title = sanitize(f"{result.label}: {result.outcome}")
    rows = []
    for name, text in result_rows(result):
        cells = (html.escape(sanitize(part)) for part in (name, text))
        rows.append("<tr><th>{}</th><td>{}</td></tr>".format(*cells))
    return f"<table><caption>{html.escape(title)}</caption>{''.join(rows)}</table>"


def mlflow_location(result: RunResult) -> str:
    """Return the URL of the run's page or the command that shows it; empty without tracking."""
    if result.run_id is None:
        return ""
    run = f"/#/experiments/{result.experiment_id}/runs/{result.run_id}"
    if (result.tracking_uri or "").startswith("http"):
        return page_url(result.tracking_uri, run)
    command = ui_command(result.tracking_uri, result.experiment)
    return f"run {result.run_id}; to see it: {command}"


def page_url(uri: str | None, path: str) -> str:
    """Return the URL of a page of the store.

    A store without a server has its pages at the address where `runner ui` serves them.
    """
    server = uri if uri and uri.startswith("http") else UI_ADDRESS
    return f"{server}{path}"


def ui_command(uri: str | None, experiment: str) -> str:
    """Return the command that serves the pages of a store without a server."""
    words = ["python", "-m", "runner", "ui"]
    # Only what differs from the defaults is shown: a short command is easier to copy.
    if uri and uri != redact(resolve_uri(None, os.environ, Path.cwd())):
        words.append(f"tracking.uri={uri}")
    if experiment and experiment != resolve_experiment(None, os.environ):
        words.append(f"tracking.experiment={experiment}")
    return quote_command(words)


def memory_saving(result: RunResult) -> str:
    """Return the share of the weights' memory that the precision saves, in percent."""
    if result.weights_mib is None or not result.plain_weights_mib:
        return ""
    if result.weights_mib > result.plain_weights_mib:
        return "none"  # packed formats have scales, which may outweigh small layers
    return f"{1 - result.weights_mib / result.plain_weights_mib:.0%}"


def shared_settings(settings: str) -> str:
    """Return settings without precision.<key>=..., which the baseline need not share."""
    words = settings.split()
    return " ".join(word for word in words if not word.lstrip("+~").startswith("precision."))


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
    by_settings: dict[str, dict[str, float]] = {}
    for other in others:
        in_own_precision = other.precision == other.trained_in == result.trained_in
        if in_own_precision and other.device == result.device:
            by_settings.setdefault(other.settings, other.metrics)
    # The job in the trained precision need not share precision.<key>=..., a key it may not have.
    exact = by_settings.get(result.settings)
    return exact or by_settings.get(shared_settings(result.settings), {})
