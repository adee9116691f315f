"""The launcher's handles on its child processes: JobProcess and ForkServerClient.

Nothing here blocks: every pipe is registered with the launcher's selector, which calls back when
there is something to read.
"""

import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from select import select
from selectors import EVENT_READ, BaseSelector

from runner.sweeps.launcher.job_output import OutputStream, exit_reason, oom_kills
from runner.sweeps.launcher.job_request import STATUS_STRUCT, JobRequest
from runner.utils.stop_signals import signals_blocked

PipeEnd = Connection | io.FileIO
"""This process's end of a pipe or socket to a job."""

_READ_BYTES = 65536
"""Bytes of a job's output that are read at once: the size of a pipe's buffer on Linux."""
_COMMAND = "import sys; sys.path.insert(0, sys.argv[1]); "
_COMMAND += "from runner.sweeps.launcher.fork_server import run_fork_server; "
_COMMAND += "run_fork_server(int(sys.argv[2]))"
"""Program of the fork server: its arguments are the folder of this package's top, and a socket."""


class ForkServerClient:
    """The fork server's process, which is started at construction."""

    def __init__(self) -> None:
        self._requests, server_end = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        with server_end, signals_blocked():
            # Its own session keeps a terminal's Ctrl-C away from it; -P keeps files in the
            # working directory from shadowing what it imports.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, root, str(server_end.fileno())],
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """Return whether the fork server's process runs."""
        return self._process.poll() is None

    def fork(self, fds: list[int]) -> None:
        """Ask for a job's process that gets these file descriptors.

        Args:
            fds: as fork_server.REQUEST_FD_COUNT lists them.

        Raises:
            OSError: the fork server is gone.
        """
        socket.send_fds(self._requests, [b"j"], fds)

    def close(self) -> None:
        """End the fork server, and with it the jobs that it has forked."""
        self._requests.close()
        self._process.wait()


class JobProcess:
    """One job's process, whose pipes are registered with a selector.

    The data of each selector key is the function that reads the pipe.

    Args:
        fork_server: forks the process.
        selector: the launcher's.
        request: the job's command and environment.
        prefix: begins each line of the job's output; empty for a job that runs alone.

    Attributes:
        has_ended: the process is gone, with all that it had started.
    """

    def __init__(
        self,
        fork_server: ForkServerClient,
        selector: BaseSelector,
        request: JobRequest,
        prefix: str,
    ) -> None:
        self.has_ended = False
        self._selector = selector
        self._status_data = b""
        # The kernel counts kills since the machine started: those of before are subtracted.
        self._oom_kills_before = oom_kills()
        self._readers: dict[PipeEnd, Callable[[], bool]] = {}
        self._unsent_signals: list[int] = []
        self._out = OutputStream(sys.stdout, prefix)
        self._err = OutputStream(sys.stderr, prefix)
        job_connection, connection = Pipe(duplex=False)
        status_pipe = self._open_pipe(self._read_status)
        # A job that runs alone writes to the terminal itself, so that progress bars work.
        has_terminal = not prefix and sys.stdout.isatty()
        out_pipe = os.dup(1) if has_terminal else self._open_pipe(self._out.feed)
        pipes = [status_pipe, out_pipe, self._open_pipe(self._err.feed)]
        # If the fork server is dead, the status pipe closes and the job is reported as ended.
        with job_connection, connection, suppress(OSError):
            fork_server.fork([job_connection.fileno(), *pipes])
            # While a copy is open here, sending to a dead fork server would not fail but wait.
            job_connection.close()
            connection.send(request)
        # A copy that stays open here would hide the job's end of the pipe from the selector.
        for fd in pipes:
            os.close(fd)

    @property
    def pid(self) -> int | None:
        """Process id of the job, None until the process handles signals."""
        if len(self._status_data) < STATUS_STRUCT.size:
            return None
        return STATUS_STRUCT.unpack_from(self._status_data)[0]

    def send_signal(self, number: int) -> None:
        """Send a signal now, or as soon as the process handles signals."""
        # Before that, a signal would end the process without a result.
        if self.pid is None:
            self._unsent_signals.append(number)
        elif not self.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def exit_status(self) -> int | None:
        """Status of os.waitpid; None before the end, and for a job whose fork server died."""
        if len(self._status_data) < 2 * STATUS_STRUCT.size:
            return None
        return STATUS_STRUCT.unpack_from(self._status_data, STATUS_STRUCT.size)[0]

    def death_reason(self, stop_signals: Collection[int]) -> str:
        """Return why the process ended without a result.

        Args:
            stop_signals: signals that the sweep sent to stop it.
        """
        tail = self._err.tail.strip() or self._out.tail
        kills = oom_kills() - self._oom_kills_before
        return exit_reason(self.exit_status, tail, kills, stop_signals)

    def close(self) -> None:
        """Read what is still in the pipes, and close them."""
        # Without waiting: a process that is no longer in the job's process group may hold a pipe
        # open.
        while self._readers:
            ready = select([*self._readers], [], [], 0)[0]
            if not ready:
                break
            for source in ready:
                self._read(source)
        for source in [*self._readers]:
            self._drop(source)

    def _open_pipe(self, feed: Callable[[bytes], bool]) -> int:
        """Return the file descriptor to write to, of a pipe whose data goes to `feed`."""
        read_end, write_end = os.pipe()
        file = open(read_end, "rb", buffering=0)  # noqa: PTH123, SIM115
        self._watch(file, lambda: feed(file.read(_READ_BYTES)))
        return write_end

    def _watch(self, source: PipeEnd, read: Callable[[], bool]) -> None:
        """Have the selector call `read` for new data, until `read` returns False."""
        self._readers[source] = read
        self._selector.register(source, EVENT_READ, lambda: self._read(source))

    def _read(self, source: PipeEnd) -> None:
        if not self._readers[source]():
            self._drop(source)

    def _drop(self, source: PipeEnd) -> None:
        self._selector.unregister(source)
        del self._readers[source]
        source.close()

    def _read_status(self, data: bytes) -> bool:
        """Read the process id, then the exit status; the pipe closes when the process is gone."""
        self._status_data += data
        if self.pid is not None and not self.has_ended:
            while self._unsent_signals:
                self.send_signal(self._unsent_signals.pop(0))
        self.has_ended = not data
        return bool(data)
