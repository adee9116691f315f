"""The result of a run: its file `result.json`, its table, and its row in a table of results.

The names of the columns are an interface that docs/sweeps.md lists: add names, do not change them.
"""

import html
import math
import os
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from runner.config.annotations import dataclass_fields_from_json
from runner.tracking import history
from runner.tracking.dashboard import run_path
from runner.tracking.metric_names import VAL_LOSS
from runner.tracking.uri import resolve_experiment, resolve_uri
from runner.utils.errors import ConfigError
from runner.utils.files import read_json, write_json
from runner.utils.formatting import format_number, format_part, now_ms
from runner.utils.layout import RESULT
from runner.utils.secrets import redact
from runner.utils.terminal import quote_command, sanitize

if TYPE_CHECKING:
    import pandas
    import torch

    from runner.tracking.tracker import Tracker

METRIC_PREFIX = "metric."
"""Begins the columns of the job's last metrics, for example metric.val/loss."""
SETTING_PREFIX = "set."
"""Begins the columns of what the job's overrides set, for example set.optimizer.lr."""

UI_ADDRESS = "http://127.0.0.1:5000"
"""Where `runner ui` serves the pages of a store without a server."""

Status = Literal["finished", "failed", "unavailable", "refused", "stopped"]
"""How a run ended."""
TIME_LIMIT = "train.max_seconds"  # what RunResult.stopped_by is after a limit of time
UNTRIED: tuple[Status, ...] = ("unavailable", "refused")
"""Of jobs that could not begin: this machine lacks what they need, or their config is refused."""


def fact(meaning: str = "", default: Any = None, *, column: str = "", stored: str = "") -> Any:
    """Return a field of RunResult: everything that is known of one fact.

    Args:
        meaning: of the fact's column in a table of results; empty for a fact without one.
        default: value where the fact is not known, or the type of an empty collection.
        column: of the fact, an attribute of RunResult; empty for the field itself.
        stored: tag or metric of MLflow that holds the fact, for a run without a result.json; the
            last one that the run has.
    """
    metadata = {"meaning": meaning, "column": column, "stored": stored}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The numbers of a run and how it ended, as written to `result.json` in its folder.

    The columns of a table of results are the facts with a meaning, in their order.

    Attributes:
        group: jobs of one group differ in the seed alone.
        settings: words of the label beside the precision and the seed.
        sweep: letter of the job's sweep in a report on two sweeps, else empty.
        status: failed has `diverged` where a guard stopped the run; unavailable: this machine lacks
            what it needs; refused: its config does not fit the precision, in a preset's sweep;
            stopped: by a signal.
        examples_per_second: of training, without the first block of steps and evaluations.
        peak_memory_mib: see Accelerator.peak_memory_mib.
        converted: of the layers that hold matrix weights; empty for a precision that converts none.
        matrix_work: as "82.0% float32, 18.0% bfloat16", and matrix_formats these formats; empty for
            a compiled model, which does not show them.
        caveats: sentences on what the first step did not compute as asked.
        cast_note: sentence that autocast followed torch's list for CPUs; empty where it did not.
        stopped_by: what ended the training before its last step: train.max_seconds, the setting of
            early stopping, or the reason of a callback; empty where nothing did.
        device_type: type of the torch.device, for example cpu; empty if unknown.
        as_trained: in mode=evaluate, the metrics that the checkpoint noted in its own precision.
        loss_scale: None for a precision without one.
        kernels: "emulated" for emulated arithmetic, whose speed is not reported.
        dashboard: path of the store's page that compares the runs of the experiment, without the
            server's address.
        diverged_step: `steps` counts the whole block of steps that was read with it.
    """

    label: str = fact("name of the job in the report", MISSING)
    group: str = fact("the label without the seed", "")
    settings: list[str] = fact(default=list)
    sweep: str = ""
    precision: str = fact("name of the precision", MISSING, stored="precision")
    seed: int | None = fact("seed; null if unknown")
    overrides: Sequence[str] = ()
    status: Status = fact("finished, failed, unavailable, refused or stopped", "finished")
    diverged: bool = fact("the status, or diverged", False, column="outcome")
    error: str = fact("why the job did not finish", "", stored="error")
    model: str = fact("name of the model", "", stored="model")
    data: str = fact("name of the data", "", stored="data")
    device: str = fact("name of the device", "", stored="device_name")
    device_type: str = fact(default="", stored="accelerator")
    quality: str = fact("name of the metric that jobs are compared by", "")
    direction: Literal["max", "min"] = fact(
        "max if a greater quality is better, min if a smaller one is", "max"
    )
    metrics: dict[str, float] = fact("last value of the quality", dict, column="quality_value")
    best: float | None = fact("best value of the quality", column="quality_best")
    train_loss: float | None = fact("last training loss", stored="train/loss")
    steps: int = fact("optimizer steps that ran", 0)
    planned_steps: int = fact("optimizer steps of the whole training", 0)
    stopped_by: str = ""
    examples_per_second: float | None = fact(
        "training speed, examples per second",
        stored="perf/examples_per_second perf/mean_examples_per_second",
    )
    step_ms: float | None = fact(
        "time of an optimizer step, milliseconds", stored="perf/step_ms perf/mean_step_ms"
    )
    seconds: float = fact("time of the whole job, seconds", 0.0)
    peak_memory_mib: float | None = fact(
        "peak memory of the device, or of the process on a CPU, MiB", stored="memory/peak_mib"
    )
    weights_mib: float | None = fact(
        "parameters and buffers after conversion, MiB", stored="memory/weights_mib"
    )
    plain_weights_mib: float | None = fact("parameters and buffers in float32, MiB")
    optimizer_mib: float | None = fact(
        "state of the optimizers, MiB", stored="memory/optimizer_mib"
    )
    converted: str = fact("converted layers of all, such as 53/54", "", stored="converted")
    converted_weights: str = fact(
        "converted elements of all elements of matrix weights", "", stored="converted_weights"
    )
    matrix_work: str = fact(
        "share of each format in the matrix products of the first step", "", stored="matrix_work"
    )
    matrix_formats: list[str] = fact(default=list)
    caveats: list[str] = fact(default=list)
    cast_note: str = ""
    fused_rounding: str = fact(
        "rounding between fused operations: fused or eager; empty if not compiled",
        "",
        stored="fused_rounding",
    )
    trains: float | None = fact("share of the parameters' elements that train, 0 to 1")
    skipped_steps: int | None = fact("optimizer steps that the loss scale skipped")
    loss_scale: float | None = fact("loss scale in the last step", stored="loss_scale/value")
    stagnant_share: float | None = fact("share of the weights that did not move, 0 to 1")
    kernels: str = fact("kernels of float16 on a CPU, or emulated", "")
    diverged_step: int | None = fact("step for which a guard stopped the job")
    trained_in: str = fact("precision that trained the checkpoint, of mode=evaluate", "")
    as_trained: dict[str, float] = fact(default=dict)
    left_out: list[str] = fact(
        "keys that the sweep sets and the precision does not take, separated by spaces", list
    )
    folder: str = fact("folder of the job", MISSING, stored="output_dir")
    run_id: str | None = fact("id of the job's run in MLflow")
    experiment_id: str | None = None
    tracking_uri: str | None = None
    experiment: str = ""
    dashboard: str | None = None

    @property
    def objective(self) -> float:
        """Return the value that a sweeper optimises: the last quality, NaN without one."""
        return self.metrics.get(self.quality, float("nan"))

    @property
    def quality_value(self) -> float | None:
        """Return the last quality, None without one."""
        return self.metrics.get(self.quality)

    @property
    def outcome(self) -> str:
        """Return the status; "diverged" where a guard stopped the run or a number is not finite."""
        # The loss counts, too: an accuracy stays a number when the loss is NaN.
        values = [self.quality_value, self.metrics.get(VAL_LOSS)]
        known = [value for value in values if value is not None]
        if not known:
            known = [self.train_loss or 0.0]
        is_finite = all(map(math.isfinite, known))
        if self.diverged or (self.status == "finished" and not is_finite):
            return "diverged"
        return self.status

    @property
    def is_whole(self) -> bool:
        """Return whether the run finished, and no limit of time ended it before its last step."""
        return self.status == "finished" and self.stopped_by != TIME_LIMIT

    @property
    def converted_share(self) -> str:
        """Return the converted share of the matrix weights, as "82 % of weights"; of a result
        without their counts the converted layers of all."""
        converted, _, total = self.converted_weights.partition("/")
        # A stranger's file may hold anything there.
        if not (converted.isdecimal() and total.isdecimal() and len(self.converted_weights) < 40):
            return self.converted
        return f"{format_part(int(converted), int(total))} of weights"

    @property
    def is_on_cpu(self) -> bool:
        """Return whether the device is a CPU."""
        return self.device_type == "cpu"

    @property
    def memory_mib(self) -> float | None:
        """Return the memory that is comparable between jobs, in MiB.

        On an accelerator the device's peak; on a CPU weights plus optimizer state. None where the
        loss scale skipped every step: optimizers make their state in the first step that counts.
        """
        if self.skipped_steps and self.skipped_steps == self.steps:
            return None
        # The resident set of a process includes what earlier jobs in it allocated.
        if not self.is_on_cpu:
            return self.peak_memory_mib
        return None if self.weights_mib is None else self.weights_mib + (self.optimizer_mib or 0)

    def log_cost(self, tracker: "Tracker") -> None:
        """Log the speed and the memory that reports show, once, for a run that finished.

        A run that was not timed has no speed.
        """
        timed = bool(self.examples_per_second)
        cost = {
            "perf/mean_examples_per_second": self.examples_per_second if timed else None,
            "perf/mean_step_ms": self.step_ms if timed else None,
            "memory/compared_mib": self.memory_mib,
        }
        known = {name: value for name, value in cost.items() if value is not None}
        if self.status == "finished" and known:
            tracker.log_metrics([(self.steps, now_ms(), known)])

    def history(self) -> "pandas.DataFrame":
        """Return what the run recorded: a row for each step, a column for each metric.

        It is read from the run's folder, or, where the folder is not here, from MLflow. See
        runner.tracking.history.to_frame for the columns.

        Raises:
            ConfigError: neither the folder nor the MLflow run is here.
            TrackingError: the store does not answer.
        """
        if Path(self.folder).is_dir():
            return history.to_frame(history.from_folder(Path(self.folder)))
        if self.run_id is None or self.tracking_uri is None:
            problem = f"{self.folder} is no folder here, and the run in no store that is named here"
            raise ConfigError(f"{problem}. Type runner.load(<its MLflow id>, uri=<its store>).")
        from runner.tracking.reader import Reader  # imports mlflow

        return history.to_frame(Reader(self.tracking_uri).history(self.run_id))

    def table(self) -> "pandas.DataFrame":
        """Return the result as a table of one row; docs/sweeps.md describes the columns."""
        import pandas

        return pandas.DataFrame(table_rows([self]))

    def state_dict(self) -> "dict[str, torch.Tensor]":
        """Return the trained weights of the run's newest checkpoint, on the CPU, by name.

        load_state_dict of a model like the one that was trained takes them. With train.ema they are
        the averaged ones.

        Raises:
            ConfigError: the run left no checkpoint (checkpoint.final=false), it is damaged, or its
                weights are packed or those of an adapter.
        """
        from runner.checkpoint import checkpoint_file, locate

        content = checkpoint_file.load(locate.find_checkpoint(self.folder))
        adapter = content["spec"].get("adapter") or {}
        if content.get("layout") or adapter.get("_target_"):
            kind = "those of an adapter" if adapter.get("_target_") else "packed"
            raise ConfigError(
                f"The weights in {self.folder} are {kind}. Type mode=evaluate checkpoint=<folder>."
            )
        # With train.ema the averaged weights are those that the metrics are of.
        average = content.get("average") or {}
        return {**content["model"], **average.get("weights", {})}

    def _repr_html_(self) -> str:
        """Return the result as a notebook shows it."""
        title = sanitize(f"{self.label}: {self.outcome}")
        rows = []
        for name, text in [*result_rows(self), *page_lines(self)]:
            cells = (html.escape(sanitize(part)) for part in (name, text))
            rows.append("<tr><th>{}</th><td>{}</td></tr>".format(*cells))
        return f"<table><caption>{html.escape(title)}</caption>{''.join(rows)}</table>"

    def with_store_ids(self, tracker: "Tracker") -> "RunResult":
        """Return the result with the ids and the page of its run in the tracker's store.

        They are known when the store has taken the run, at the latest when the tracker is closed.
        """
        return replace(
            self,
            run_id=tracker.run_id,
            experiment_id=tracker.experiment_id,
            dashboard=tracker.dashboard,
        )

    def write(self, folder: Path) -> Path:
        """Write `result.json` into a folder, which is created; return its path.

        The file is replaced at once: a reader finds the new content or the one before.
        """
        return write_json(folder / RESULT, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "RunResult":
        """Read `result.json` of a folder.

        Raises:
            ValueError: the file is damaged.
            OSError: it is missing, or cannot be read.
        """
        return cls.from_json(read_json(folder / RESULT))

    @classmethod
    def from_json(cls, values: object) -> "RunResult":
        """Return a result from the content of a file.

        Raises:
            ValueError: the content is no result of a run.
        """
        return cls(**dataclass_fields_from_json(cls, values))


FIXED_COLUMNS = {
    each.metadata["column"] or each.name: each
    for each in fields(RunResult)
    if each.metadata.get("meaning")
}
"""The facts that every table has a column for, by the column's name, in their order."""


def read_results(folder: Path) -> list[RunResult]:
    """Return the results of a sweep's jobs, in the order of their numbers.

    A job without a readable `result.json` counts as failed.
    """
    # Other folders of a sweep, such as checkpoints, have names.
    jobs = [path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]
    results = []
    # By number: by name, job 10 would come before job 2.
    for job in sorted(jobs, key=lambda path: int(path.name)):
        try:
            result = RunResult.read(job)
        except (OSError, ValueError):
            is_damaged = (job / RESULT).exists()
            why = f"its {RESULT} is damaged" if is_damaged else "died without a result"
            result = RunResult(
                precision="", label=f"job {job.name}", folder=str(job), status="failed", error=why
            )
        results.append(result)
    return results


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
    # As wide as most names of a precision with a seed, so that the lines of a sweep are aligned.
    parts = [f"{result.label:<26}"]
    if result.quality in result.metrics:
        parts.append(f"{result.quality} {format_number(result.objective)}")
    if result.examples_per_second:
        parts.append(f"{format_number(result.examples_per_second)} examples/s")
    outcome = "not tried" if result.status in UNTRIED else result.outcome
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
        rows.append((name, format_number(value)))
        change = change_since_training(name, result)
        # Below it, its value in the precision that trained the checkpoint.
        if change is not None:
            before = format_number(result.as_trained[name])
            rows.append(("  as trained", f"{before} in {result.trained_in}; change {change:+.4g}"))
    if result.best is not None and result.best != result.quality_value:
        rows.append((f"best {result.quality}", format_number(result.best)))
    rows += [
        ("steps", str(result.steps)),
        ("stopped by", result.stopped_by),
        ("examples per second", format_number(result.examples_per_second)),
        ("peak memory", f"{format_number(result.peak_memory_mib)} MiB"),
    ]
    if result.converted:
        weights = f"{format_number(result.weights_mib)} MiB, {memory_saving(result)} saved"
        rows.append(("converted", result.converted_share))
        rows.append(("converted layers", result.converted))
        rows.append(("weights", weights))
    if result.optimizer_mib:
        rows.append(("optimizer state", f"{format_number(result.optimizer_mib)} MiB"))
    if result.loss_scale is not None:
        rows.append(("skipped steps", str(result.skipped_steps)))
        rows.append(("final loss scale", format_number(result.loss_scale)))
    rows += [
        ("matrix work", result.matrix_work),
        ("kernels", result.kernels),
        ("device", result.device),
        ("folder", result.folder),
    ]
    return [row for row in rows if row[1]]


def page_lines(result: RunResult, what: str = "run", artifact: str = "") -> list[tuple[str, str]]:
    """Return name and text of each line on where MLflow shows a run; none without tracking.

    Args:
        result: of the run, with its ids in the store.
        what: the word for the run.
        artifact: of the run, which the page opens; empty for its overview.
    """
    # runner.load keeps no store that this command does not name.
    uri = result.tracking_uri or "<its store>"
    # A store without a server has its pages at the address where `runner ui` serves them.
    server = uri.rstrip("/") if uri.startswith("http") else UI_ADDRESS
    lines = []
    if result.run_id:
        text = f"{what} {result.run_id}"
        if not uri.startswith("http"):
            text += f"; to see it: {ui_command(uri, result.experiment)}"
        page = run_path(result.experiment_id, result.run_id, artifact)
        lines += [("MLflow", text), ("page", f"{server}{page}")]
    if result.dashboard:
        lines.append(("dashboard", f"{server}{result.dashboard}"))
    return lines


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
