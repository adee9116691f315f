"""Record a training that another trainer runs, in the form of the runner's own runs.

A trainer's own module (transformers.py, lightning.py, accelerate.py) calls a Recorder. The run
opens when its first step has ended: only then it is known which precision ran. Its folder is that
of a run alone, or of a job in a group: a sweep whose jobs are these runs, so that `runner report`
compares them.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from runner.core import (
    ConfigError,
    ConversionReport,
    Invocation,
    RunCallback,
    RunHandle,
    RunInfo,
    RunOutput,
    RunResult,
    Tracker,
    errors,
    files,
    fmt,
    journals,
    layout,
    run_context,
    run_result,
    secrets,
    step_records,
    tensor_facts,
    terminal,
)
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.diagnostics.numerics.probe import NumericsCallback
from runner.integrations.steps import StepReader, StepRecords, restore_summary
from runner.integrations.training_source import (
    RecordSettings,
    StepDtypes,
    TrainingSource,
    numeric_switches,
    step_dtypes,
    substitution_text,
)
from runner.modes.training_outputs import DTYPES_FILE, save_loss_scale, tables_tag
from runner.output.console import plain_console
from runner.output.markup import markdown_code
from runner.sweeps.manifest import Manifest
from runner.tracking import history, notes
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.result_table import print_result
from runner.training.callbacks.runner_callbacks import MetricLogger, RunSummary

_STATUS: dict[str, journals.Status] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}


@dataclass(frozen=True)
class RunPlace:
    """The folder of a run, and what the run belongs to.

    Attributes:
        folder: of the run; it exists.
        sweep: id of the group that the run is a job of; None for a run alone.
        earlier: journal of the run that is continued; None for a new run.
        group_run: tracker of the group's parent run, which the group's first run opens and closes;
            None for any other run.
    """

    folder: Path
    sweep: str | None = None
    earlier: Path | None = None
    group_run: Tracker | None = None


class Recorder:
    """The record of one training, from its begin to its end.

    Args:
        source: the training.
        settings: of the callback.

    Attributes:
        reader: reads the steps.

    Raises:
        ConfigError: the run's folder cannot be used, or no store has the URI.
    """

    def __init__(self, source: TrainingSource, settings: RecordSettings) -> None:
        if settings.expected is not None:
            setting = f"expected={settings.expected!r}"
            request = replace(source.request, setting=setting, label=settings.expected)
            source = replace(source, request=request)
        self.source = source
        self.settings = settings
        self.reader = StepReader(source.loss_scaler)
        # First: a store that does not exist is refused before anything is trained.
        tracker = new_tracker(settings)
        self.place = choose_place(settings, source.start_step)
        self._output = RunOutput(self.place.folder, plain_console(), tracker)
        self._started_at = time.perf_counter()
        self._probe: DtypeProbe | None = None
        self._trace = ExitStack()
        self._run: OpenRun | None = None
        self._early_evaluations: list[step_records.EvalRecord] = []
        self._result: RunResult | None = None
        # Runs of one process have a memory peak of their own each.
        source.accelerator.reset_peak_memory()

    def begin_trace(self) -> None:
        """Watch the dtypes of the first forward and backward; later calls watch nothing."""
        if self._probe is None:
            self._probe = self._trace.enter_context(DtypeProbe(self.source.model))

    def end_trace(self) -> None:
        """Stop watching; a call without a watch does nothing."""
        self._trace.close()

    def end_step(self, step: int, epoch: int) -> None:
        """Record the step that has ended, with what the reader has read of it.

        Args:
            step: attempted steps so far, this one included.
            epoch: passes over the data begun.

        Raises:
            ConfigError: the reader has no loss or no gradients.
        """
        record = self.reader.end_step(step, epoch)
        if self._result is not None:
            return
        if self._run is None:
            begin = time.perf_counter()
            self._run = self._open()
            # The first step has ended before: its time, and the next one's, are those without the
            # opening of the run.
            opening = time.perf_counter() - begin
            record = record._replace(ended_at=record.ended_at + opening)
            self._run.records.restart_clock(self._started_at + opening)
        self._run.records.add(record)

    def add_evaluation(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation.

        Args:
            step: attempted steps so far.
            epoch: passes over the data begun.
            metrics: by names that begin with `val/`.
        """
        record = step_records.EvalRecord(step, fmt.now_ms(), epoch, dict(metrics))
        if self._run is None:
            self._early_evaluations.append(record)
        elif self._result is None:
            self._run.add_evaluation(record)
        elif metrics:
            self._result = self._run.add_late_evaluation(record, self._result)

    def finish(self, error: BaseException | None = None) -> None:
        """End the run: as stopped after Ctrl-C, as failed after any other error.

        A second call does nothing.
        """
        status: run_result.Status = "finished" if error is None else "failed"
        reason = "" if error is None else f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            status = "stopped"
            reason = "Interrupted."
        self.end_trace()
        if self._result is not None:
            return
        if self._run is None:
            self._run = self._open()
        seconds = time.perf_counter() - self._started_at
        self._result = self._run.finish(status, reason, seconds)
        print_result(self._output.console, self._result)
        if reason:
            self._output.say(f"error: {reason}")
        if self.place.sweep:
            self._output.say(f"report of the group: {report_command(self.place.folder.parent)}")

    def _open(self) -> "OpenRun":
        """Open the run in the store, and say what the trainer replaced silently."""
        source = self.source
        rows = self._probe.table() if self._probe else []
        has_scale = source.loss_scaler is not None
        dtypes = step_dtypes(rows, source.model, has_scale, source.request)
        run = OpenRun(source, self.settings, self.place, dtypes, self._output)
        # MLflow's page shows a table of the dtypes in which each module stores and computes.
        path = self.place.folder / DTYPES_FILE
        if rows and self._output.save_artifact(path, lambda path: files.write_table(path, rows)):
            self._output.tracker.tags(tables_tag(DTYPES_FILE))
        for record in self._early_evaluations:
            run.add_evaluation(record)
        unobserved = ""
        if not dtypes.is_observed:
            unobserved = "; its dtypes were not seen (a compiled model, FP8, no step), so this is "
            unobserved += "what was asked for"
        self._output.say(
            f"recording {run.label} in {fmt.relative_path(self.place.folder)}{unobserved}"
        )
        if run.substitution:
            self._output.say(f"warning: {run.substitution}")
        return run


@dataclass(eq=False)
class OpenRun:
    """The run of a training whose precision is known: its journal, its files, its result.

    Args:
        source: the training.
        settings: of the callback.
        place: the run's folder.
        dtypes: of the first step.
        output: its tracker is not open yet.

    Attributes:
        label: the run's name in tables: its precision, its name, and what was asked for.
        substitution: a sentence on what the trainer replaced silently; empty for nothing.
        records: takes the steps and the evaluations.
        metrics: last value of each metric of the evaluations.
    """

    source: TrainingSource
    settings: RecordSettings
    place: RunPlace
    dtypes: StepDtypes
    output: RunOutput
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        asked = self.source.request
        self.label = f"{self.dtypes.label} {self.settings.name or self.source.trainer}"
        if asked.label != self.dtypes.label:
            # Runs of one label are repetitions of one another, which these are not.
            self.label += f" (asked: {asked.label})"
        self.substitution = substitution_text(asked, self.dtypes)
        self.summary = RunSummary(self.settings.quality, self.settings.direction)
        # First, because it reads files and may fail: nothing is open yet.
        state = self.source.train_state(self.dtypes.label)
        if self.place.earlier is not None:
            curves = history.from_journal(self.place.earlier)
            restore_summary(self.summary, curves, self.source.start_step)
            state.skipped = len(self.summary.overflows)
        run = self.output
        logger = MetricLogger(run.tracker, state, self.source.accelerator)
        callbacks: list[RunCallback] = [self.summary, logger]
        every = self.settings.numerics_every
        if every is not None:
            callbacks.append(NumericsCallback(state, every, run, self.label))
        handle = RunHandle("", state, run)
        self.records = StepRecords(state, callbacks, handle, self.settings.log_every)
        self._open()

    def _open(self) -> None:
        """Write the run's config and environment, and open the run in the store."""
        source = self.source
        folder = self.place.folder
        content = {
            "trainer": source.version_text,
            "precision": self.dtypes.label,
            "asked": {"precision": source.request.label, "setting": source.request.setting},
            "model": type(source.model).__name__,
            "optimizer": type(source.optimizer).__name__,
            "seed": source.seed,
            "planned_steps": source.planned_steps,
            "arguments": source.arguments,
        }
        # The trainers' settings hold enums, paths and objects, which are written as their text.
        config = secrets.redact_values(json.loads(json.dumps(content, default=str)))
        library, _, version = source.version_text.partition(" ")
        environment = run_context.environment_facts(Invocation())
        environment["command"] = process_command()
        environment["packages"][library] = version
        environment["switches"] = numeric_switches()
        params = {key: str(value) for key, value in fmt.leaves(config)}
        place = self.place
        info = RunInfo(folder, params, self._tags(), self.label, place.sweep)
        info = replace(info, continues=place.earlier, step=source.start_step)
        self.output.tracker.open(info)
        self._note(notes.running_note(terminal.quote_command(process_command())))
        text = yaml.safe_dump(config, sort_keys=False)
        self.output.save_artifact(folder / layout.CONFIG, lambda path: files.write_text(path, text))
        self.output.save_json(layout.ENVIRONMENT, environment)

    def _tags(self) -> dict[str, str]:
        tags = {
            "precision": self.dtypes.label,
            "asked_precision": self.source.request.label,
            "trainer": self.source.version_text,
            "model": type(self.source.model).__name__,
            "accelerator": self.source.accelerator.kind,
            "device_name": self.source.accelerator.name,
            "settings": self.settings.name or self.source.trainer,
            "output_dir": str(self.place.folder.absolute()),
            "mode": "train",
            "quality": self.settings.quality,
            "direction": self.settings.direction,
        }
        if self.substitution:
            tags["substituted"] = self.substitution
        return tags | run_context.git_tags(Path.cwd())

    def _note(self, text: str) -> None:
        """Set the text of the run's page, with what the trainer replaced silently."""
        substituted = f"\n\n**{self.substitution}**" if self.substitution else ""
        self.output.tracker.note(text + substituted)

    def add_evaluation(self, record: step_records.EvalRecord) -> None:
        """Record an evaluation.

        Args:
            record: its metrics have names that begin with `val/`.
        """
        quality = self.settings.quality
        if quality not in record.metrics and not self.metrics:
            names = ", ".join(sorted(record.metrics))
            self.output.say(
                f"warning: the evaluation has no {quality}, by which runs are compared; it has "
                f"{names or 'no numbers'}. Type quality=<one of them>, and direction='max' where "
                "more of it is better."
            )
        self.metrics |= record.metrics
        self.records.add_evaluation(record)

    def finish(self, status: run_result.Status, error: str, seconds: float) -> RunResult:
        """Close the run with its status, write its result, and return it.

        Args:
            status: how the training ended.
            error: why, of one that did not finish.
            seconds: wall-clock time of the training.
        """
        self.records.close()
        values: dict[str, Any] = self.summary.result_values() | {"metrics": self.metrics}
        if self.summary.last is not None:
            save_loss_scale(self.output, self.summary, values["steps"])
        if not values["examples_per_second"]:  # the loop did not say how many examples a step has
            values["examples_per_second"] = None
        source = self.source
        result = RunResult(
            precision=self.dtypes.label,
            label=self.label,
            folder=str(self.place.folder),
            status=status,
            error=secrets.redact(error),
            group=self.label,
            settings=[self.settings.name or self.source.trainer],
            seed=source.seed,
            model=type(source.model).__name__,
            device=source.accelerator.name,
            device_type=source.accelerator.device.type,
            quality=self.settings.quality,
            direction=self.settings.direction,
            planned_steps=source.planned_steps,
            peak_memory_mib=source.accelerator.peak_memory_mib(),
            weights_mib=tensor_facts.stored_bytes(source.model) / tensor_facts.MIB,
            plain_weights_mib=tensor_facts.float32_bytes(source.model) / tensor_facts.MIB,
            seconds=seconds,
            tracking_uri=secrets.redact(getattr(self.output.tracker, "uri", "")) or None,
            experiment=getattr(self.output.tracker, "experiment", ""),
            **values,
        )
        return self._close(result)

    def add_late_evaluation(self, record: step_records.EvalRecord, result: RunResult) -> RunResult:
        """Record an evaluation after the training, in the run that has ended.

        Args:
            record: its metrics have names that begin with `val/`.
            result: of the run so far.

        Returns:
            The result with the evaluation's metrics.
        """
        folder = self.place.folder
        self.metrics |= record.metrics
        self.output = replace(self.output, tracker=new_tracker(self.settings))
        earlier = journals.latest_journal(folder)
        info = RunInfo(folder, name=self.label, sweep=self.place.sweep, continues=earlier)
        self.output.tracker.open(info)
        self.output.tracker.log_metrics([(record.step, record.time_ms, record.metrics)])
        return self._close(replace(result, metrics=self.metrics))

    def _close(self, result: RunResult) -> RunResult:
        """Write and upload the result, close the run, and return the result with its place."""
        command = terminal.quote_command(process_command())
        status = _STATUS[result.status]
        result.log_cost(self.output.tracker)
        path = self.place.folder / layout.RESULT
        self.output.save_artifact(path, lambda path: result.write(path.parent))
        note = notes.finished_note(command, result, ConversionReport())
        if result.error:
            note = notes.failed_note(command, status, result.error)
        self._note(note)
        if self.place.group_run is not None:
            self.place.group_run.close("FINISHED")
        self.output.tracker.close(status, result.error or None)
        try:
            self.output.tracker.check()
        except errors.TrackingError as refusal:
            self.output.say(f"warning: {refusal}")
        result = result.with_store_ids(self.output.tracker)
        with suppress(OSError):
            result.write(self.place.folder)
        return result


def process_command() -> list[str]:
    """Return the words of this process's command."""
    # A notebook's kernel and `python -c` have no script that could be typed again.
    return ["python", *sys.argv] if sys.argv and Path(sys.argv[0]).is_file() else ["python"]


def new_tracker(settings: RecordSettings) -> MlflowTracker:
    """Return the tracker of a run.

    Raises:
        ConfigError: no store of MLflow has this URI or can be opened there, or the patience is
            negative.
    """
    tracker = MlflowTracker(settings.tracking_uri, settings.experiment, patience=settings.patience)
    tracker.check_store()
    return tracker


def choose_place(settings: RecordSettings, start_step: int) -> RunPlace:
    """Make the folder of a run, and return it.

    Args:
        settings: of the callback.
        start_step: the step that the training is resumed at; 0 for a new one.

    Raises:
        ConfigError: the folder takes no files, or holds a run that is not resumed.
    """
    try:
        if settings.group is not None:
            parent = Path("outputs/groups") / settings.group
            parent.mkdir(parents=True, exist_ok=True)
            group_run = None
            # Two trainers may begin a group at once.
            with files.folder_lock(parent, wait=True):
                if not (parent / layout.MANIFEST).exists():
                    group_run = _open_group(parent, settings)
            folder = _make_first(parent, map(str, count()))
            return RunPlace(folder, Manifest.read(parent).id, group_run=group_run)
        if settings.folder is None:
            times = (datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f") for _ in count())
            return RunPlace(_make_first(Path("outputs/runs"), times))
        return _place_in_folder(Path(settings.folder), start_step)
    except OSError as error:
        raise ConfigError(
            f"the run's folder takes no files: {error.filename}: "
            f"{files.os_error_reason(error)}. Make "
            "room, or type folder=<another folder>."
        ) from error


def _make_first(parent: Path, names: Iterable[str]) -> Path:
    """Make the first of some folders that does not exist; return its path."""
    parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        with suppress(FileExistsError):
            (parent / name).mkdir()
            return parent / name
    raise AssertionError("names do not end")


def _place_in_folder(folder: Path, start_step: int) -> RunPlace:
    """Return the place of a run in a folder of the user's.

    Raises:
        ConfigError: the folder holds a run that is recorded at the moment, or not resumed.
    """
    files.check_links(folder)
    folder.mkdir(parents=True, exist_ok=True)
    earlier = journals.latest_journal(folder)
    if earlier is None:
        return RunPlace(folder)
    if journals.has_live_owner(earlier):
        raise ConfigError(
            f"folder={folder}: another run is being recorded there. Type another folder, or leave "
            "folder= out."
        )
    if not start_step:
        raise ConfigError(
            f"folder={folder} holds a run, and this training starts at step 0. Type another "
            "folder, or resume the trainer from its checkpoint to continue the run."
        )
    return RunPlace(folder, earlier=earlier)


def _open_group(parent: Path, settings: RecordSettings) -> Tracker:
    """Write a group's manifest, and open the parent run of its runs; return its tracker."""
    # Finished, because nothing of it can be run again by `sweep.resume`.
    manifest = Manifest(uuid4().hex[:12], process_command(), began_ms=fmt.now_ms(), finished=True)
    # First, because it may refuse the store: a manifest would stay without its parent run.
    tracker = new_tracker(settings)
    manifest.write(parent)
    tags = {"sweep_id": manifest.id, "output_dir": str(parent.absolute())}
    tracker.open(RunInfo(parent, {}, tags, settings.group, sweep=manifest.id, role="sweep"))
    report = markdown_code(report_command(parent))
    tracker.note(f"Runs of other trainers, recorded as one group. Their report:\n\n{report}")
    return tracker


def report_command(group: Path) -> str:
    """Return the command that makes the report of a group, by its folder."""
    return terminal.quote_command(["python", "-m", "runner", "report", fmt.relative_path(group)])
