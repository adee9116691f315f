"""Record a training that another trainer runs, in the form of the runner's own runs.

A trainer's own module (transformers.py, lightning.py, accelerate.py) reads the steps and calls a
Recorder. The run opens when its first step has ended: only then it is known which precision ran.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from runner.diagnostics.dtype_trace import DtypeProbe
from runner.integrations.open_run import OpenRun, new_tracker, say
from runner.integrations.options import RecordSettings
from runner.integrations.precision_label import StepDtypes, step_dtypes, substitution_text
from runner.integrations.run_files import process_command
from runner.integrations.run_place import choose_place
from runner.integrations.training_source import TrainingSource
from runner.modes.result import RunResult, Status
from runner.modes.tables import page_url, ui_command
from runner.training.records import DeviceStepRecord, EvalRecord
from runner.utils.accelerator import Accelerator
from runner.utils.formatting import format_number, now_ms, relative_path
from runner.utils.terminal import quote_command


class Recorder:
    """The record of one training, from its begin to its end.

    Args:
        source: the training.
        settings: of the callback.

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
        # First: a store that does not exist is refused before anything is trained.
        self._tracker = new_tracker(settings)
        self.place = choose_place(settings, source.start_step, process_command())
        self._started_at = time.perf_counter()
        self._probe: DtypeProbe | None = None
        self._run: OpenRun | None = None
        self._early_evaluations: list[EvalRecord] = []
        self._result: RunResult | None = None
        # Runs of one process have a memory peak of their own each.
        Accelerator(source.device).reset_peak_memory()

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        return self.place.folder

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Watch the dtypes of the first forward and backward; later calls watch nothing."""
        if self._probe is not None:
            yield
            return
        self._probe = DtypeProbe(self.source.model)
        with self._probe:
            yield

    def add_step(self, record: DeviceStepRecord) -> None:
        """Record a step that has ended."""
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

    def finish(self, status: Status, error: str = "") -> None:
        """End the run; a second call does nothing.

        Args:
            status: how the training ended.
            error: why, of one that did not finish.
        """
        if self._result is not None:
            return
        if self._run is None:
            self._run = self._open()
        seconds = time.perf_counter() - self._started_at
        self._result = self._run.finish(status, error, seconds)
        self._say_result(self._result)

    def _open(self) -> OpenRun:
        """Open the run in the store, and say what the trainer replaced silently."""
        rows = self._probe.table() if self._probe else []
        scaler = self.source.scaler
        has_scale = scaler is not None and scaler.is_enabled()
        request = self.source.request
        dtypes = step_dtypes(rows, self.source.model, has_scale, request)
        run = OpenRun(self.source, self.settings, self.place, dtypes, self._tracker)
        run.save_dtypes(rows)
        for record in self._early_evaluations:
            run.add_evaluation(record)
        text = substitution_text(request, dtypes)
        say(f"recording {run.label} in {relative_path(self.folder)}{_unobserved_clause(dtypes)}")
        if text:
            say(f"warning: {text}")
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
        say(f"recorded {result.label}: {result.outcome}, {result.steps} steps{scale}{error}")
        if result.run_id:
            command = ui_command(result.tracking_uri, result.experiment)
            say(f"MLflow: run {result.run_id}; to see it: {command}")
        if result.dashboard:
            say(f"dashboard: {page_url(result.tracking_uri, result.dashboard)}")
        if self.place.sweep:
            report = ["python", "-m", "runner", "report", relative_path(self.folder.parent)]
            say(f"report of the group: {quote_command(report)}")


def _unobserved_clause(dtypes: StepDtypes) -> str:
    """Return a clause for a model whose dtypes cannot be watched; empty for any other."""
    if dtypes.is_observed:
        return ""
    return (
        "; its dtypes were not seen (a compiled model, FP8, no step), so this is what was asked for"
    )
