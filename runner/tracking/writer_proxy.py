"""The writer that a sweep's process lends to its jobs' processes: MLflow is imported once for all
of them, and the run of a job that dies is in hands that can end it."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.tracking.journal_status import JournalStatus
from runner.tracking.tracker import NOTE_TAG, Status
from runner.tracking.writer_process import WriterProcess, shared_writer


class _Line:
    """A socket in the place of the writer's process: journals go in, events come out."""

    def __init__(self, line: socket.socket) -> None:
        self.stdin, self.stdout = line.makefile("wb", buffering=0), line.makefile("rb")

    def wait(self, timeout: float | None = None) -> int:
        return 0


class WriterProxy(WriterProcess):
    """The job's end: another process's writer as if it were this one's."""

    def __init__(self, line: socket.socket) -> None:
        super().__init__()
        self._line: Any = _Line(line)

    def _start(self, folder: Path) -> Any:
        self._lives += 1
        self.process = self._line
        for followed in self._pending():
            self._send(followed.journal)
        return self._line


class WriterProxyServer:
    """The sweep's end, for one job.

    Args:
        line: a socket whose other end the job's BorrowedWriter has.
    """

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self._rest = b""
        self._followed: dict[str, JournalStatus] = {}

    def take(self) -> bool:
        """Passes journals on to the writer; False at the end."""
        try:
            data = self.line.recv(65536)
        except ConnectionResetError:  # the job died before it heard all that the writer said
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name = json.loads(line)["journal"]
            if name in self._followed:
                shared_writer().wait(self._followed[name], 0)  # the job waits for its end
            else:
                self._followed[name] = shared_writer().follow(Path(name), self._tell)
        return bool(data)

    def end(self, status: Status, error: str, note: str) -> list[JournalStatus]:
        """Ends what the job's death has left open; returns it, for whoever waits until it is
        stored."""
        left = [one for one in self._followed.values() if not one.complete]
        for followed in left:
            _end(followed.journal, status, error, note)
            shared_writer().wait(followed, 0)
        return left

    def _tell(self, event: dict[str, Any]) -> None:
        """On the thread that listens to the writer."""
        with suppress(OSError):  # the job is gone
            self.line.sendall(json.dumps(event).encode() + b"\n")


def _end(journal: Path, status: Status, error: str, note: str) -> None:
    """Closes the journal of a process that died, maybe in the middle of a line."""
    *_, last, rest = (b"\n" + journal.read_bytes()).rsplit(b"\n", 2)
    if b'"kind":"end"' in last:
        return
    records = (
        {"kind": "tags", "values": {NOTE_TAG: note}},
        {"kind": "end", "status": status, "error": error, "time": time.time_ns() // 1_000_000},
    )
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    file = os.open(journal, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, (b"\n" if rest else b"") + lines)
    finally:
        os.close(file)
