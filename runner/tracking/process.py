"""The trainer's end of the writer process: starts it, names journals to it, hears its events."""

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_LIVES = 3
_PER_FILE = 30
_COMMAND = "import sys; sys.path.insert(0, sys.argv[1]); from runner.tracking.writer import main; "
_COMMAND += "main(int(sys.argv[2]))"


@dataclass
class Followed:
    """What the writer has said about one journal.

    Attributes:
        refused: why the store does not take the run; None while all is well.
        trouble: the last thing that went wrong, also if it did not concern the whole run.
        complete: everything in the journal is stored and the run has its status.
        heard: time.monotonic() of the last sign of progress.
        sending: a file is under way, which may take long.
        dashboard: where the store shows the run beside others, after the server's address.
        relay: hears every event in our stead, for the process whose run it is.
    """

    journal: Path
    relay: Callable[[dict[str, Any]], None] | None = None
    opened: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    run_id: str | None = None
    experiment_id: str | None = None
    refused: str | None = None
    trouble: str | None = None
    complete: bool = False
    warned: bool = False
    sending: bool = False
    dashboard: str | None = None
    heard: float = field(default_factory=time.monotonic)


class WriterProcess:
    """One writer, shared by the runs of this process. A writer that dies is started again, up
    to three lives; the journals make that harmless."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self._followed: dict[str, Followed] = {}
        self._lives = 0
        self._finishing = False
        self._lock = threading.Lock()

    def follow(
        self, journal: Path, relay: Callable[[dict[str, Any]], None] | None = None
    ) -> Followed:
        """Has the writer carry this journal to its store."""
        followed = self._followed[str(journal)] = Followed(journal, relay)
        with self._lock:
            if self.process is None:
                self._lives = 0
                self.process = self._start(journal.parent)
                threading.Thread(target=self._listen, name="tracking", daemon=True).start()
            else:
                self._send(journal)
        return followed

    def wait(self, followed: Followed, patience: float) -> bool:
        """Waits until the journal is stored. False after `patience` seconds without progress,
        thirty times as many while a file is under way."""
        followed.heard = time.monotonic()
        if not self._finishing:
            with self._lock:
                self._send(followed.journal)  # wakes the writer from its nap
        while not followed.closed.is_set():
            longest = patience * (_PER_FILE if followed.sending else 1)
            left = followed.heard + longest - time.monotonic()
            if left <= 0:
                return False
            followed.closed.wait(min(left, patience))
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
        """At exit: waits for an idle writer; one that is still busy outlives this process."""
        self.finish()
        idle = all(followed.complete for followed in self._followed.values())
        if os.getpid() == self.owner and idle and (process := self.process):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)

    def _pending(self) -> list[Followed]:
        return [one for one in self._followed.values() if not one.closed.is_set()]

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Starts a writer and names it every journal that is not closed.

        -P keeps the working directory off its path, where a user's file may be called like a
        module of the standard library. A session of its own keeps Ctrl-C away from it.
        """
        self._lives += 1
        root = str(Path(__file__).resolve().parents[2])
        with (folder / "tracking.log").open("ab") as errors:
            self.process = process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, root, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
        for followed in self._pending():
            self._send(followed.journal)
        return process

    def _send(self, journal: Path) -> None:
        line = json.dumps({"journal": str(journal)}) + "\n"
        # If it has died, the listening thread starts another, which hears of all journals.
        with suppress(BrokenPipeError, ValueError):
            if self.process and self.process.stdin:
                self.process.stdin.write(line.encode())

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
                self._hear(
                    {"journal": str(followed.journal), "event": "error", "fatal": True,
                     "message": text}
                )  # fmt: skip
            return False
        log.warning(
            "The tracking writer ended with status %d and is started again; nothing is lost. "
            "Its log: %s", status, folder / "tracking.log",
        )  # fmt: skip
        self._start(folder)
        return True

    def _hear(self, event: dict[str, Any]) -> None:
        followed = self._followed.get(event["journal"])
        if followed is None:
            return
        if followed.relay:
            followed.relay(event)
        followed.sending = event["event"] == "sending"
        if event["event"] in ("sending", "waiting"):
            return  # an attempt, and that it failed: no progress
        followed.heard = time.monotonic()
        if event["event"] == "opened":
            followed.run_id, followed.experiment_id = event["run_id"], event["experiment_id"]
            followed.dashboard = event["dashboard"]
            followed.refused = None
            followed.closed.clear()
            followed.opened.set()
        elif event["event"] == "notice" and not followed.relay:
            log.warning(event["message"])
        elif event["event"] == "error":
            _complain(followed, event)
        elif event["event"] == "closed":
            followed.complete = event["complete"]
            followed.closed.set()


def _complain(followed: Followed, event: dict[str, Any]) -> None:
    """A refusal of the run is for check and close to tell; lesser trouble is told once a run."""
    followed.trouble = event["message"]
    if event["fatal"]:
        followed.refused = event["message"]
        followed.opened.set()
        followed.closed.set()  # until it opens after all, nobody need wait
    elif not (followed.warned or followed.relay):
        followed.warned = True
        log.warning("%s The records are kept in %s.", event["message"], followed.journal)


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


def use(writer: WriterProcess) -> None:
    """Has this process's runs share a given writer."""
    global _shared
    _shared = writer
