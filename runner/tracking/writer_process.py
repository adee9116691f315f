"""The trainer's end of the writer process: start it, name journals to it and read its events.

The writer (runner/tracking/writer/writer_main.py) reads journal paths from its stdin and writes
events as JSON lines to its stdout. A thread of the trainer reads them, so that no call here but
`wait` depends on the store. In a sweep's job the writer is another process's, see writer_proxy.py.
"""

import atexit
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.tracking.journal_status import JournalStatus
from runner.tracking.writer_start import journal_message, start_writer

log = logging.getLogger(__name__)

_MAX_STARTS = 3
_FILE_PATIENCE_FACTOR = 30
"""How much longer a wait may last while a file is being uploaded: a file reports no progress."""
_STOPPED_SECONDS = 4.0
"""Upper bound on waiting for the store after a stop signal: batch systems kill after about 10 s."""
_RETRY_SECONDS = 5.0
"""Upper bound on waiting once an earlier wait has failed: time for one more attempt."""
_SILENT_SECONDS = 5.0
"""Seconds after which a wait is announced."""


class WriterProcess:
    """One writer process, shared by all runs of this process.

    A writer that dies is restarted, up to three starts in all. The journals make that harmless.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self._journals: dict[str, JournalStatus] = {}
        self._starts = 0
        self._finishing = False
        self._last_wait_failed = False
        self._stop_requested = False
        self._lock = threading.Lock()

    def add_journal(
        self, journal: Path, forward_event: Callable[[dict[str, Any]], None] | None = None
    ) -> JournalStatus:
        """Have the writer upload a journal; start the writer if none runs.

        Args:
            journal: its path.
            forward_event: see JournalStatus.
        """
        status = JournalStatus(journal, forward_event)
        self._journals[str(journal)] = status
        with self._lock:
            if self.process is None:
                self._starts = 0
                self.process = self._start(journal.parent)
                threading.Thread(target=self._read_events, name="tracking", daemon=True).start()
            else:
                self._send(journal)
        return status

    def wait(
        self,
        journal: JournalStatus,
        patience: float,
        stopped: Callable[[], bool] = lambda: False,
        store: str = "the store",
    ) -> bool:
        """Wait until a journal is stored; announce it if that takes long.

        Gives up after `patience` seconds without progress, or thirty times as many while a file is
        being uploaded; after a few seconds once the run is asked to stop.

        Args:
            journal: its status.
            patience: seconds; 0 reports to the writer that somebody waits, and returns.
            stopped: returns whether the run was asked to stop; called repeatedly.
            store: the store's name in the announcement.

        Returns:
            Whether everything is stored.
        """
        journal.progress_at = started_at = time.monotonic()
        # The jobs of a sweep must not all wait for a server that is gone.
        patience = min(patience, _RETRY_SECONDS) if self._last_wait_failed else patience
        if not (self._finishing or journal.closed_event.is_set()):
            with self._lock:
                self._send(journal.journal)  # named again, it is uploaded at once
        announced = False
        stop_deadline = float("inf")
        while not journal.closed_event.wait(0.05):
            now = time.monotonic()
            if stopped():
                self._stop_requested = True
                stop_deadline = min(stop_deadline, now + min(patience, _STOPPED_SECONDS))
            longest = patience * (_FILE_PATIENCE_FACTOR if journal.sending_file else 1)
            if now > stop_deadline or now > journal.progress_at + longest:
                # With patience=0 nothing was waited for, so nothing failed.
                self._last_wait_failed = patience > 0
                return False
            if not announced and now - started_at > _SILENT_SECONDS:
                announced = True
                log.warning(journal.waiting_message(store, patience))
        return journal.is_complete

    def finish(self) -> None:
        """Tell the writer that no more journals follow: it uploads what it has and ends."""
        if os.getpid() != self.owner:
            return
        with self._lock:
            self._finishing = True
            if self.process and self.process.stdin:
                self.process.stdin.close()

    def wait_at_exit(self) -> None:
        """Finish, and wait for a writer that has uploaded everything.

        A writer that is still uploading, and any writer of a run that was asked to stop, outlives
        this process.
        """
        self.finish()
        idle = all(journal.is_complete for journal in self._journals.values())
        wait = idle and not self._stop_requested and os.getpid() == self.owner
        if wait and self.process:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)

    def kill(self) -> None:
        """Kill the writer; another one can continue from the saved offsets."""
        self.finish()
        if self.process and os.getpid() == self.owner:
            self.process.kill()

    def _unfinished(self) -> list[JournalStatus]:
        return [journal for journal in self._journals.values() if not journal.closed_event.is_set()]

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start a writer and name every unfinished journal to it."""
        self._starts += 1
        self.process = process = start_writer(folder, subprocess.PIPE)
        for journal in self._unfinished():
            self._send(journal.journal)
        return process

    def _send(self, journal: Path) -> None:
        # If the writer has died, the thread that reads its events starts another one, which is
        # sent all unfinished journals.
        with suppress(BrokenPipeError, ValueError):
            if self.process and self.process.stdin:
                self.process.stdin.write(journal_message(journal))

    def _read_events(self) -> None:
        """Apply the events of each writer to its end; the body of the thread."""
        while (process := self.process) and process.stdout:
            for event in _events(process.stdout.fileno()):
                self._dispatch(event)
            exit_status = process.wait()
            with self._lock:
                process.stdout.close()
                if process.stdin:
                    process.stdin.close()
                if not self._restart(exit_status):
                    self.process = None
                    return

    def _restart(self, exit_status: int) -> bool:
        """Start another writer if the last one ended before its journals were stored.

        Returns:
            Whether one was started.
        """
        unfinished = self._unfinished()
        if not unfinished:
            return False
        if self._finishing or self._starts >= _MAX_STARTS:
            self._report_end(unfinished, exit_status)
            return False
        folder = unfinished[0].journal.parent
        log.warning(
            "The tracking writer ended with status %d and was started again; no record is lost. "
            "Its log: %s",
            exit_status,
            folder / "tracking.log",
        )
        self._start(folder)
        return True

    def _report_end(self, unfinished: list[JournalStatus], exit_status: int) -> None:
        """Close the unfinished journals in the place of a writer that can no longer do it."""
        text = f"the writer process ended with status {exit_status}, see tracking.log"
        for journal in unfinished:
            name = {"journal": str(journal.journal)}
            self._dispatch({**name, "event": "error", "fatal": False, "message": text})
            self._dispatch({**name, "event": "closed", "complete": False})

    def _dispatch(self, event: dict[str, Any]) -> None:
        journal = self._journals.get(event["journal"])
        if journal is None:
            return
        journal.update(event)
        if event["event"] in ("opened", "progress"):
            self._last_wait_failed = False


def _events(stdout: int) -> Iterator[dict[str, Any]]:
    """Yield the events that a writer writes, until it ends."""
    # os.read, because a buffered reader held by a daemon thread can abort Python's shutdown.
    rest = b""
    while data := os.read(stdout, 65536):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


_shared: WriterProcess | None = None


def shared_writer() -> WriterProcess:
    """Return the writer that all runs of this process share.

    A forked child gets one of its own: it has no thread to read the events of its parent's.
    """
    global _shared
    if _shared is None or _shared.owner != os.getpid():
        _shared = WriterProcess()
        atexit.register(_shared.wait_at_exit)
    return _shared


def use_writer(writer: WriterProcess) -> None:
    """Make the runs of this process share a given writer."""
    global _shared
    _shared = writer
