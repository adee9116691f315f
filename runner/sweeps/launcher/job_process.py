"""The launcher's handles on its child processes: JobProcess and ForkServerClient.

A job's output is forwarded to the sweep's, and its last lines explain why the job died.

Nothing here blocks: every pipe is registered with the launcher's selector, which calls back when
there is something to read.
"""

import io
import os
import signal
import socket
import subprocess
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from select import select
from selectors import EVENT_READ, BaseSelector
from typing import TextIO

from runner.core import stop_signals
from runner.sweeps.launcher.job_request import STATUS_STRUCT, JobRequest

_READ_BYTES = 65536
"""Bytes of a job's output that are read at once: the size of a pipe's buffer on Linux."""
_COMMAND = "import sys; sys.path.insert(0, sys.argv[1]); "
_COMMAND += "from runner.sweeps.launcher.fork_server import run_fork_server; "
_COMMAND += "run_fork_server(int(sys.argv[2]))"
"""Program of the fork server: its arguments are the folder of this package's top, and a socket."""
_TAIL_CHARACTERS = 32_000
"""Characters of a job's output in which the reason of its death is looked for: Python's report of a
crash names every frame and every compiled module."""
_REASON_LINES = 3
_PYTHON_CRASH = "Fatal Python error"


class ForkServerClient:
    """The fork server's process, which is started at construction."""

    def __init__(self) -> None:
        self._requests, server_end = socket.socketpair()
        root = str(Path(__file__).resolve().parents[3])
        with server_end, stop_signals.signals_blocked():
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
        pid: process id, None until the process handles signals.
        exit_status: of os.waitpid; None before the end, and for a job whose fork server died.
    """

    def __init__(
        self,
        fork_server: ForkServerClient,
        selector: BaseSelector,
        request: JobRequest,
        prefix: str,
    ) -> None:
        self.has_ended = False
        self.pid: int | None = None
        self.exit_status: int | None = None
        self._selector = selector
        # The kernel counts kills since the machine started: those of before are subtracted.
        self._oom_kills_before = oom_kills()
        self._readers: dict[io.FileIO, Callable[[bytes], None]] = {}
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

    def send_signal(self, number: int) -> None:
        """Send a signal now, or as soon as the process handles signals."""
        # Before that, a signal would end the process without a result.
        if self.pid is None:
            self._unsent_signals.append(number)
        elif not self.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

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
        while ready := select([*self._readers], [], [], 0)[0]:
            for source in ready:
                self._read(source)
        for source in [*self._readers]:
            self._drop(source)

    def _open_pipe(self, feed: Callable[[bytes], None]) -> int:
        """Return the file descriptor to write to, of a pipe whose data goes to `feed`."""
        read_end, write_end = os.pipe()
        file = open(read_end, "rb", buffering=0)  # noqa: PTH123, SIM115
        self._readers[file] = feed
        self._selector.register(file, EVENT_READ, lambda: self._read(file))
        return write_end

    def _read(self, source: io.FileIO) -> None:
        """Read new data of a pipe, which is closed at its end."""
        data = source.read(_READ_BYTES)
        self._readers[source](data)
        if not data:
            self._drop(source)

    def _drop(self, source: io.FileIO) -> None:
        self._selector.unregister(source)
        del self._readers[source]
        source.close()

    def _read_status(self, data: bytes) -> None:
        """Read the process id, then the exit status; the pipe closes when the process is gone."""
        # No number is cut in two: the kernel writes as few bytes to a pipe at once.
        for (number,) in STATUS_STRUCT.iter_unpack(data):
            if self.pid is None:
                self.pid = number
                for unsent in self._unsent_signals:
                    self.send_signal(unsent)
            else:
                self.exit_status = number
        self.has_ended = not data


class OutputStream:
    """A job's stdout or stderr on its way to this process's.

    Args:
        target: this process's stream.
        prefix: begins each line, where several jobs run at once; empty for one that runs alone.

    Attributes:
        tail: the last characters of the output, without prefixes.
    """

    def __init__(self, target: TextIO, prefix: str) -> None:
        self.tail = ""
        self._target = target
        self._prefix = prefix
        # Incremental: a read may end within a character of several bytes.
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._unfinished_line = ""

    def feed(self, data: bytes) -> None:
        """Forward data that was read.

        Args:
            data: empty at the end.
        """
        text = self._unfinished_line + self._decoder.decode(data, final=not data)
        end = len(text)
        if self._prefix and data:
            # Jobs that run at once must not write into each other's lines.
            end = text.rfind("\n") + 1
        shown = text[:end]
        self._unfinished_line = text[end:]
        self.tail = (self.tail + shown)[-_TAIL_CHARACTERS:]
        if self._prefix:
            # The line that a job leaves names it.
            lines = shown.splitlines(keepends=True)
            shown = "".join(x if x.startswith("job ") else self._prefix + x for x in lines)
        self._target.write(shown)
        self._target.flush()


def exit_reason(
    status: int | None, tail: str, kills: int, stop_signals: Collection[int] = ()
) -> str:
    """Return why a job's process ended without a result.

    Args:
        status: status of os.waitpid; None for a job whose fork server died.
        tail: end of the job's output.
        kills: processes that the kernel killed for lack of memory while the job ran.
        stop_signals: signals that the sweep sent to stop the job.
    """
    # Negative where a signal ended the process; a shell's is 128 + the signal's number.
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    number = -code if code < 0 else code - 128
    # First: what a job prints or how it exits after a requested stop is no reason of its own.
    if number in stop_signals:
        return f"Stopped by {signal.Signals(number).name} before it wrote a result."
    if status is None:
        reason = "The fork server was killed, and this job with it."
    elif code < 0:
        # The kernel counts such kills for the whole machine, not by process.
        is_out_of_memory = number == signal.SIGKILL and kills
        note = " (out of memory: the kernel killed a process for it meanwhile)"
        reason = f"Its process was ended by {signal.Signals(number).name}"
        reason += f"{note if is_out_of_memory else ''}."
    else:
        reason = f"Its process ended with exit status {code} before it wrote a result."
    lines = last_lines(tail)
    return f"{reason} Last lines: {lines}" if lines else reason


def last_lines(text: str) -> str:
    """Return the last lines of an output that are not blank, as one line.

    If the output holds Python's report of a crash, they are the first lines of that report.
    """
    # The report's first lines say where the crash happened; a long stack follows.
    _, crash, report = text.rpartition(_PYTHON_CRASH)
    lines = [*filter(None, map(str.strip, (crash + report).splitlines()))]
    return " | ".join(lines[: _REASON_LINES + 1] if crash else lines[-_REASON_LINES:])


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since the machine started.

    It is 0 where the kernel does not say.
    """
    try:
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError):
        return 0
