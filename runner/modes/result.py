"""What a run came to, as numbers and as a table."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from runner.config.targets import dataclass_fields_from_json
from runner.tracking.metric_names import VAL_LOSS
from runner.tracking.uri import resolve_experiment, resolve_uri
from runner.utils.files import write_text
from runner.utils.formatting import format_number, format_percent
from runner.utils.layout import RESULT
from runner.utils.secrets import redact, redact_values
from runner.utils.terminal import quote_command

Status = Literal["finished", "failed", "unavailable", "stopped"]
"""What became of a run."""


@dataclass(frozen=True)
class RunResult:
    """One run's outcome; written to `result.json` in its folder.

    Attributes:
        status: finished, failed (diverged: by a guard), unavailable (on this machine), stopped.
        group: the label without the seed; jobs of one group differ in it alone.
        quality: name of the metric that decides; its last value is metrics[quality].
        direction: "max" or "min", whether a greater or a smaller quality is better.
        examples_per_second: of training, without the first block of steps and evaluations.
        peak_memory_mib: see Accelerator.peak_memory_mib.
        weights_mib: parameters and buffers after conversion; plain_weights_mib: in float32;
            optimizer_mib: what the optimizers hold.
        converted: layers that hold matrix weights, for example 53/54; converted_weights: elements
            of these weights. Empty for a precision that converts none.
        trains: share of the parameters' elements that train; planned_steps: of the whole training.
        as_trained: in mode=evaluate, what the checkpoint reached in its own precision, trained_in.
        loss_scale: scale in force in the last step; None without one.
        kernels: of float16 on a CPU; "emulated" where the arithmetic is, which then has no speed.
        dashboard: the page that shows it beside others of its experiment, without the server.
        left_out: keys that the sweep sets and that its precision does not take.
    """

    precision: str
    label: str
    folder: str
    status: Status = "finished"
    error: str = ""
    overrides: Sequence[str] = ()
    group: str = ""
    seed: int | None = None
    model: str = ""
    data: str = ""
    device: str = ""
    quality: str = ""
    direction: Literal["max", "min"] = "max"
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    steps: int = 0
    planned_steps: int = 0
    train_loss: float | None = None
    examples_per_second: float | None = None
    step_ms: float | None = None
    peak_memory_mib: float | None = None
    weights_mib: float | None = None
    plain_weights_mib: float | None = None
    optimizer_mib: float | None = None
    converted: str = ""
    converted_weights: str = ""
    trains: float | None = None
    as_trained: dict[str, float] = field(default_factory=dict)
    trained_in: str = ""
    skipped_steps: int | None = None
    loss_scale: float | None = None
    stagnant_share: float | None = None
    kernels: str = ""
    seconds: float = 0.0
    run_id: str | None = None
    experiment_id: str | None = None
    tracking_uri: str | None = None
    experiment: str = ""
    dashboard: str | None = None
    diverged: bool = False
    left_out: list[str] = field(default_factory=list)

    @property
    def objective(self) -> float:
        """What a sweeper optimises: the last value of the quality, NaN without one."""
        return self.metrics.get(self.quality, float("nan"))

    @property
    def outcome(self) -> str:
        """The status; "diverged" where a guard stopped it, or it finished and its quality or its
        loss is not finite: an accuracy stays a number when the loss is none."""
        told = [self.metrics.get(self.quality), self.metrics.get(VAL_LOSS)]
        known = [v for v in told if v is not None] or [self.train_loss or 0.0]
        gone = self.status == "finished" and not all(map(math.isfinite, known))
        return "diverged" if self.diverged or gone else self.status

    @property
    def settings(self) -> str:
        """What was swept beside precision and seed."""
        return (self.group or self.label).removeprefix(self.precision).strip()

    def write(self, folder: Path) -> Path:
        """Writes `result.json` into the folder, which is created; returns its path. Who reads it
        meanwhile finds the whole of it or what was there before."""
        return write_text(folder / RESULT, json.dumps(redact_values(asdict(self)), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "RunResult":
        """Raises ValueError: the file is damaged."""
        if not (folder / RESULT).is_file():
            raise ValueError(f"{folder / RESULT} is no file")
        return cls.of(json.loads((folder / RESULT).read_text()))

    @classmethod
    def of(cls, values: object) -> "RunResult":
        """From what was written, by this version of the runner or by another.

        Raises:
            ValueError: it is no result of a run.
        """
        return cls(**dataclass_fields_from_json(cls, values))


def print_result(console: Console, result: RunResult) -> None:
    """The summary of one run."""
    table = Table(
        title=f"{result.label}  {result.outcome}", title_justify="left", show_header=False
    )
    for name, text in result_rows(result):
        table.add_row(name, text)
    console.print(table)


def result_rows(result: RunResult) -> list[tuple[str, str]]:
    """Name and text of each line of a run's summary."""
    lines = [(name, format_number(value)) for name, value in result.metrics.items()]
    if result.best is not None and result.best != result.metrics.get(result.quality):
        lines.append((f"best {result.quality}", format_number(result.best)))
    lines += [
        ("steps", str(result.steps)),
        ("examples per second", format_number(result.examples_per_second)),
        ("peak memory", f"{format_number(result.peak_memory_mib)} MiB"),
    ]
    for name in reversed(list(result.as_trained)):
        if gap := _change(name, result):
            text = f"{format_number(result.as_trained[name])} in {result.trained_in}; change {gap}"
            lines.insert(list(result.metrics).index(name) + 1, ("  as trained", text))
    if result.converted:
        lines.append(("converted layers", result.converted))
        lines.append(("converted matrix weights", result.converted_weights))
        lines.append(
            ("weights", f"{format_number(result.weights_mib)} MiB, {memory_saved(result)} saved")
        )
    if result.optimizer_mib:
        lines.append(("optimizer state", f"{format_number(result.optimizer_mib)} MiB"))
    if result.loss_scale is not None:
        lines.append(("skipped steps", str(result.skipped_steps)))
        lines.append(("final loss scale", format_number(result.loss_scale)))
    if result.kernels:
        lines.append(("kernels", result.kernels))
    lines += [
        ("device", result.device),
        ("folder", result.folder),
        ("MLflow", mlflow_location(result)),
    ]
    if result.dashboard:
        lines.append(("dashboard", page_url(result.tracking_uri, result.dashboard)))
    return [row for row in lines if row[1]]


def mlflow_location(result: RunResult) -> str:
    """Where to look at the run."""
    if result.run_id is None:
        return ""
    run = f"/#/experiments/{result.experiment_id}/runs/{result.run_id}"
    if (result.tracking_uri or "").startswith("http"):
        return page_url(result.tracking_uri, run)
    command = ui_command(result.tracking_uri, result.experiment)
    return f"run {result.run_id}; to see it: {command}"


LOCAL = "http://127.0.0.1:5000"


def page_url(uri: str | None, path: str) -> str:
    """The URL of a page of the store; of one without a server, as `runner ui` will serve it."""
    return f"{uri if (uri or '').startswith('http') else LOCAL}{path}"


def ui_command(uri: str | None, experiment: str) -> str:
    """What to type to see a store that has no server."""
    words = ["python", "-m", "runner", "ui"]
    if uri and uri != redact(resolve_uri(None, os.environ, Path.cwd())):
        words.append(f"tracking.uri={uri}")
    if experiment and experiment != resolve_experiment(None, os.environ):
        words.append(f"tracking.experiment={experiment}")
    return quote_command(words)


def memory_saved(result: RunResult) -> str:
    """Share of the weights' memory that the precision saves, in percent."""
    if result.weights_mib is None or not result.plain_weights_mib:
        return ""
    if result.weights_mib > result.plain_weights_mib:
        return "none"
    return f"{1 - result.weights_mib / result.plain_weights_mib:.0%}"


Column = tuple[str, Callable[[RunResult], str]]


def result_columns(results: Sequence[RunResult]) -> list[Column]:
    """Name and cell of each column that some job of a sweep has something to say in."""
    qualities = sorted({r.quality for r in results if r.quality})
    quality = qualities[0] if len(qualities) == 1 else "quality"
    evaluated = any(r.trained_in for r in results)
    beside_quality = evaluated and quality != VAL_LOSS
    several = len({r.optimizer_mib for r in results if r.optimizer_mib}) > 1
    on_cpu = any("threads)" in r.device for r in results)
    every: list[Column] = [
        ("job", lambda r: r.label),
        ("status", lambda r: r.outcome),
        (quality, lambda r: format_number(r.metrics.get(r.quality))),
        ("change", lambda r: _change(r.quality, r, results)),
        ("loss", lambda r: format_number(r.metrics.get(VAL_LOSS)) if beside_quality else ""),
        ("loss change", lambda r: _change(VAL_LOSS, r, results) if quality != VAL_LOSS else ""),
        ("examples/s", lambda r: format_number(r.examples_per_second)),
        ("weights MiB", lambda r: format_number(r.weights_mib)),
        ("saved", memory_saved if evaluated else lambda r: ""),
        ("state MiB", lambda r: format_number(r.optimizer_mib) if several else ""),
        ("trains", lambda r: "" if r.trains in (None, 1.0) else format_percent(r.trains)),
        ("process MiB" if on_cpu else "peak MiB", lambda r: format_number(r.peak_memory_mib)),
        ("converted", lambda r: r.converted),
        ("skipped", lambda r: "" if r.skipped_steps is None else str(r.skipped_steps)),
        ("final scale", lambda r: format_number(r.loss_scale)),
    ]
    return [(name, cell) for name, cell in every if any(map(cell, results))]


def shared_settings(settings: str) -> str:
    """Settings without precision.<key>=..., which belongs to a precision: what it is compared with
    need not share it."""
    words = settings.split()
    return " ".join(word for word in words if not word.lstrip("+~").startswith("precision."))


def relative_change(name: str, result: RunResult, others: Sequence[RunResult] = ()) -> float | None:
    """Of a metric, against what the checkpoint reached in its own precision: as it noted itself,
    or as a job of the same sweep with the same settings found on the same device."""
    own = {
        r.settings: r.metrics
        for r in reversed(others)
        if r.precision == r.trained_in == result.trained_in and r.device == result.device
    }
    found = own.get(result.settings) or own.get(shared_settings(result.settings), {})
    before, after = (result.as_trained or found).get(name), result.metrics.get(name)
    return None if before is None or after is None else after - before


def _change(name: str, result: RunResult, others: Sequence[RunResult] = ()) -> str:
    gap = relative_change(name, result, others)
    return "" if gap is None else f"{gap:+.4g}"


def sweep_table(results: Sequence[RunResult]) -> Table:
    """Every job of a sweep with its result."""
    trained = sorted({r.trained_in for r in results if r.trained_in})
    title = f"sweep; change: from the checkpoint's own {', '.join(trained)}" if trained else "sweep"
    table = Table(title=title, title_justify="left")
    shown = result_columns(results)
    for name, _ in shown:
        words = name in ("job", "status")
        table.add_column(name, justify="left" if words else "right", no_wrap=words)
    for result in results:
        table.add_row(*(cell(result) for _, cell in shown))
    return table


def read_results(folder: Path) -> list[RunResult]:
    """The results of a sweep's jobs in order; a job that left none is a failed one."""
    jobs = sorted(
        (p for p in folder.iterdir() if p.is_dir() and p.name.isdecimal()),
        key=lambda p: int(p.name),
    )
    found = []
    for job in jobs:
        try:
            found.append(RunResult.read(job))
        except (OSError, ValueError):
            why = f"its {RESULT} is damaged" if (job / RESULT).exists() else "died without a result"
            found.append(RunResult("", f"job {job.name}", str(job), "failed", why))
    return found
