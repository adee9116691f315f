"""One journal on its way to one run of the store. Runs in the writer process."""

import math
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.tracking import history
from runner.tracking import journal as journals
from runner.tracking.dashboard_views import SweepView
from runner.tracking.upload_state import UploadState
from runner.tracking.writer.batches import Batch, artifact_file, next_batch
from runner.tracking.writer.store import JOURNAL_TAG, Store
from runner.tracking.writer.store_cache import StoreCache
from runner.tracking.writer.store_errors import RefusedError, UnreachableError
from runner.tracking.writer.system_metrics import SystemMetrics
from runner.utils.layout import HISTORY
from runner.utils.secrets import redact

PARTIAL_SECONDS = 1.0
PARENT_SECONDS = 15.0
_NO_CLOSE = "The training process ended without closing its run."


class JournalUploader:
    """Carries a journal to its run, batch by batch.

    `advance` may raise RefusedError or UnreachableError. Then nothing is lost: it may be called
    again, or the batch skipped."""

    def __init__(self, journal: Path, stores: StoreCache, emit: Callable[..., None]) -> None:
        self.journal, self.progress = journal, UploadState(journal)
        self._stores, self._emit = stores, emit
        self._store: Store | None = None
        self._batch: Batch | None = None
        self._start: dict[str, Any] = {}
        self._system: SystemMetrics | None = None
        self._history: Path | None = None
        self._known: dict[str, int] = {}
        self._ended = False
        self._sent = self._parent_since = 0.0
        self._full = math.inf

    @property
    def behind(self) -> float:
        """How many full batches of points wait in the journal."""
        try:
            return (self.journal.stat().st_size - self.progress.offset) / self._full
        except FileNotFoundError:
            return 0.0

    @property
    def opening(self) -> bool:
        """The run is not in the store yet."""
        return self._store is None or self.progress.run_id is None

    @property
    def vital(self) -> bool:
        """What is due next may be given up for a clear refusal only: points, the run's status, the
        run itself."""
        kind = self._batch.kind if self._batch else "end"
        return self.opening or kind == "metrics" or (kind == "end" and not self._ended)

    def advance(self, last: bool) -> bool:
        """Sends one batch, if one is due. `last`: no one writes to the journal any more.

        Returns:
            Whether there may be more to do at once.
        """
        self._claim()
        if self.progress.done:  # by another writer
            return False
        if self.progress.run_id and self._store is None:
            self._reopen()
        self._batch = batch = next_batch(self.journal, self.progress.offset, self._known)
        if batch is None:
            if last:
                self._end({"status": "KILLED", "error": _NO_CLOSE, "time": _time(self.journal)})
            return False
        if not (batch.complete or last or time.monotonic() - self._sent > PARTIAL_SECONDS):
            return False
        self._send(batch)
        self._sent = time.monotonic()
        if batch.kind == "metrics" and batch.complete:
            self._full = batch.end - self.progress.offset
        self.progress.save(offset=batch.end)
        return not self.progress.done

    def _claim(self) -> None:
        """Takes the journal, and forgets what it knows where another writer was at work since."""
        if self.progress.held:
            return
        known = self.progress.fields()
        if not self.progress.claim():
            raise UnreachableError("another writer is still at work on this journal")
        if self.progress.fields() != known:
            self._store = self._history = None
            self._ended = False

    def skip(self) -> None:
        """Goes on after a batch that was refused."""
        end = self._batch.end if self._batch else self.progress.offset
        ended = self._batch is None or self._batch.kind == "end"
        self.progress.save(offset=end, done=ended)

    def _send(self, batch: Batch) -> None:
        record, kind = batch.record, batch.kind
        if kind == "start":
            self._open(self._moved(record))
        elif self.opening:
            raise RefusedError(f"{self.journal} does not begin with the start of a run")
        elif kind == "metrics":
            _sync(self.journal)
            self._run_store().log_points(self._run_id(), batch.points)
        elif kind == "tags":
            self._run_store().log_tags(self._run_id(), record["values"])
        elif kind == "artifact":
            self._send_file(artifact_file(self.journal, record["path"]), record["folder"])
        elif kind == "inputs":
            self._run_store().log_inputs(self._run_id(), record["datasets"])
        elif kind == "model":
            self._emit("sending")
            folder = artifact_file(self.journal, record["folder"])
            self._run_store().log_model(self._run_id(), folder, record["facts"], record["register"])
        elif kind == "end":
            self._end(record)

    def _send_file(self, path: Path, folder: str = "") -> None:
        self._emit("sending")
        self._run_store().log_artifact(self._run_id(), path, folder)

    def observe(self) -> None:
        """Logs the machine's load when a sample is due. Nothing waits for it or repeats it."""
        if self.opening or self.progress.done or not (seconds := self._start.get("system_metrics")):
            return
        if self._system is None:
            trainer = self._start.get("process", os.getppid())
            self._system = SystemMetrics(seconds, trainer, time.monotonic())
            with suppress(RefusedError, UnreachableError):
                self._system.count = self._run_store().samples(self._run_id())
        if self._system.due(time.monotonic()):
            now, number = time.time_ns() // 1_000_000, self._system.count
            points = [(k, v, now, number) for k, v in self._system.sample().items()]
            with suppress(RefusedError, UnreachableError):
                self._run_store().log_points(self._run_id(), points)

    def _open(self, start: dict[str, Any]) -> None:
        """Makes the run, or finds the one that an earlier try may have made."""
        self._store = store = self._stores.get(start["uri"])
        if (before := journals.previous_journal(self.journal, start)) and self._continue(
            before, start
        ):
            self._opened(start)
            return
        experiment = store.experiment(start["experiment"], start.get("experiment_id"))
        tags = {**start["tags"], JOURNAL_TAG: start["id"]}
        if start["sweep"] and start["role"] == "run" and (parent := self._parent(start)):
            tags["mlflow.parentRunId"] = parent
        mark = {JOURNAL_TAG: start["id"]}
        run_id = store.find_run(experiment, mark) if self.progress.tried else None
        self.progress.save(tried=True)
        run_id = run_id or store.create_run(experiment, start["name"], start["time"], tags)
        store.log_params(run_id, start["params"])
        self.progress.save(run_id=run_id, experiment_id=experiment, refused=False)
        self._opened(start)

    def _continue(self, before: Path, start: dict[str, Any]) -> bool:
        """Goes on with the run of an earlier journal, once that is stored to its end; False where
        it never became one."""
        earlier = JournalUploader(before, self._stores, lambda *_, **__: None)
        try:
            earlier.finish()
        finally:
            earlier.progress.release()
        run_id, experiment = earlier.progress.run_id, earlier.progress.experiment_id
        if run_id is None:
            return False
        self._run_store().reopen(
            run_id, start["params"], start["tags"], start["step"], start["changes"]
        )
        self.progress.save(run_id=run_id, experiment_id=experiment)
        return True

    def finish(self) -> None:
        """Sends all that is left of a journal that no one writes to any more."""
        if not self.progress.claim():
            raise UnreachableError("another writer still sends what the run left before")
        while not self.progress.done:
            try:
                self.advance(last=True)
            except RefusedError:
                if self.opening:
                    return
                self.skip()

    def _reopen(self) -> None:
        """Continues what another writer began."""
        start = self._moved(next(journals.read_records(self.journal))[0])
        self._store = self._stores.get(start["uri"])
        self._opened(start)

    def _moved(self, start: dict[str, Any]) -> dict[str, Any]:
        """The start of a journal that `runner sync` has sent elsewhere; any other as it is."""
        if self.progress.uri is None:
            return start
        name = self.progress.experiment or start["experiment"]
        return {**start, "uri": self.progress.uri, "experiment": name, "experiment_id": None}

    def _opened(self, start: dict[str, Any]) -> None:
        self._start, run_id = start, self._run_id()
        self._known = journals.last_steps(journals.run_journals(self.journal)[:-1])
        if start["role"] == "sweep" and start["sweep"]:
            self._stores.parents[start["uri"], start["sweep"]] = run_id
            self._stores.names[start["sweep"]] = start["name"]
        self._emit(
            "opened",
            run_id=run_id,
            experiment_id=self.progress.experiment_id,
            dashboard=self._dashboard(),
        )

    def _dashboard(self, metrics: Collection[str] = ()) -> str | None:
        """Has the store show this run beside others. No run depends on it."""
        store, sweep = self._run_store(), None
        sweep_id, experiment = self._start["sweep"], self.progress.experiment_id
        if sweep_id and (parent := self._stores.parents.get((self._start["uri"], sweep_id))):
            sweep = SweepView(sweep_id, parent, self._name_of(sweep_id, parent)[:80])
        assert experiment is not None
        path = store.dashboard(experiment, metrics, sweep)
        while store.notices:
            self._emit("notice", message=store.notices.pop(0))
        return path

    def _name_of(self, sweep_id: str, parent: str) -> str:
        """A sweep's name; its run may have been opened by another process."""
        names = self._stores.names
        if not names.get(sweep_id):
            with suppress(RefusedError, UnreachableError):
                names[sweep_id] = self._run_store().run_name(parent)
        return redact(names.get(sweep_id) or f"sweep {sweep_id}")

    def _parent(self, start: dict[str, Any]) -> str | None:
        """The sweep's parent run. Another process opens it, maybe a little later than this."""
        known = self._stores.parents.get((start["uri"], start["sweep"]))
        if known:
            return known
        store = self._run_store()
        experiment = store.experiment(start["experiment"], start.get("experiment_id"))
        found = store.find_run(experiment, {"sweep_id": start["sweep"], "role": "sweep"})
        self._parent_since = self._parent_since or time.monotonic()
        if found:
            self._stores.parents[start["uri"], start["sweep"]] = found
        elif time.monotonic() - self._parent_since < PARENT_SECONDS:
            raise UnreachableError(f"the parent run of sweep {start['sweep']} is not there yet")
        else:
            text = f"The sweep {start['sweep']} has no parent run; this run stands alone."
            self._emit("error", fatal=False, message=text)
        return found

    def _end(self, record: dict[str, Any]) -> None:
        """The run's status first: no artifact may keep it from that."""
        if not self.opening:
            if record["error"]:
                self._run_store().log_tags(self._run_id(), {"error": record["error"]})
            self._run_store().end_run(self._run_id(), record["status"], record["time"])
            self._ended = True
            if self._start["role"] == "run":
                self._leave_history()
        self.progress.save(done=True)

    def _leave_history(self) -> None:
        """Every metric exactly as it was recorded, for the report and for whoever wants it."""
        if self._history is None:
            if not (curves := history.from_journal(self.journal)):
                return
            self._dashboard(curves.keys())
            self._history = history.write_history(self.journal.with_name(HISTORY), curves)
        self._send_file(self._history)

    def _run_store(self) -> Store:
        assert self._store is not None
        return self._store

    def _run_id(self) -> str:
        assert self.progress.run_id is not None
        return self.progress.run_id


def _sync(path: Path) -> None:
    """Puts the journal on the disk, from here so that the training loop need not wait for it. A
    disk that fails keeps no point from the store."""
    file = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(file)
    finally:
        os.close(file)


def _time(path: Path) -> int:
    """When something was last written, in Unix milliseconds."""
    return path.stat().st_mtime_ns // 1_000_000
