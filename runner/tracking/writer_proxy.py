"""Share the sweep's writer process with its jobs, which are processes of their own.

MLflow is imported once for all jobs, and the sweep can close the MLflow run of a job that crashed.
A job talks through a socket as it would through pipes to a writer of its own: it names journals
(WriterProxy) and gets events. The sweep's process passes both on (WriterProxyServer).
"""

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


class _SocketProcess:
    """A socket that looks like the writer's Popen: journals go to stdin, events come on stdout."""

    def __init__(self, connection: socket.socket) -> None:
        self.stdin = connection.makefile("wb", buffering=0)
        self.stdout = connection.makefile("rb")

    def wait(self, timeout: float | None = None) -> int:
        return 0


class WriterProxy(WriterProcess):
    """The job's end: the sweep's writer, used as if it were this process's own."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection: Any = _SocketProcess(connection)

    def _start(self, folder: Path) -> Any:
        self._starts += 1
        self.process = self._connection
        for journal in self._unfinished():
            self._send(journal.journal)
        return self._connection


class WriterProxyServer:
    """The sweep's end of one job's connection.

    Args:
        connection: a socket whose other end the job's WriterProxy has.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._partial_line = b""
        self._journals: dict[str, JournalStatus] = {}

    def read_requests(self) -> bool:
        """Pass the journals that the job names on to the writer.

        Returns:
            False once the job has closed the connection.
        """
        try:
            data = self.connection.recv(65536)
        except ConnectionResetError:  # the job died before it read all events
            return False
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            name = json.loads(line)["journal"]
            if name in self._journals:
                # Named again: the job waits for the end of its upload, so the writer must hurry.
                shared_writer().wait(self._journals[name], 0)
            else:
                writer = shared_writer()
                self._journals[name] = writer.add_journal(Path(name), self._forward_event)
        return bool(data)

    def end_journals(self, status: Status, error: str, note: str) -> list[JournalStatus]:
        """End the open journals of a dead job, so that its run gets a status.

        Returns:
            Those journals, for the caller to wait until they are stored.
        """
        unfinished = [journal for journal in self._journals.values() if not journal.is_complete]
        for journal in unfinished:
            _append_end(journal.journal, status, error, note)
            shared_writer().wait(journal, 0)
        return unfinished

    def _forward_event(self, event: dict[str, Any]) -> None:
        """Send an event to the job; runs on the thread that reads the writer's events."""
        with suppress(OSError):  # the job is gone
            self.connection.sendall(json.dumps(event).encode() + b"\n")


def _append_end(journal: Path, status: Status, error: str, note: str) -> None:
    """Append the end to the journal of a process that died, if it has none."""
    *_, last, rest = (b"\n" + journal.read_bytes()).rsplit(b"\n", 2)
    if b'"kind":"end"' in last:
        return
    records = (
        {"kind": "tags", "values": {NOTE_TAG: note}},
        {"kind": "end", "status": status, "error": error, "time": time.time_ns() // 1_000_000},
    )
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    # The process may have died in the middle of a line.
    separator = b"\n" if rest else b""
    file = os.open(journal, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, separator + lines)
    finally:
        os.close(file)
