"""tracking=mlflow: append a run's record to a journal, which the writer process uploads to MLflow.

First stage of the way that runner/tracking/__init__.py describes. This module does not import
mlflow: the import takes longer than torch's, and a call would block the training loop.
"""

import getpass
import logging
import os
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from runner.core import (
    ConfigError,
    RunInfo,
    Tracker,
    errors,
    fmt,
    journals,
    run_result,
    secrets,
    signature,
    terminal,
)
from runner.tracking import dashboard
from runner.tracking.notes import page_note
from runner.tracking.upload_state import (
    STORE_SIGNATURE_PURPOSE,
    JournalStatus,
    UploadState,
    read_state,
)
from runner.tracking.uri import check_store, resolve_experiment, resolve_experiment_id, resolve_uri
from runner.tracking.writer_process import WriterProcess, shared_writer

log = logging.getLogger(__name__)

REFUSAL_STOP_SECONDS = 120.0
"""Seconds from a run's start in which a refusal by the store stops it.

Later, too much work would be lost.
"""
CHECK_SECONDS = 0.5
"""Seconds between readings of the state file, so that `check` costs a training step nothing."""
DISK_WAIT_SECONDS = 10.0
"""Upper bound on waiting, at the end of a run, until a full disk has room."""


@final
class MlflowTracker(Tracker):
    """The record of one run, uploaded to an MLflow store.

    Args:
        uri: the store; None takes MLFLOW_TRACKING_URI, then sqlite:///outputs/mlflow.db.
        experiment: None takes MLFLOW_EXPERIMENT_NAME or _ID, then "precision-runner". If an
            experiment of this name was deleted in the store, runs go to "<name> 2", with one
            notice; a deleted one that MLFLOW_EXPERIMENT_ID names is refused, with the command
            that restores it.
        run_name: None lets RunInfo, then MLflow, choose.
        tags: added to each run's own; a mapping in it makes dotted names.
        note: a text that begins the description of every run.
        sweep: id of a sweep that was started elsewhere; the run joins it.
        log_model: store the trained model as an MLflow model, too.
        register: name in MLflow's model registry under which the model becomes a new version.
        system_metrics: seconds between samples of the machine's load; None samples nothing.
        patience: seconds that the end of a run waits for a store that does not answer.

    Raises:
        ConfigError: for a URI that no installed MLflow store can serve, for system_metrics that
            are not positive, for a negative patience.
    """

    takes_runs = True

    # The parameters are keys of conf/tracking/mlflow.yaml.
    def __init__(  # noqa: PLR0913
        self,
        uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        note: str | None = None,
        sweep: str | None = None,
        log_model: bool = True,
        register: str | None = None,
        system_metrics: float | None = 10.0,
        patience: float = 60.0,
    ) -> None:
        if not patience >= 0:
            raise ConfigError(
                f"tracking.patience={patience}: it is in seconds, 0 or more. Type for example "
                "tracking.patience=60."
            )
        if system_metrics is not None and not system_metrics > 0:
            raise ConfigError(
                f"tracking.system_metrics={system_metrics}: samples are seconds apart, more than "
                "0. Type for example tracking.system_metrics=10, or null for none."
            )
        self.uri = resolve_uri(uri)
        self.experiment = resolve_experiment(experiment)
        self.experiment_of_env = resolve_experiment_id(experiment, uri)
        self.run_name = run_name
        # Hydra reads the dots of tracking.tags.ci.job=4711 as levels of a mapping.
        named = {name: value for name, value in fmt.leaves(tags or {}) if value != {}}
        self.extra_tags = secrets.redact_values(named)
        # The runner's own text would replace a tag with the note.
        noted = self.extra_tags.pop(journals.NOTE_TAG, None)
        self.own_note = secrets.redact(note or noted or "")
        self.sweep = sweep
        self.takes_models = log_model or register is not None
        self.register = register
        self.system_metrics = system_metrics
        self.patience = patience
        self._journal: journals.Journal | None = None
        self._status: JournalStatus | None = None
        self._writer: WriterProcess | None = None
        self._closed = False
        self.complete = False
        self._refusal_reported = False
        self._opened_at = 0.0
        self._next_check_at = 0.0

    def open(self, info: RunInfo) -> None:
        reserved = {*info.tags, "sweep_id", "role"}
        clashes = sorted(self.extra_tags.keys() & reserved)
        if clashes:
            name = clashes[0]
            raise ConfigError(
                f"tracking.tags.{name} is a tag that the runner sets itself. Type another "
                f"name, for example tracking.tags.my_{name}=..."
            )
        self._journal = journals.Journal(info.folder)
        self._journal.append("start", **self._start_record(info))
        self._opened_at = time.monotonic()
        self._status = JournalStatus(self._journal.path)
        self._writer = shared_writer()
        self._writer.add_journal(self._journal.path)

    def log_metrics(self, records: Iterable[journals.MetricRecord]) -> None:
        self._open_journal().append_metrics(records)

    def tags(self, values: Mapping[str, str]) -> None:
        self._open_journal().append("tags", values=_texts(values))

    def artifact(self, path: Path, folder: str = "") -> None:
        self._open_journal().append("artifact", path=str(path.absolute()), folder=folder)

    def note(self, markdown: str) -> None:
        text = f"{self.own_note}\n\n{markdown}" if self.own_note else markdown
        self._open_journal().append("tags", values={journals.NOTE_TAG: text})

    def describe(self, page: run_result.RunPage) -> None:
        self.note(page_note(page))

    def stored_id(self, journal: Path) -> str | None:
        return read_state(journal).run_id

    def inputs(self, datasets: Sequence[Mapping[str, Any]]) -> None:
        self._open_journal().append("inputs", datasets=list(datasets))

    def model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._open_journal().append(
            "model", folder=str(folder.absolute()), facts=facts, register=self.register
        )

    def check_store(self) -> None:
        check_store(self.uri)
        if self.sweep is None:
            return
        # Imported here, because it imports mlflow, which few runs need in this process.
        from runner.tracking.reader import Reader

        if Reader(self.uri).sweep(self.sweep) is None:
            raise ConfigError(
                f"tracking.sweep={self.sweep}: there is no such sweep in "
                f"{secrets.redact(self.uri)}. Type "
                "the id that the sweep's report and parent run show, and tracking.uri=<its store>."
            )

    def check(self) -> None:
        if not (self._status and self._writer):
            return
        now = time.monotonic()
        if not self._closed:
            if now < self._next_check_at:
                return
            self._next_check_at = now + CHECK_SECONDS
            self._writer.keep_alive()
            self._status.refresh()
            self._status.warn()
        refusal = self._status.state.refusal
        if refusal is None:
            return
        is_first_report = not self._refusal_reported
        self._refusal_reported = True
        seconds = now - self._opened_at
        # After close nothing is lost by an error, and the run's exit status shows it.
        if self._closed or seconds < REFUSAL_STOP_SECONDS:
            raise errors.TrackingError(self._explain(refusal))
        if is_first_report:
            log.warning("%s Training continues.", self._explain(refusal))

    def close(
        self,
        status: journals.Status,
        error: str | None = None,
        stopped: journals.StopRequested = lambda: False,
    ) -> None:
        if self._closed or not (self._journal and self._status and self._writer):
            return
        self._closed = True
        # A run that is killed has a few seconds left, and a checkpoint to finish in them.
        killed = status == "KILLED"
        disk_seconds = 1.0 if killed else min(DISK_WAIT_SECONDS, self.patience)
        self._journal.append_end(disk_seconds, status=status, error=error, time=fmt.now_ms())
        self._journal.close()
        # Without its end in the journal the upload never ends, and waiting for it is in vain.
        if self._journal.has_end:
            self.complete = self._status.wait(
                self.patience,
                lambda: killed or stopped(),
                secrets.redact(self.uri),
                self._writer.keep_alive,
            )
        if killed or stopped():
            self._writer.request_stop()
        self._warn_of_missing(status)

    @property
    def run_id(self) -> str | None:
        return self._state().run_id

    @property
    def experiment_id(self) -> str | None:
        return self._state().experiment_id

    @property
    def dashboard(self) -> str | None:
        return self._state().dashboard

    def _state(self) -> UploadState:
        """Return the state of the upload as it is now; an empty one before the run is open."""
        if self._status is None:
            return UploadState(Path("journal"))
        self._status.refresh()
        return self._status.state

    def _open_journal(self) -> journals.Journal:
        if self._journal is None or self._closed:
            raise errors.TrackingError(
                "The tracker is not open: call open before, close after records."
            )
        return self._journal

    def _start_record(self, info: RunInfo) -> dict[str, object]:
        """Return the journal's first record: all that the writer needs to know about the run."""
        sweep_id = self.sweep or info.sweep
        sweep = {}
        color = {}
        if sweep_id:
            sweep = {"sweep_id": sweep_id, "role": info.role}
            # A sweep's jobs have folders with numbers as names.
            if info.folder.name.isdigit():
                color = {"mlflow.runColor": dashboard.run_color(int(info.folder.name))}
        # A job of a sweep is nested under the sweep's parent run.
        if info.role == "sweep" or not sweep_id:
            sweep |= _parent_tag(self.uri)
        # A user's tags replace ours of the source; those that the runner relies on replace both.
        tags = {**_source_tags(info.tags), **self.extra_tags, **info.tags, **sweep, **color}
        return {
            "id": uuid.uuid4().hex,
            "time": fmt.now_ms(),
            "uri": self.uri,
            "signature": signature.sign(STORE_SIGNATURE_PURPOSE, self.uri),
            "experiment": self.experiment,
            "experiment_id": self.experiment_of_env,
            "name": secrets.redact(self.run_name or info.name or "") or None,
            "params": _texts(info.params),
            "tags": _texts(tags),
            "sweep": sweep_id,
            "role": info.role,
            "continues": str(info.continues.absolute()) if info.continues else None,
            "step": info.step,
            "changes": dict(info.changes),
            "system_metrics": self.system_metrics if info.role == "run" else None,
            "process": os.getpid(),
        }

    def _warn_of_missing(self, status: journals.Status) -> None:
        """Warn of records that are not stored when the run is closed.

        A refusal that check has reported, or will report, is not repeated.
        """
        assert self._journal is not None
        assert self._status is not None
        assert self._writer is not None
        if self._journal.lost:
            log.warning(
                "%d records are lost: the disk of %s was full, and so was the memory for records "
                "that wait.",
                self._journal.lost,
                self._journal.path,
            )
        # The command of a finished run calls check once more, which raises the refusal.
        state = self._status.state
        check_follows = state.refusal and status == "FINISHED"
        if self.complete or self._refusal_reported or check_follows:
            return
        writer_failure = self._writer.keep_alive()
        reason = (
            state.refusal or state.failure or writer_failure or state.outage or state.first_error
        )
        log.warning(self._explain(reason or "the upload did not end in the time that a run waits"))

    def _explain(self, reason: str) -> str:
        """Return why records are missing in the store, and how to upload them."""
        assert self._status is not None
        path = self._status.journal
        command = (
            f"`python -m runner sync {terminal.quote_command([fmt.relative_path(path.parent)])}`"
        )
        if self._status.state.refusal:
            return (
                f"{secrets.redact(self.uri)} does not take the run: {reason}. Its records are kept "
                f"in {path}: {command} uploads them once that is fixed; with tracking.uri=... it "
                "uploads them to another store. To store nothing type tracking=none."
            )
        return (
            f"The run is not stored completely in {secrets.redact(self.uri)}: {reason}. Its "
            f"records are kept in {path}: {command} uploads what a process in the background does "
            "not upload in the next five minutes."
        )


def _source_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return MLflow's tags of a run's source."""
    # MLflow sets them in its fluent interface only, which the writer does not use.
    script = Path(sys.argv[0])
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, a user's id may have no name
        user = str(os.getuid())
    source = {
        # `python -m runner` has runner/__main__.py as its script.
        "mlflow.source.name": script.parent.name if script.stem == "__main__" else script.name,
        "mlflow.source.type": "LOCAL",
        "mlflow.user": user,
    }
    if tags.get("git_commit"):
        source["mlflow.source.git.commit"] = tags["git_commit"]
    return source


def _parent_tag(uri: str) -> dict[str, str]:
    """Return the tag that nests a run under the one that `mlflow run` has begun for it.

    Args:
        uri: the store of the run; `mlflow run` names its own in the environment.
    """
    parent = os.environ.get("MLFLOW_RUN_ID")
    parents_uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not parent or not parents_uri:
        return {}
    is_same_store = resolve_uri(parents_uri) == uri
    return {"mlflow.parentRunId": parent} if is_same_store else {}


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}
