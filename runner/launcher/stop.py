"""SIGINT and SIGTERM to the process of a sweep."""

import os
import signal
import threading
import time
from select import select
from types import FrameType
from typing import Any


class StopRequests:
    """Context that turns SIGINT and SIGTERM into something to read, so that none interrupts what a
    launcher does. Outside the main thread it changes nothing.

    Attributes:
        came: their numbers, in order.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._read, self._write = os.pipe()
        self._previous: dict[int, Any] = {}
        self._urgent_since: float | None = None

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _note(self, number: int, frame: FrameType | None) -> None:
        os.write(self._write, bytes([number]))

    def fileno(self) -> int:
        return self._read

    def take(self) -> list[int]:
        """Those that are new."""
        new = [*os.read(self._read, 64)] if select([self], [], [], 0)[0] else []
        self.came += new
        if len(self.came) > 1 and self._urgent_since is None:
            self._urgent_since = time.monotonic()
        return new

    def waited(self) -> float:
        """Seconds since the second one came."""
        return 0.0 if self._urgent_since is None else time.monotonic() - self._urgent_since
