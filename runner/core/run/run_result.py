"""The result of a run, and its file `result.json`."""

import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from runner.core.base.files import dataclass_fields_from_json, read_json, write_json
from runner.core.base.fmt import format_part, now_ms
from runner.core.base.layout import RESULT
from runner.core.policy.conversion_report import ConversionReport
from runner.core.record import journals
from runner.core.record.metric_names import VAL_LOSS
from runner.core.record.tracker import RunInfo

if TYPE_CHECKING:
    from runner.core.record.tracker import Tracker


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
        note: of the user, tracking.note.
        kernels: "emulated" for emulated arithmetic, whose speed is not reported.
        dashboard: path of the store's page that compares the runs of the sweep, without the
            server's address; None for a run of no sweep.
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
    note: str = ""
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

    @property
    def timed_step_ms(self) -> float | None:
        """Return the time of a step in milliseconds; None where the run was too short for a speed.

        Such a run's `step_ms` serves to estimate how long a longer one would take.
        """
        return self.step_ms if self.examples_per_second else None

    def log_cost(self, tracker: "Tracker") -> None:
        """Log the speed and the memory that reports show, once, for a run that finished.

        A run that was not timed has no speed.
        """
        cost = {
            "perf/mean_examples_per_second": self.examples_per_second or None,
            "perf/mean_step_ms": self.timed_step_ms,
            "memory/compared_mib": self.memory_mib,
        }
        known = {name: value for name, value in cost.items() if value is not None}
        if self.status == "finished" and known:
            tracker.log_metrics([(self.steps, now_ms(), known)])

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
    def read(cls, folder: Path) -> Self:
        """Read `result.json` of a folder.

        Raises:
            ValueError: the file is damaged.
            OSError: it is missing, or cannot be read.
        """
        return cls.from_json(read_json(folder / RESULT))

    @classmethod
    def from_json(cls, values: object) -> Self:
        """Return a result from the content of a file.

        Raises:
            ValueError: the content is no result of a run.
        """
        return cls(**dataclass_fields_from_json(cls, values))


@dataclass(frozen=True)
class RunPage:
    """The facts that the page of a run shows beside its metrics.

    Attributes:
        command: the command line or the call of the Python API that repeats the run.
        resumed: what the store was given of a run that is resumed; None for one that starts.
        status: of a run that has ended; None while it runs.
        error: why it failed or was stopped.
        result: of a run that finished.
        report: its conversion, as proven.
    """

    command: str
    resumed: RunInfo | None = None
    status: journals.Status | None = None
    error: str = ""
    result: RunResult | None = None
    report: ConversionReport | None = None
