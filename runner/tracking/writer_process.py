"""The trainer's end of the writer process: starts it, names journals to it, hears its events."""

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
from runner.tracking.writer_start import named_journal, start_writer

log = logging.getLogger(__name__)

_LIVES = 3
_PER_FILE = 30
_HURRY_SECONDS = 4.0
"""What a run that was told to stop waits at most: it has ten seconds, and other things to do."""
_LEAST_SECONDS = 5.0
"""For a store that has been away for long already: time for one more try."""
_SILENT_SECONDS = 5.0


class WriterProcess:
    """One writer, shared by the runs of this process. A writer that dies is started again, up
    to three lives; the journals make that harmless."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self._followed: dict[str, JournalStatus] = {}
        self._lives = 0
        self._finishing = self._in_vain = self._hurried = False
        self._lock = threading.Lock()

    def follow(
        self, journal: Path, relay: Callable[[dict[str, Any]], None] | None = None
    ) -> JournalStatus:
        """Has the writer carry this journal to its store."""
        followed = self._followed[str(journal)] = JournalStatus(journal, relay)
        with self._lock:
            if self.process is None:
                self._lives = 0
                self.process = self._start(journal.parent)
                threading.Thread(target=self._listen, name="tracking", daemon=True).start()
            else:
                self._send(journal)
        return followed

    def wait(
        self,
        followed: JournalStatus,
        patience: float,
        stopped: Callable[[], bool] = lambda: False,
        store: str = "the store",
    ) -> bool:
        """Waits until the journal is stored, and says so after a while. False after `patience`
        seconds without progress, thirty times as many while a file is under way. A few seconds at
        most once the run is told to stop, or where an earlier run waited in vain and nothing has
        been heard since: a sweep's jobs do not all wait for a server that is gone.

        Args:
            followed: the journal.
            patience: seconds.
            stopped: whether the run is told to stop; asked again and again.
            store: what is waited for, in words.
        """
        began = followed.heard = time.monotonic()
        patience = min(patience, _LEAST_SECONDS) if self._in_vain else patience
        if not (self._finishing or followed.closed.is_set()):
            with self._lock:
                self._send(followed.journal)  # wakes the writer from its nap
        said, hurry = False, float("inf")
        while not followed.closed.wait(0.05):
            now = time.monotonic()
            if stopped():
                self._hurried = True
                hurry = min(hurry, now + min(patience, _HURRY_SECONDS))
            longest = patience * (_PER_FILE if followed.sending else 1)
            if now > hurry or now > followed.heard + longest:
                self._in_vain = patience > 0  # 0 wakes the writer, and waits for nothing
                return False
            if not said and now - began > _SILENT_SECONDS:
                said = True
                log.warning(followed.waiting(store, patience))
        return followed.complete

    def finish(self) -> None:
        """Tells the writer that nothing more will come: it stores what there is and ends."""
        if os.getpid() != self.owner:
            return
        with self._lock:
            self._finishing = True
            if self.process and self.process.stdin:
                self.process.stdin.close()

    def reap(self) -> None:
        """At exit: waits for an idle writer; one that is still busy, and any of a run that was told
        to stop, outlives this process."""
        self.finish()
        idle = all(followed.complete for followed in self._followed.values())
        wait = idle and not self._hurried and os.getpid() == self.owner
        if wait and (process := self.process):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)

    def abandon(self) -> None:
        """Ends the writer at once; another one can go on from where it was."""
        self.finish()
        if (process := self.process) and os.getpid() == self.owner:
            process.kill()

    def _pending(self) -> list[JournalStatus]:
        return [one for one in self._followed.values() if not one.closed.is_set()]

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Starts a writer and names it every journal that is not closed."""
        self._lives += 1
        self.process = process = start_writer(folder, subprocess.PIPE)
        for followed in self._pending():
            self._send(followed.journal)
        return process

    def _send(self, journal: Path) -> None:
        # If it has died, the listening thread starts another, which hears of all journals.
        with suppress(BrokenPipeError, ValueError):
            if self.process and self.process.stdin:
                self.process.stdin.write(named_journal(journal))

    def _listen(self) -> None:
        """The thread's body: hears each life of the writer to its end."""
        while (process := self.process) and process.stdout:
            for event in _events(process.stdout.fileno()):
                self._hear(event)
            status = process.wait()
            with self._lock:
                process.stdout.close()
                if process.stdin:
                    process.stdin.close()
                if not self._revive(status):
                    self.process = None
                    return

    def _revive(self, status: int) -> bool:
        """Starts another writer if the last one left work behind."""
        pending = self._pending()
        if not pending:
            return False
        folder = pending[0].journal.parent
        if self._finishing or self._lives >= _LIVES:
            text = f"the writer process ended with status {status}, see tracking.log"
            for followed in pending:
                name = {"journal": str(followed.journal)}
                self._hear({**name, "event": "error", "fatal": False, "message": text})
                self._hear({**name, "event": "closed", "complete": False})
            return False
        log.warning(
            "The tracking writer ended with status %d and is started again; nothing is lost. "
            "Its log: %s",
            status,
            folder / "tracking.log",
        )
        self._start(folder)
        return True

    def _hear(self, event: dict[str, Any]) -> None:
        followed = self._followed.get(event["journal"])
        if followed is None:
            return
        followed.hear(event)
        if event["event"] in ("opened", "progress"):
            self._in_vain = False


def _events(stdout: int) -> Iterator[dict[str, Any]]:
    """Reads lines with os.read: a buffered reader held by a daemon thread can abort Python's
    shutdown."""
    rest = b""
    while data := os.read(stdout, 65536):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


_shared: WriterProcess | None = None


def shared_writer() -> WriterProcess:
    """This process's writer. A forked child does not share its parent's."""
    global _shared
    if _shared is None or _shared.owner != os.getpid():
        _shared = WriterProcess()
        atexit.register(_shared.reap)
    return _shared


def use_writer(writer: WriterProcess) -> None:
    """Has this process's runs share a given writer."""
    global _shared
    _shared = writer
