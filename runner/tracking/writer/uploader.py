"""Upload one journal to one run of the store, batch by batch.

Runs in the writer process; third and fourth stage of the way that runner/tracking/__init__.py
describes. writer_main.py calls `advance` in a loop and decides what a failed call means.
"""

import math
import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runner.core import files, fmt, journals, layout, secrets
from runner.tracking import history
from runner.tracking.dashboard import SweepView
from runner.tracking.upload_state import UploadState, journal_store
from runner.tracking.uri import RefusedError, UnreachableError
from runner.tracking.writer.store import MAX_POINTS, MetricPoint, Store, open_store
from runner.tracking.writer.system_metrics import SystemMetrics

PARTIAL_BATCH_SECONDS = 1.0
"""Seconds that points wait for a full batch before they are sent in a smaller one."""
PARENT_WAIT_SECONDS = 15.0
"""Seconds that a sweep's job waits for the sweep's parent run, which another process opens."""
_NO_END_ERROR = "The training process ended without closing its run."


@dataclass
class Batch:
    """Records of one kind that are sent together.

    Attributes:
        kind: of the records.
        record: the first of them.
        end: the offset in bytes after them in the journal.
        points: of metric records.
        is_complete: no later record would be added to it.
    """

    kind: str
    record: dict[str, Any]
    end: int
    points: list[MetricPoint] = field(default_factory=list)
    is_complete: bool = True


def next_batch(path: Path, offset: int, earlier_steps: Mapping[str, int] = {}) -> Batch | None:
    """Return the batch at an offset: one record, or as many metric records as fit into one call.

    Args:
        path: of the journal.
        offset: in bytes.
        earlier_steps: last step of each metric in the run's earlier journals; points up to it are
            left out.

    Returns:
        None at the end of the journal.
    """
    batch: Batch | None = None
    for record, end in journals.read_records(path, offset):
        kind = record["kind"]
        if batch is None:
            batch = Batch(kind, record, end)
            # Points alone are so many that calls must be saved.
            if kind != "metrics":
                return batch
            batch.is_complete = False
        elif kind != "metrics" or len(batch.points) + len(record["values"]) > MAX_POINTS:
            batch.is_complete = True
            return batch
        step = record["step"]
        time_ms = record["time"]
        values = journals.new_values(record, earlier_steps)
        batch.points += [(name, value, time_ms, step) for name, value in values.items()]
        batch.end = end
    return batch


class JournalUploader:
    """The upload of one journal.

    `advance` may raise RefusedError or UnreachableError. Nothing is lost then: it can be called
    again, or the batch can be skipped.

    Args:
        journal: its path.
    """

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.state = UploadState(journal)
        # Both are known once this writer has opened the run.
        self._store: Store
        self._run_id = ""
        self._batch: Batch | None = None
        self._start: dict[str, Any] = {}
        self._system: SystemMetrics | None = None
        self._history: Path | None = None
        self._earlier_steps: dict[str, int] = {}
        self._status_is_set = False
        self._sent_at = 0.0
        self._parent_wanted_at: float | None = None
        self._full_batch_bytes = math.inf

    @property
    def backlog(self) -> float:
        """Return how many full batches of points wait in the journal."""
        try:
            size = self.journal.stat().st_size
        except FileNotFoundError:
            return 0.0
        return (size - self.state.offset) / self._full_batch_bytes

    @property
    def is_unopened(self) -> bool:
        """Return whether the run is not in the store yet."""
        return not self._run_id

    @property
    def must_retry(self) -> bool:
        """Return whether the next batch may be skipped only after a clear refusal.

        That holds for points, the run's status and the run itself.
        """
        kind = self._batch.kind if self._batch else "end"
        sets_status = kind == "end" and not self._status_is_set
        return self.is_unopened or kind == "metrics" or sets_status

    def is_answered(self) -> bool:
        """Return whether the store shows the run, so that it has refused the batch alone."""
        with suppress(RefusedError, UnreachableError):
            return bool(self._store.run_name(self._run_id))
        return False

    def advance(self, last: bool) -> bool:
        """Send one batch, if one is due.

        Args:
            last: no process writes to the journal any more.

        Returns:
            Whether there may be more to do at once.
        """
        self._claim()
        if self.state.done:  # another writer has uploaded the rest
            return False
        if self.state.run_id and self.is_unopened:
            # Another writer has begun the upload.
            start = self._with_moved_store(next(journals.read_records(self.journal))[0])
            self._store = open_store(start["uri"])
            self._on_opened(start)
        batch = next_batch(self.journal, self.state.offset, self._earlier_steps)
        self._batch = batch
        if batch is None:
            if last:
                # A journal without an end is of a killed process; its last record is the last sign
                # of life.
                ended_ms = self.journal.stat().st_mtime_ns // 1_000_000
                self._end({"status": "KILLED", "error": _NO_END_ERROR, "time": ended_ms})
            return False
        waited = time.monotonic() - self._sent_at
        if not (batch.is_complete or last or waited > PARTIAL_BATCH_SECONDS):
            return False
        self._send(batch)
        self._sent_at = time.monotonic()
        if batch.kind == "metrics" and batch.is_complete:
            self._full_batch_bytes = batch.end - self.state.offset
        # The store has answered: a writer that dies before this line sends the batch again.
        self.state.save(offset=batch.end, sending_file=False)
        return not self.state.done

    def skip(self) -> None:
        """Skip the batch that the store has refused."""
        batch = self._batch
        # Without a batch, the store has refused the status of a killed run.
        if batch is None:
            self.state.save(done=True)
        else:
            self.state.save(offset=batch.end, done=batch.kind == "end", sending_file=False)

    def upload_rest(self) -> None:
        """Upload the unsent records of a journal to which no process writes any more.

        Raises:
            UnreachableError: the store does not answer, or another writer is uploading it.
        """
        if not self.state.acquire_lock():
            raise UnreachableError("another writer is still uploading the run's earlier journal")
        while not self.state.done:
            try:
                self.advance(last=True)
            except RefusedError as error:
                if error.of_store:
                    raise
                if self.is_unopened:
                    return
                self.skip()

    def log_system_metrics(self) -> None:
        """Log a sample of the machine's load if one is due; a failed one is not repeated."""
        seconds, trainer = self._start.get("system_metrics"), self._start.get("process")
        if self.is_unopened or self.state.done or not (seconds and trainer):
            return
        if self._system is None:
            self._system = SystemMetrics(seconds, trainer, time.monotonic())
            # A resumed run continues the steps of its samples.
            with suppress(RefusedError, UnreachableError):
                self._system.count = self._store.system_sample_count(self._run_id)
        if self._system.is_due(time.monotonic()):
            now = fmt.now_ms()
            number = self._system.count
            points = [(name, value, now, number) for name, value in self._system.sample().items()]
            with suppress(RefusedError, UnreachableError):
                self._store.log_points(self._run_id, points)

    def _claim(self) -> None:
        """Lock the journal; read its start again if another writer was at work since."""
        # The lock is held between calls, except where the trainer has ended and the store does not
        # answer: `runner sync` may have uploaded the journal meanwhile.
        if self.state.has_lock:
            return
        known = self.state.as_dict()
        if not self.state.acquire_lock():
            raise UnreachableError("another writer is still at work on this journal")
        if self.state.as_dict() != known:
            self._run_id = ""
            self._history = None
            self._status_is_set = False

    def _send(self, batch: Batch) -> None:
        record = batch.record
        if batch.kind == "start":
            self._open(self._with_moved_store(record))
            return
        if self.is_unopened:
            raise RefusedError(f"{self.journal} does not begin with the start of a run")
        # Another kind is a damaged line, or of a later version, and skipped.
        match batch.kind:
            case "metrics":
                # Here, not in the trainer, so that the training loop need not wait for the disk.
                with self.journal.open("rb") as file, suppress(OSError):
                    # A disk that fails must not keep points from the store.
                    os.fsync(file)
                self._store.log_points(self._run_id, batch.points)
            case "tags":
                self._store.log_tags(self._run_id, record["values"])
            case "artifact":
                self._send_file(artifact_file(self.journal, record["path"]), record["folder"])
            case "inputs":
                self._store.log_inputs(self._run_id, record["datasets"])
            case "model":
                self.state.save(sending_file=True)
                folder = artifact_file(self.journal, record["folder"])
                self._store.log_model(self._run_id, folder, record["facts"], record["register"])
            case "end":
                self._end(record)

    def _send_file(self, path: Path, folder: str = "") -> None:
        self.state.save(sending_file=True)
        self._store.log_artifact(self._run_id, path, folder)

    def _open(self, start: dict[str, Any]) -> None:
        """Create the run, or find the one that an earlier attempt may have created."""
        store = self._store = open_store(start["uri"])
        before = journals.previous_journal(self.journal, start)
        if before and self._resume_run(before, start):
            self._on_opened(start)
            return
        experiment = store.experiment(start["experiment"], start.get("experiment_id"))
        tags = {**start["tags"], journals.JOURNAL_TAG: start["id"]}
        if start["sweep"] and start["role"] == "run":
            parent = self._find_parent(start)
            if parent:
                tags["mlflow.parentRunId"] = parent
        # An attempt whose answer got lost may have created the run: look it up by the journal's
        # id before creating another one.
        mark = {journals.JOURNAL_TAG: start["id"]}
        run_id = store.find_run(experiment, mark) if self.state.tried else None
        # Saved before the call: a writer that is killed during it must leave a trace.
        self.state.save(tried=True)
        if run_id is None:
            run_id = store.create_run(experiment, start["name"], start["time"], tags)
        store.log_params(run_id, start["params"])
        self.state.save(run_id=run_id, experiment_id=experiment, refused=False)
        self._on_opened(start)

    def _resume_run(self, before: Path, start: dict[str, Any]) -> bool:
        """Reopen the run of an earlier journal, once that journal is fully uploaded.

        Returns:
            False if the earlier journal never became a run.
        """
        # The store of this journal is the user's; that of an earlier one may be a stranger's.
        store = journal_store(before)
        if store and store.uri != start["uri"] and not store.is_users:
            uri = secrets.redact(store.uri)
            text = f"{before} names {uri}, which is not signed with this user's key"
            raise RefusedError(text, of_store=True)
        earlier = JournalUploader(before)
        try:
            earlier.upload_rest()
        finally:
            earlier.state.release_lock()
        if earlier.state.run_id is None:
            return False
        self._store.reopen(earlier.state.run_id, start)
        self.state.save(run_id=earlier.state.run_id, experiment_id=earlier.state.experiment_id)
        return True

    def _with_moved_store(self, start: dict[str, Any]) -> dict[str, Any]:
        """Return the start record with the store to which `runner sync` has moved the journal."""
        if self.state.uri is None:
            return start
        name = self.state.experiment or start["experiment"]
        # Experiment ids belong to one store.
        return {**start, "uri": self.state.uri, "experiment": name, "experiment_id": None}

    def _on_opened(self, start: dict[str, Any]) -> None:
        """Store what later batches need of the opened run, and set up its dashboard."""
        assert self.state.run_id is not None
        self._start = start
        self._run_id = self.state.run_id
        # A resumed run computes some steps again, and MLflow cannot take points back.
        self._earlier_steps = last_steps(journals.run_journals(self.journal)[:-1])
        if start["role"] == "sweep" and start["sweep"]:
            self._store.parents[start["sweep"]] = self._run_id
        self._ensure_dashboard()

    def _ensure_dashboard(self, metrics: Collection[str] = ()) -> None:
        """Set up the dashboards that show this run, and save the path of its sweep's. May fail."""
        store = self._store
        while store.notices:
            self.state.add_notice(store.notices.pop(0))
        sweep_id = self._start["sweep"]
        parent = store.parents.get(sweep_id)
        experiment = self.state.experiment_id
        # A run that belongs to no sweep has its own page alone.
        if not parent or not experiment:
            return
        is_parent = self._start["role"] == "sweep"
        name = secrets.redact(self._start["name"] or "") if is_parent else ""
        swept = str(self._start.get("tags", {}).get("swept", ""))
        view = SweepView(sweep_id, parent, name, swept.split())
        path = store.dashboard(experiment, metrics, view)
        if path is not None:
            self.state.save(dashboard=path)

    def _find_parent(self, start: dict[str, Any]) -> str | None:
        """Return the id of the sweep's parent run, which another process may open a little later.

        Raises:
            UnreachableError: it is not there yet.
        """
        store = self._store
        known = store.parents.get(start["sweep"])
        if known:
            return known
        experiment = store.experiment(start["experiment"], start.get("experiment_id"))
        parent = store.find_run(experiment, {"sweep_id": start["sweep"], "role": "sweep"})
        if parent:
            store.parents[start["sweep"]] = parent
            return parent
        now = time.monotonic()
        self._parent_wanted_at = self._parent_wanted_at or now
        if now - self._parent_wanted_at < PARENT_WAIT_SECONDS:
            raise UnreachableError(f"the parent run of sweep {start['sweep']} is not there yet")
        text = f"The sweep {start['sweep']} has no parent run; this run stands alone."
        self.state.save_error(text)
        return None

    def _end(self, record: dict[str, Any]) -> None:
        """Set the run's status, then upload its history."""
        if not self.is_unopened:
            if record["error"]:
                self._store.log_tags(self._run_id, {"error": record["error"]})
            # The status first: no artifact may keep the run from it.
            self._store.end_run(self._run_id, record["status"], record["time"])
            self._status_is_set = True
            if self._start["role"] == "run":
                self._upload_history()
        self.state.save(done=True)

    def _upload_history(self) -> None:
        """Upload every metric exactly as it was recorded, for reports.

        The store itself has the greatest float in place of infinity.
        """
        # Made once, not for each attempt of a call that fails.
        if self._history is None:
            curves = history.from_journal(self.journal)
            if not curves:
                return
            # Again, because only now the metrics are known, which decide about the charts. A loss
            # scale that does not change needs none.
            scales = [name for name in curves if name.startswith("loss_scale/")]
            constant = {name for name in scales if np.ptp(curves[name][2]) == 0}
            self._ensure_dashboard(curves.keys() - constant)
            self._history = history.write_history(self.journal.with_name(layout.HISTORY), curves)
        self._send_file(self._history)


def artifact_file(journal: Path, name: str) -> Path:
    """Return the path of a file or folder that a journal names.

    Raises:
        RefusedError: the file is not in the run's folder, or is a link that leads out of it.
    """
    path = Path(name)
    run_folder = journal.parent.resolve()
    # A journal may come from anybody, and must not have other files of the user's uploaded. Each
    # file of a folder is checked, because any of them may be a link.
    if files.link_out_of(run_folder, path):
        raise RefusedError(f"{path} is not in the run's folder, {run_folder}")
    return path


def last_steps(paths: Iterable[Path]) -> dict[str, int]:
    """Return the last step of each metric in some journals."""
    last: dict[str, int] = {}
    for path in paths:
        for record, _ in journals.read_records(path):
            if record["kind"] == "metrics":
                step = record["step"]
                for name in record["values"]:
                    last[name] = max(step, last.get(name, step))
    return last
