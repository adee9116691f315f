"""Signals to the process of a sweep."""

import os
import time
from pathlib import Path
from select import select

from runner.utils.files import write_text
from runner.utils.stop_signals import TOGETHER, Interrupted, SignalHandler


class StopRequests(SignalHandler):
    """Context that turns signals into something to read, so that none interrupts what a launcher
    does.

    Args:
        asked: a file that holds a signal's number once it is asked for where no signal reaches.

    Attributes:
        came: their numbers, in order.
    """

    def __init__(self, asked: Path | None = None) -> None:
        super().__init__()
        self._asked = asked
        self.came: list[int] = []
        self._read, self._write = os.pipe()
        self._since: float | None = None
        self._urgent_since: float | None = None

    def __exit__(self, *raised: object) -> None:
        super().__exit__()
        os.close(self._read)
        os.close(self._write)

    def take(self, number: int) -> None:
        """Notes it for `new`."""
        os.write(self._write, bytes([number]))

    def fileno(self) -> int:
        return self._read

    def new(self) -> list[int]:
        """Those that came since; what comes together is one."""
        if self._since is None and self._asked is not None and self._asked.exists():
            number, self._asked = int(self._asked.read_text()), None
            self.take(number)
        new = [*os.read(self._read, 64)] if select([self], [], [], 0)[0] else []
        now = time.monotonic()
        if new and self._since is None:
            self._since = now
            del new[1:]
        elif self._since is not None and now - self._since < TOGETHER:
            return []
        elif new and self._urgent_since is None:
            self._urgent_since = now
        self.came += new
        return new

    def waited(self) -> float:
        """Seconds since the second one came."""
        return 0.0 if self._urgent_since is None else time.monotonic() - self._urgent_since


class StopFile(SignalHandler):
    """Context of jobs that this process cannot signal: the first signal goes into a file that they
    look for, another one raises Interrupted.

    Attributes:
        came: the number of the first one; 0 before.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._since = path, 0.0
        self.came = 0

    def take(self, number: int) -> None:
        """Writes it down; raises Interrupted."""
        now = time.monotonic()
        if not self.came:
            self.came, self._since = number, now
            write_text(self._path, str(number))
        elif now - self._since > TOGETHER:
            raise Interrupted(number)
