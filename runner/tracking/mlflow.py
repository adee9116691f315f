"""tracking=mlflow: a journal in the run's folder, carried to MLflow by a process of its own.

This module does not import mlflow; only the writer process does.
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

from runner.config.signature import sign
from runner.tracking import dashboard
from runner.tracking.journal import Journal
from runner.tracking.journal_status import JournalStatus
from runner.tracking.tracker import NOTE_TAG, MetricRecord, RunInfo, Status, StopRequested, Tracker
from runner.tracking.upload_state import SIGNED
from runner.tracking.uri import resolve_experiment, resolve_experiment_id, resolve_uri
from runner.tracking.writer_process import WriterProcess, shared_writer
from runner.utils.errors import ConfigError, TrackingError
from runner.utils.secrets import redact, redact_values
from runner.utils.terminal import quote_command

log = logging.getLogger(__name__)

SOON = 120.0
"""Seconds in which a refusal stops a run; later too much work would be lost."""
ROOM_SECONDS = 10.0
"""What the end of a run waits for room on a full disk, at most."""


@final
class MlflowTracker(Tracker):
    """Carries one run to an MLflow store.

    Args:
        uri: the store; None takes MLFLOW_TRACKING_URI, then sqlite:///outputs/mlflow.db.
        experiment: None takes MLFLOW_EXPERIMENT_NAME or _ID, then "precision-runner". Where one
            of this name was deleted in the store, runs go to "<name> 2" with one notice; one that
            MLFLOW_EXPERIMENT_ID names is refused, with the command that restores it.
        run_name: None lets RunInfo, then MLflow, choose.
        tags: added to each run's own.
        sweep: id of a sweep that was begun elsewhere; the run joins it.
        log_model: store the trained model as an MLflow model, too.
        register: name in MLflow's model registry under which it becomes a new version.
        system_metrics: seconds between samples of the machine's load; None takes none.
        patience: seconds that the end of a run waits for a store that does not answer.

    Raises:
        ConfigError: for a URI that no installed MLflow store can serve, for system_metrics that
            are no positive number, for a negative patience.
    """

    def __init__(
        self,
        uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
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
        self.uri = resolve_uri(uri, os.environ, Path.cwd())
        self.experiment = resolve_experiment(experiment, os.environ)
        self.experiment_of_env = resolve_experiment_id(experiment, uri, os.environ, Path.cwd())
        self.run_name, self.extra_tags, self.sweep = run_name, redact_values(tags or {}), sweep
        self.log_model, self.register = log_model, register
        self.system_metrics, self.patience = system_metrics, patience
        self._journal: Journal | None = None
        self._followed: JournalStatus | None = None
        self._writer: WriterProcess | None = None
        self._closed = self._complete = self._told = False
        self._opened_at = 0.0

    def open(self, info: RunInfo) -> None:
        if clash := sorted(self.extra_tags.keys() & {*info.tags, "sweep_id", "role"}):
            raise ConfigError(
                f"tracking.tags.{clash[0]} is a tag that the runner sets itself. Type another "
                f"name, for example tracking.tags.my_{clash[0]}=..."
            )
        self._journal = Journal(info.folder)
        self._journal.append("start", **self._start(info))
        self._opened_at = time.monotonic()
        self._writer = shared_writer()
        self._followed = self._writer.follow(self._journal.path)

    def metrics(self, step: int, time_ms: int, values: Mapping[str, float]) -> None:
        self._open_journal().metrics([(step, time_ms, values)])

    def metrics_many(self, records: Iterable[MetricRecord]) -> None:
        self._open_journal().metrics(records)

    def tags(self, values: Mapping[str, str]) -> None:
        self._open_journal().append("tags", values=_texts(values))

    def artifact(self, path: Path, folder: str = "") -> None:
        self._open_journal().append("artifact", path=str(path.absolute()), folder=folder)

    def note(self, markdown: str) -> None:
        self._open_journal().append("tags", values={NOTE_TAG: markdown})

    def inputs(self, datasets: Sequence[Mapping[str, Any]]) -> None:
        self._open_journal().append("inputs", datasets=list(datasets))

    def model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._open_journal().append(
            "model", folder=str(folder.absolute()), facts=facts, register=self.register
        )

    def check_sweep(self) -> None:
        if self.sweep is None:
            return
        from runner.tracking.reader import Reader

        if Reader(self.uri).sweep(self.sweep) is None:
            raise ConfigError(
                f"tracking.sweep={self.sweep}: there is no such sweep in {redact(self.uri)}. Type "
                "the id that the sweep's report and parent run show, and tracking.uri=<its store>."
            )

    @property
    def takes_runs(self) -> bool:
        return True

    @property
    def takes_models(self) -> bool:
        return self.log_model or self.register is not None

    def check(self) -> None:
        if not (self._followed and self._followed.refused):
            return
        if self._closed or time.monotonic() - self._opened_at < SOON:
            self._told = True
            raise TrackingError(self._trouble(self._followed.refused))
        if not self._told:
            self._told = True
            log.warning("%s Training goes on.", self._trouble(self._followed.refused))

    def close(
        self, status: Status, error: str | None = None, stopped: StopRequested = lambda: False
    ) -> None:
        if self._closed or not (self._journal and self._followed and self._writer):
            return
        self._closed = True
        hurry = status == "KILLED"
        room = 1.0 if hurry else min(ROOM_SECONDS, self.patience)
        self._journal.end(room, status=status, error=error, time=_now())
        self._journal.close()
        self._complete = self._journal.ended and self._writer.wait(
            self._followed, self.patience, lambda: hurry or stopped(), redact(self.uri)
        )
        self._tell(status)

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def run_id(self) -> str | None:
        return self._followed.run_id if self._followed else None

    @property
    def experiment_id(self) -> str | None:
        return self._followed.experiment_id if self._followed else None

    @property
    def dashboard(self) -> str | None:
        return self._followed.dashboard if self._followed else None

    def url(self, timeout: float = 10.0) -> str | None:
        if not self._followed or not self.uri.startswith("http"):
            return None
        self._followed.opened.wait(timeout)
        if not self.run_id:
            return None
        return f"{redact(self.uri)}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    def _open_journal(self) -> Journal:
        if self._journal is None or self._closed:
            raise TrackingError("The tracker is not open: call open before, close after records.")
        return self._journal

    def _start(self, info: RunInfo) -> dict[str, object]:
        """The start record: all that the writer needs to know about the run."""
        sweep_id = self.sweep or info.sweep
        sweep = {"sweep_id": sweep_id, "role": info.role} if sweep_id else {}
        if sweep_id and info.folder.name.isdigit():
            sweep["mlflow.runColor"] = dashboard.run_color(int(info.folder.name))
        return {
            "id": uuid.uuid4().hex,
            "time": _now(),
            "uri": self.uri,
            "signature": sign(SIGNED, self.uri),
            "experiment": self.experiment,
            "experiment_id": self.experiment_of_env,
            "name": redact(self.run_name or info.name or "") or None,
            "params": _texts(info.params),
            "tags": _texts({**_source(info.tags), **self.extra_tags, **info.tags, **sweep}),
            "sweep": sweep_id,
            "role": info.role,
            "continues": str(info.continues.absolute()) if info.continues else None,
            "step": info.step,
            "changes": dict(info.changes),
            "system_metrics": self.system_metrics if info.role == "run" else None,
            "process": os.getpid(),
        }

    def _tell(self, status: Status) -> None:
        """Says what is missing once the run is closed, unless check has said or will say it."""
        assert self._journal is not None
        assert self._followed is not None
        if self._journal.lost:
            log.warning(
                "%d records are lost: %s was full, and so was the memory that they could have.",
                self._journal.lost,
                self._journal.path,
            )
        for_check = self._followed.refused and status == "FINISHED"
        if not (self._complete or self._told or for_check):
            trouble = self._followed.refused or self._followed.away or self._followed.trouble
            log.warning(self._trouble(trouble or "the time to wait for it is over"))

    def _trouble(self, reason: str) -> str:
        path = self._journal.path if self._journal else Path()
        kept = f"Its records are kept in {path}: `python -m runner sync {_relative(path.parent)}`"
        if self._followed and self._followed.refused:
            return (
                f"{redact(self.uri)} does not take the run: {reason}. {kept} sends them once that "
                "is mended, with tracking.uri=... to another store. To store nothing type "
                "tracking=none."
            )
        return (
            f"The run is not stored completely in {redact(self.uri)}: {reason}. {kept} sends what "
            "a process in the background does not bring there in the next five minutes."
        )


def _source(tags: Mapping[str, str]) -> dict[str, str]:
    """MLflow's own tags, which its client sets only through the fluent interface."""
    script = Path(sys.argv[0])
    source = {
        "mlflow.source.name": script.parent.name if script.stem == "__main__" else script.name,
        "mlflow.source.type": "LOCAL",
        "mlflow.user": _user(),
    }
    if commit := tags.get("git_commit"):
        source["mlflow.source.git.commit"] = commit
    return source


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return str(os.getuid())


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}


def _now() -> int:
    return time.time_ns() // 1_000_000


def _relative(folder: Path) -> str:
    """The shortest name of a folder here, as a shell takes it."""
    here = Path.cwd()
    return quote_command([str(folder.relative_to(here) if folder.is_relative_to(here) else folder)])
