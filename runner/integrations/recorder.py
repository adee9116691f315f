"""Record a training that another trainer runs, in the form of the runner's own runs.

A trainer's own module (transformers.py, lightning.py, accelerate.py) calls a Recorder. The run
opens when its first step has ended: only then it is known which precision ran.
"""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from runner.config.invocation import Invocation
from runner.config.resolve import leaves
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.diagnostics.numerics.numerics_callback import NumericsCallback
from runner.integrations.options import RecordSettings
from runner.integrations.precision_label import (
    StepDtypes,
    numeric_switches,
    step_dtypes,
    substitution_text,
)
from runner.integrations.run_place import RunPlace, choose_place, new_tracker, process_command
from runner.integrations.steps import StepReader, StepRecords, restore_summary
from runner.integrations.training_source import TrainingSource
from runner.modes import notes, run_metadata
from runner.modes.context import RunOutput
from runner.modes.result import RunResult, Status, page_lines
from runner.modes.training_outputs import DTYPES_FILE, save_loss_scale, tables_tag
from runner.precision.conversion import ConversionReport
from runner.tracking import history
from runner.tracking.journal import latest_journal
from runner.tracking.tracker import RunInfo
from runner.tracking.tracker import Status as StoreStatus
from runner.training.callbacks.callback import CallbackOutput, RunCallback, RunHandle
from runner.training.callbacks.metric_logger import MetricLogger
from runner.training.callbacks.summary import RunSummary
from runner.training.records import EvalRecord
from runner.utils.console import plain_console
from runner.utils.errors import TrackingError
from runner.utils.files import os_error_reason, write_json, write_table, write_text
from runner.utils.formatting import format_number, now_ms, relative_path
from runner.utils.layout import CONFIG, ENVIRONMENT, RESULT
from runner.utils.secrets import redact, redact_values
from runner.utils.tensors import MIB, float32_bytes, stored_bytes
from runner.utils.terminal import quote_command

_STATUS: dict[str, StoreStatus] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


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
        self._early_evaluations: list[EvalRecord] = []
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
        record = EvalRecord(step, now_ms(), epoch, dict(metrics))
        if self._run is None:
            self._early_evaluations.append(record)
        elif self._result is None:
            self._run.add_evaluation(record)
        elif metrics:
            self._result = self._run.add_late_evaluation(record, self._result)

    def begin_evaluation(self) -> None:
        """End the block of steps before an evaluation, whose time counts to no step."""
        if self._run is not None and self._result is None:
            self._run.records.send()

    def finish_after(self, error: BaseException) -> None:
        """End the run as stopped after Ctrl-C, and as failed after any other error."""
        if isinstance(error, KeyboardInterrupt):
            self.finish("stopped", "Interrupted.")
        else:
            self.finish("failed", f"{type(error).__name__}: {error}")

    def finish(self, status: Status = "finished", error: str = "") -> None:
        """End the run; a second call does nothing.

        Args:
            status: how the training ended.
            error: why, of one that did not finish.
        """
        self.end_trace()
        if self._result is not None:
            return
        if self._run is None:
            self._run = self._open()
        seconds = time.perf_counter() - self._started_at
        self._result = self._run.finish(status, error, seconds)
        self._say_result(self._result)

    def _open(self) -> "OpenRun":
        """Open the run in the store, and say what the trainer replaced silently."""
        source = self.source
        rows = self._probe.table() if self._probe else []
        has_scale = source.loss_scaler is not None
        dtypes = step_dtypes(rows, source.model, has_scale, source.request)
        run = OpenRun(source, self.settings, self.place, dtypes, self._output)
        # In which dtypes each module stores and computes, a table on MLflow's page.
        path = self.place.folder / DTYPES_FILE
        if rows and self._output.save_artifact(path, lambda path: write_table(path, rows)):
            self._output.tracker.tags(tables_tag(DTYPES_FILE))
        for record in self._early_evaluations:
            run.add_evaluation(record)
        unobserved = ""
        if not dtypes.is_observed:
            unobserved = "; its dtypes were not seen (a compiled model, FP8, no step), so this is "
            unobserved += "what was asked for"
        self._output.say(f"recording {run.label} in {relative_path(self.place.folder)}{unobserved}")
        if run.substitution:
            self._output.say(f"warning: {run.substitution}")
        return run

    def _say_result(self, result: RunResult) -> None:
        """Print how the run ended, and where it is shown."""
        scale = ""
        if result.loss_scale is not None:
            scale = (
                f", {result.skipped_steps} skipped, final loss scale "
                f"{format_number(result.loss_scale)}"
            )
        error = f": {result.error}" if result.error else ""
        say = self._output.say
        say(f"recorded {result.label}: {result.outcome}, {result.steps} steps{scale}{error}")
        for name, text in page_lines(result):
            say(f"{name}: {text}")
        if self.place.sweep:
            group = relative_path(self.place.folder.parent)
            report = quote_command(["python", "-m", "runner", "report", group])
            say(f"report of the group: {report}")


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

    def __init__(
        self,
        source: TrainingSource,
        settings: RecordSettings,
        place: RunPlace,
        dtypes: StepDtypes,
        output: RunOutput,
    ) -> None:
        self.source = source
        self.settings = settings
        self.place = place
        self.precision = dtypes.label
        self.label = f"{dtypes.label} {settings.name or source.trainer}"
        if source.request.label != dtypes.label:
            # Runs of one label are repetitions of one another, which these are not.
            self.label += f" (asked: {source.request.label})"
        self.substitution = substitution_text(source.request, dtypes)
        self.metrics: dict[str, float] = {}
        self.output = output
        self.summary = RunSummary(settings.quality, settings.direction)
        # First, because it reads files and may fail: nothing is open yet.
        self.records = self._step_records()
        self._open()

    def _open(self) -> None:
        """Write the run's config and environment, and open the run in the store."""
        source = self.source
        folder = self.place.folder
        content = {
            "trainer": source.version_text,
            "precision": self.precision,
            "asked": {"precision": source.request.label, "setting": source.request.setting},
            "model": type(source.model).__name__,
            "optimizer": type(source.optimizer).__name__,
            "seed": source.seed,
            "planned_steps": source.planned_steps,
            "arguments": source.arguments,
        }
        # The trainers' settings hold enums, paths and objects, which are written as their text.
        config = redact_values(json.loads(json.dumps(content, default=str)))
        library, _, version = source.version_text.partition(" ")
        paths: list[Path] = []
        try:
            environment = run_metadata.environment_facts(Invocation())
            environment["command"] = process_command()
            environment["packages"][library] = version
            environment["switches"] = numeric_switches()
            paths.append(write_text(folder / CONFIG, yaml.safe_dump(config, sort_keys=False)))
            paths.append(write_json(folder / ENVIRONMENT, environment))
        except OSError as error:
            self.output.say(f"warning: {relative_path(folder)}: {os_error_reason(error)}.")
        params = {key: str(value) for key, value in leaves(config)}
        place = self.place
        info = RunInfo(folder, params, self._tags(), self.label, place.sweep)
        info = replace(info, continues=place.earlier, step=source.start_step)
        self.output.tracker.open(info)
        self._note(notes.running_note(quote_command(process_command())))
        for path in paths:
            self.output.tracker.artifact(path)

    def _tags(self) -> dict[str, str]:
        tags = {
            "precision": self.precision,
            "asked_precision": self.source.request.label,
            "trainer": self.source.version_text,
            "model": type(self.source.model).__name__,
            "accelerator": self.source.accelerator.kind,
            "device_name": self.source.accelerator.name,
            "output_dir": str(self.place.folder.absolute()),
            "mode": "train",
            "quality": self.settings.quality,
            "direction": self.settings.direction,
        }
        if self.substitution:
            tags["substituted"] = self.substitution
        return tags | run_metadata.git_tags(Path.cwd())

    def _note(self, text: str) -> None:
        """Set the text of the run's page, with what the trainer replaced silently."""
        substituted = f"\n\n**{self.substitution}**" if self.substitution else ""
        self.output.tracker.note(text + substituted)

    def _step_records(self) -> StepRecords:
        """Return what takes the run's steps, after those of the run that is continued."""
        state = self.source.train_state(self.precision)
        if self.place.earlier is not None:
            curves = history.from_journal(self.place.earlier)
            restore_summary(self.summary, curves, self.source.start_step)
            state.skipped = len(self.summary.overflows)
        logger = MetricLogger(self.output.tracker, state, self.source.accelerator)
        callbacks: list[RunCallback] = [self.summary, logger]
        run = self.output
        output = CallbackOutput(run.out, run.tracker, self.label, run.save_artifact, run.say)
        every = self.settings.numerics_every
        if every is not None:
            callbacks.append(NumericsCallback(state, every, output))
        handle = RunHandle("", state, output)
        return StepRecords(state, callbacks, handle, self.settings.log_every)

    def add_evaluation(self, record: EvalRecord) -> None:
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
        # The runner's own callbacks read the quality in each record, and one of several validation
        # sets may have none.
        if quality in record.metrics:
            self.records.add_evaluation(record)
        else:
            self.output.tracker.log_metrics([(record.step, record.time_ms, record.metrics)])
            self.records.restart_clock()

    def finish(self, status: Status, error: str, seconds: float) -> RunResult:
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
            precision=self.precision,
            label=self.label,
            folder=str(self.place.folder),
            status=status,
            error=redact(error),
            group=self.label,
            seed=source.seed,
            model=type(source.model).__name__,
            device=source.accelerator.name,
            device_type=source.accelerator.device.type,
            quality=self.settings.quality,
            direction=self.settings.direction,
            planned_steps=source.planned_steps,
            peak_memory_mib=source.accelerator.peak_memory_mib(),
            weights_mib=stored_bytes(source.model) / MIB,
            plain_weights_mib=float32_bytes(source.model) / MIB,
            seconds=seconds,
            tracking_uri=redact(getattr(self.output.tracker, "uri", "")) or None,
            experiment=getattr(self.output.tracker, "experiment", ""),
            **values,
        )
        return self._close(result)

    def add_late_evaluation(self, record: EvalRecord, result: RunResult) -> RunResult:
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
        earlier = latest_journal(folder)
        info = RunInfo(folder, name=self.label, sweep=self.place.sweep, continues=earlier)
        self.output.tracker.open(info)
        self.output.tracker.log_metrics([(record.step, record.time_ms, record.metrics)])
        return self._close(replace(result, metrics=self.metrics))

    def _close(self, result: RunResult) -> RunResult:
        """Write and upload the result, close the run, and return the result with its place."""
        command = quote_command(process_command())
        status = _STATUS[result.status]
        result.log_cost(self.output.tracker)
        path = self.place.folder / RESULT
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
        except TrackingError as refusal:
            self.output.say(f"warning: {refusal}")
        result = result.with_store_ids(self.output.tracker)
        with suppress(OSError):
            result.write(self.place.folder)
        return result
