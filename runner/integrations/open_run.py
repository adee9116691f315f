"""Hold the run of another trainer from its first step on: its journal, its files, its result."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.resolve import leaves
from runner.diagnostics.numerics.numerics_callback import NumericsCallback, NumericsOutput
from runner.integrations.options import RecordSettings
from runner.integrations.precision_label import StepDtypes, substitution_text
from runner.integrations.run_files import process_command, run_config, write_run_files
from runner.integrations.run_place import RunPlace
from runner.integrations.step_records import StepRecords, restore_summary
from runner.integrations.training_source import TrainingSource
from runner.modes import notes, run_metadata
from runner.modes.result import RunResult
from runner.modes.result import Status as ResultStatus
from runner.modes.training_outputs import DTYPES_FILE, draw_loss_scale, tables_tag
from runner.precision.conversion import ConversionReport
from runner.tracking import history
from runner.tracking.journal import latest_journal
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.tracker import RunInfo, Status, Tracker
from runner.training.callbacks.callback import Callback
from runner.training.callbacks.metric_logger import MetricLogger
from runner.training.callbacks.summary import RunSummary
from runner.training.records import EvalRecord
from runner.utils.accelerator import Accelerator
from runner.utils.console import plain_console
from runner.utils.errors import TrackingError
from runner.utils.files import os_error_reason, write_table
from runner.utils.formatting import relative_path
from runner.utils.layout import RESULT
from runner.utils.secrets import redact
from runner.utils.tensors import MIB, float32_bytes, stored_bytes
from runner.utils.terminal import quote_command

_RUN_STATUS: dict[str, Status] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}


def new_tracker(settings: RecordSettings) -> Tracker:
    """Return the tracker of a run.

    Raises:
        ConfigError: no store of MLflow has this URI or can be opened there, or the patience is
            negative.
    """
    tracker = MlflowTracker(settings.tracking_uri, settings.experiment, patience=settings.patience)
    tracker.check_store()
    return tracker


def say(text: str) -> None:
    """Print a line for the user, without secrets."""
    plain_console().print(text, markup=False, soft_wrap=True)


class OpenRun:
    """The record of a training whose precision is known.

    Args:
        source: the training.
        settings: of the callback.
        place: the run's folder.
        dtypes: of the first step.
        tracker: not open yet.

    Attributes:
        records: takes the steps and the evaluations.
        metrics: last value of each metric of the evaluations.
    """

    def __init__(
        self,
        source: TrainingSource,
        settings: RecordSettings,
        place: RunPlace,
        dtypes: StepDtypes,
        tracker: Tracker,
    ) -> None:
        self.source = source
        self.settings = settings
        self.place = place
        self.dtypes = dtypes
        self.metrics: dict[str, float] = {}
        self.tracker: Tracker = tracker
        self.summary = RunSummary(settings.quality, settings.direction)
        self.records = self._open()

    @property
    def accelerator(self) -> Accelerator:
        """Return the device that the model trains on."""
        return Accelerator(self.source.device)

    @property
    def label(self) -> str:
        """Return the run's name in tables: its precision, its name, and what was asked for."""
        label = f"{self.dtypes.label} {self.settings.name or self.source.trainer}"
        asked = self.source.request.label
        # Runs of one label are repetitions of one another, which these are not.
        return label if asked == self.dtypes.label else f"{label} (asked: {asked})"

    def _open(self) -> StepRecords:
        """Open the run in the store, and return what takes its records."""
        source = self.source
        state = source.train_state(self.dtypes.label)
        if self.place.earlier is not None:
            curves = history.from_journal(self.place.earlier)
            restore_summary(self.summary, curves, source.start_step)
            state.skipped = len(self.summary.overflows)
        config = run_config(source, self.dtypes)
        paths = []
        try:
            paths += write_run_files(self.place.folder, config)
        except OSError as error:
            say(f"warning: {relative_path(self.place.folder)}: {os_error_reason(error)}.")
        self.tracker.open(
            RunInfo(
                self.place.folder,
                {key: str(value) for key, value in leaves(config)},
                self._tags(),
                self.label,
                sweep=self.place.sweep,
                continues=self.place.earlier,
                step=source.start_step,
            )
        )
        self.tracker.note(
            notes.running_note(quote_command(process_command())) + self._substitution_note()
        )
        for path in paths:
            self.tracker.artifact(path)
        callbacks: list[Callback] = [
            self.summary,
            MetricLogger(self.tracker, state, self.accelerator),
        ]
        every = self.settings.numerics_every
        if every is not None:
            output = NumericsOutput(
                self.place.folder, self.label, self.tracker, self._save_path, say
            )
            callbacks.append(NumericsCallback(state, every, output))
        return StepRecords(state, callbacks, self.settings.log_every)

    def _tags(self) -> dict[str, str]:
        source = self.source
        tags = {
            "precision": self.dtypes.label,
            "asked_precision": source.request.label,
            "trainer": source.version_text,
            "model": type(source.model).__name__,
            "accelerator": self.accelerator.kind,
            "device_name": self.accelerator.name,
            "output_dir": str(self.place.folder.absolute()),
            "mode": "train",
            "quality": self.settings.quality,
            "direction": self.settings.direction,
        }
        substituted = substitution_text(source.request, self.dtypes)
        if substituted:
            tags["substituted"] = substituted
        return tags | run_metadata.git_tags(Path.cwd())

    def _substitution_note(self) -> str:
        """Return the lines of the run's page on what was replaced silently; empty for nothing."""
        text = substitution_text(self.source.request, self.dtypes)
        return f"\n\n**{text}**" if text else ""

    def save_dtypes(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Save in which dtypes each module stores and computes, a table on MLflow's page."""
        if rows and self._save(DTYPES_FILE, lambda path: write_table(path, rows)):
            self.tracker.tags(tables_tag(DTYPES_FILE))

    def _save(self, name: str, write: Callable[[Path], Any]) -> bool:
        """Write a file of the run's folder and upload it; return whether it was written."""
        return self._save_path(self.place.folder / name, write)

    def _save_path(self, path: Path, write: Callable[[Path], Any]) -> bool:
        """Write a file in the run's folder and upload it; return whether it was written."""
        try:
            write(path)
        except OSError as error:
            say(f"warning: {relative_path(path)} was not written: {os_error_reason(error)}.")
            return False
        self.tracker.artifact(path)
        return True

    def add_evaluation(self, record: EvalRecord) -> None:
        """Record an evaluation.

        Args:
            record: its metrics have names that begin with `val/`.
        """
        quality = self.settings.quality
        if quality not in record.metrics and not self.metrics:
            names = ", ".join(sorted(record.metrics))
            say(
                f"warning: the evaluation has no {quality}, by which runs are compared; it has "
                f"{names or 'no numbers'}. Type quality=<one of them>, and direction='max' where "
                "more of it is better."
            )
        self.metrics |= record.metrics
        # The runner's own callbacks read the quality in each record, and one of several validation
        # sets may have none.
        if quality in record.metrics:
            self.records.add_evaluation(record)
        else:
            self.tracker.log_metrics([(record.step, record.time_ms, record.metrics)])
            self.records.restart_clock()

    def finish(self, status: ResultStatus, error: str, seconds: float) -> RunResult:
        """Close the run with its status, write its result, and return it.

        Args:
            status: how the training ended.
            error: why, of one that did not finish.
            seconds: wall-clock time of the training.
        """
        self.records.close()
        summary = self.summary
        if summary.scales and summary.last is not None:
            last = summary.last.step
            self._save(
                "loss_scale.png",
                lambda path: draw_loss_scale(path, summary.scales, summary.overflows, last),
            )
        return self._close(self._result(status, redact(error), seconds))

    def add_late_evaluation(self, record: EvalRecord, result: RunResult) -> RunResult:
        """Record an evaluation after the training, in the run that has ended.

        Args:
            record: its metrics have names that begin with `val/`.
            result: of the run so far.

        Returns:
            The result with the evaluation's metrics.
        """
        self.metrics |= record.metrics
        self.tracker = new_tracker(self.settings)
        self.tracker.open(
            RunInfo(
                self.place.folder,
                name=self.label,
                sweep=self.place.sweep,
                continues=latest_journal(self.place.folder),
            )
        )
        self.tracker.log_metrics([(record.step, record.time_ms, record.metrics)])
        return self._close(replace(result, metrics=self.metrics))

    def _close(self, result: RunResult) -> RunResult:
        """Write and upload the result, close the run, and return the result with its place."""
        command = quote_command(process_command())
        status = _RUN_STATUS[result.status]
        self._save(RESULT, lambda path: result.write(path.parent))
        note = notes.finished_note(command, result, ConversionReport())
        if result.error:
            note = notes.failed_note(command, status, result.error)
        self.tracker.note(note + self._substitution_note())
        if self.place.group_run is not None:
            self.place.group_run.close("FINISHED")
        self.tracker.close(status, result.error or None)
        try:
            self.tracker.check()
        except TrackingError as refusal:
            say(f"warning: {refusal}")
        # The run's id is known when the store has taken the run, at the latest now.
        result = replace(
            result,
            run_id=self.tracker.run_id,
            experiment_id=self.tracker.experiment_id,
            dashboard=self.tracker.dashboard,
        )
        with suppress(OSError):
            result.write(self.place.folder)
        return result

    def _result(self, status: ResultStatus, error: str, seconds: float) -> RunResult:
        values = self.summary.result_values()
        if not values["examples_per_second"]:  # the loop did not say how many examples a step has
            values["examples_per_second"] = None
        values["metrics"] = self.metrics
        source = self.source
        tracker = self.tracker
        return RunResult(
            precision=self.dtypes.label,
            label=self.label,
            folder=str(self.place.folder),
            status=status,
            error=error,
            group=self.label,
            seed=source.seed,
            model=type(source.model).__name__,
            device=self.accelerator.name,
            quality=self.settings.quality,
            direction=self.settings.direction,
            planned_steps=source.planned_steps,
            peak_memory_mib=self.accelerator.peak_memory_mib(),
            weights_mib=stored_bytes(source.model) / MIB,
            plain_weights_mib=float32_bytes(source.model) / MIB,
            seconds=seconds,
            tracking_uri=redact(getattr(tracker, "uri", "")) or None,
            experiment=getattr(tracker, "experiment", ""),
            **values,
        )
