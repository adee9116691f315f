"""The sweep's side: the nursery, and each job's process with its output and its end."""

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

from hydra.core.utils import JobReturn

from runner.sweep.launcher.job_output import Stream, exit_reason, oom_kills
from runner.sweep.launcher.job_request import STATUS_STRUCT, ProcessEnvironment
from runner.tracking.writer_proxy import WriterProxyServer
from runner.utils.stop_signals import signals_blocked

Source = Connection | socket.socket | io.FileIO

_COMMAND = "import sys; sys.path.insert(0, sys.argv[1]); "
_COMMAND += "from runner.sweep.launcher.fork_server import main; "
_COMMAND += "main(int(sys.argv[2]))"


class ForkServerClient:
    """The nursery's process, which imports what jobs need while we import what we need."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        with theirs, signals_blocked():
            # A session of its own keeps Ctrl-C away from it, -P a user's files from its imports.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, root, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def fork(self, fds: list[int]) -> None:
        """Asks for a process that gets these; see nursery.FDS."""
        socket.send_fds(self._line, [b"j"], fds)

    def close(self) -> None:
        """Ends it, and with it the jobs that it has."""
        self._line.close()
        self._process.wait()


class JobProcess:
    """One job's process, heard through a selector whose keys hold what takes their data.

    Args:
        order: pickled, see runner.sweep.launcher.job_request.
        mark: begins each line of its output; empty where it runs alone.

    Attributes:
        ended: it is gone, with all that it had started.
        answer: a JobReturn, the exit status with which it was stopped, or None where it died.
    """

    def __init__(
        self,
        nursery: ForkServerClient,
        selector: BaseSelector,
        surroundings: ProcessEnvironment,
        order: bytes,
        mark: str,
    ) -> None:
        self.ended = False
        self.answer: JobReturn | int | None = None
        self._selector, self._life, self._kills = selector, b"", oom_kills()
        self._taking: dict[Source, Callable[[], bool]] = {}
        self._unsent: list[int] = []
        self._out, self._err = Stream(sys.stdout, mark), Stream(sys.stderr, mark)
        self._line, line = Pipe()
        ours, tracking = socket.socketpair()
        self.lent = WriterProxyServer(ours)
        self._watch(self._line, self._hear)
        self._watch(ours, self.lent.read_requests)
        pipes = [
            self._pipe(self._hear_life),
            # A terminal shows progress as it shows it without us.
            self._pipe(self._out.feed) if mark or not sys.stdout.isatty() else os.dup(1),
            self._pipe(self._err.feed),
        ]
        with line, tracking, suppress(OSError):  # of a dead nursery the job's life tells: it ends
            nursery.fork([line.fileno(), tracking.fileno(), *pipes])
            self._line.send(surroundings)
            self._line.send_bytes(order)
        for fd in pipes:
            os.close(fd)

    @property
    def pid(self) -> int | None:
        """None until it takes signals."""
        return (
            STATUS_STRUCT.unpack_from(self._life)[0]
            if len(self._life) >= STATUS_STRUCT.size
            else None
        )

    def send_signal(self, number: int) -> None:
        """At once, or as soon as it takes signals."""
        if self.pid is None:
            self._unsent.append(number)
        elif not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def reason(self, asked: Collection[int]) -> str:
        """Why it died; `asked` are signals that were to stop it."""
        told = len(self._life) == 2 * STATUS_STRUCT.size
        status = STATUS_STRUCT.unpack_from(self._life, STATUS_STRUCT.size)[0] if told else None
        tail = self._err.tail.strip() or self._out.tail
        return exit_reason(status, tail, oom_kills() - self._kills, asked)

    def close(self) -> None:
        """Takes what it has left unread. What escaped its process group may hold a pipe open."""
        while self._taking and (ready := select([*self._taking], [], [], 0)[0]):
            for source in ready:
                self._take(source)
        for source in [*self._taking]:
            self._drop(source)

    def _pipe(self, feed: Callable[[bytes], bool]) -> int:
        """Has `feed` take what is written to the file that is returned."""
        ours, theirs = os.pipe()
        file = open(ours, "rb", buffering=0)  # noqa: PTH123, SIM115
        self._watch(file, lambda: feed(file.read(65536)))
        return theirs

    def _watch(self, source: Source, take: Callable[[], bool]) -> None:
        self._taking[source] = take
        self._selector.register(source, EVENT_READ, lambda: self._take(source))

    def _take(self, source: Source) -> None:
        if not self._taking[source]():
            self._drop(source)

    def _drop(self, source: Source) -> None:
        self._selector.unregister(source)
        del self._taking[source]
        source.close()

    def _hear(self) -> bool:
        try:
            self.answer = self._line.recv()
        except (EOFError, OSError):
            return False
        return True

    def _hear_life(self, data: bytes) -> bool:
        self._life += data
        if self.pid is not None and not self.ended:
            while self._unsent:
                self.send_signal(self._unsent.pop(0))
        self.ended = not data
        return bool(data)
