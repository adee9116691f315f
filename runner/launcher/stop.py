"""Signals to the process of a sweep."""

import os
import time
from select import select

from runner.stop import TOGETHER, Heeding


class StopRequests(Heeding):
    """Context that turns signals into something to read, so that none interrupts what a launcher
    does.

    Attributes:
        came: their numbers, in order.
    """

    def __init__(self) -> None:
        super().__init__()
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
