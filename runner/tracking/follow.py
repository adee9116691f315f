"""One journal on its way to one run of the store. Runs in the writer process."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.tracking import journal as journals
from runner.tracking.progress import Progress
from runner.tracking.store import JOURNAL_TAG, MAX_POINTS, Point, Store, UnreachableError

PARTIAL_SECONDS = 1.0
PARENT_SECONDS = 15.0
_NO_CLOSE = "The training process ended without closing its run."


class Stores:
    """The stores of this process by URI, and the sweeps' parent runs that it has met."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self.parents: dict[tuple[str, str], str] = {}

    def get(self, uri: str) -> Store:
        if uri not in self._stores:
            self._stores[uri] = Store(uri)
        return self._stores[uri]


@dataclass
class Batch:
    """Records of one kind that go to the store together.

    Attributes:
        end: the offset after them in the journal.
        complete: there is no reason to wait for more.
    """

    kind: str
    record: dict[str, Any]
    end: int
    points: list[Point] = field(default_factory=list)
    complete: bool = True


def next_batch(path: Path, offset: int) -> Batch | None:
    """The next record, or as many metric records as make one call."""
    batch: Batch | None = None
    for record, end in journals.read(path, offset):
        kind = record["kind"]
        if batch is None:
            batch = Batch(kind, record, end)
            if kind != "metrics":
                return batch
            batch.complete = False
        elif kind != "metrics" or len(batch.points) + len(record["values"]) > MAX_POINTS:
            batch.complete = True
            return batch
        step, time_ms = record["step"], record["time"]
        batch.points += [(name, value, time_ms, step) for name, value in record["values"].items()]
        batch.end = end
    return batch


class Follower:
    """Carries a journal to its run, batch by batch.

    `advance` may raise RefusedError or UnreachableError. Then nothing is lost: it may be called
    again, or the batch skipped."""

    def __init__(self, journal: Path, stores: Stores, emit: Callable[..., None]) -> None:
        self.journal, self.progress = journal, Progress(journal)
        self._stores, self._emit = stores, emit
        self._store: Store | None = None
        self._batch: Batch | None = None
        self._sent = self._parent_since = 0.0

    @property
    def opening(self) -> bool:
        """The run is not in the store yet."""
        return self._store is None or self.progress.run_id is None

    def advance(self, last: bool) -> bool:
        """Sends one batch, if one is due. `last`: no one writes to the journal any more.

        Returns:
            Whether there may be more to do at once.
        """
        if not self.progress.claim():
            raise UnreachableError("another writer is still at work on this journal")
        if self.progress.run_id and self._store is None:
            self._reopen()
        self._batch = batch = next_batch(self.journal, self.progress.offset)
        if batch is None:
            if last:
                self._end({"status": "KILLED", "error": _NO_CLOSE, "time": _time(self.journal)})
            return False
        if not (batch.complete or last or time.monotonic() - self._sent > PARTIAL_SECONDS):
            return False
        self._send(batch)
        self._sent = time.monotonic()
        self.progress.save(offset=batch.end)
        return not self.progress.done

    def skip(self) -> None:
        """Goes on after a batch that was refused."""
        end = self._batch.end if self._batch else self.progress.offset
        ended = self._batch is None or self._batch.kind == "end"
        self.progress.save(offset=end, done=ended)

    def _send(self, batch: Batch) -> None:
        if batch.kind == "start":
            self._open(batch.record)
        elif batch.kind == "metrics":
            _sync(self.journal)
            self._run_store().log_points(self._run_id(), batch.points)
        elif batch.kind == "tags":
            self._run_store().log_tags(self._run_id(), batch.record["values"])
        elif batch.kind == "artifact":
            path, folder = Path(batch.record["path"]), batch.record["folder"]
            self._run_store().log_artifact(self._run_id(), path, folder)
        elif batch.kind == "end":
            self._end(batch.record)

    def _open(self, start: dict[str, Any]) -> None:
        """Makes the run, or finds the one that an earlier try may have made."""
        self._store = store = self._stores.get(start["uri"])
        experiment = store.experiment(start["experiment"])
        tags = {**start["tags"], JOURNAL_TAG: start["id"]}
        if start["sweep"] and start["role"] == "run" and (parent := self._parent(start)):
            tags["mlflow.parentRunId"] = parent
        mark = {JOURNAL_TAG: start["id"]}
        run_id = store.find_run(experiment, mark) if self.progress.tried else None
        self.progress.save(tried=True)
        run_id = run_id or store.create_run(experiment, start["name"], start["time"], tags)
        store.log_params(run_id, start["params"])
        self.progress.save(run_id=run_id, experiment_id=experiment)
        self._opened(start)

    def _reopen(self) -> None:
        """Continues what another writer began."""
        start, _ = next(journals.read(self.journal))
        self._store = self._stores.get(start["uri"])
        self._opened(start)

    def _opened(self, start: dict[str, Any]) -> None:
        run_id = self._run_id()
        if start["role"] == "sweep" and start["sweep"]:
            self._stores.parents[start["uri"], start["sweep"]] = run_id
        self._emit("opened", run_id=run_id, experiment_id=self.progress.experiment_id)

    def _parent(self, start: dict[str, Any]) -> str | None:
        """The sweep's parent run. Another process opens it, maybe a little later than this."""
        known = self._stores.parents.get((start["uri"], start["sweep"]))
        if known:
            return known
        store = self._run_store()
        experiment = store.experiment(start["experiment"])
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
        if not self.opening:
            if record["error"]:
                self._run_store().log_tags(self._run_id(), {"error": record["error"]})
            self._run_store().end_run(self._run_id(), record["status"], record["time"])
        self.progress.save(done=True)

    def _run_store(self) -> Store:
        assert self._store is not None
        return self._store

    def _run_id(self) -> str:
        assert self.progress.run_id is not None
        return self.progress.run_id


def _sync(path: Path) -> None:
    """Puts the journal on the disk, from here so that the training loop need not wait for it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _time(path: Path) -> int:
    """When something was last written, in Unix milliseconds."""
    return path.stat().st_mtime_ns // 1_000_000
