"""Stop signals to the process of a sweep, for its launcher to read or to write down."""

import os
import time
from pathlib import Path
from select import select

from runner.core import files, stop_signals


class StopRequests(stop_signals.SignalHandler):
    """Context that queues signals for a selector, so that none interrupts the launcher.

    The file descriptor of `fileno` becomes readable when a signal comes.

    Args:
        stop_file: a file that holds a signal's number once a stop is requested from a process that
            cannot send signals here.

    Attributes:
        received_signals: numbers of the signals that `read_new_signals` has returned, in order.
    """

    def __init__(self, stop_file: Path | None = None) -> None:
        super().__init__()
        self.received_signals: list[int] = []
        self._stop_file = stop_file
        self._read_end, self._write_end = os.pipe()
        self._first_at: float | None = None
        self._second_at: float | None = None

    def __exit__(self, *raised: object) -> None:
        super().__exit__()
        os.close(self._read_end)
        os.close(self._write_end)

    def handle_signal(self, number: int) -> None:
        """Queue a signal for `read_new_signals`."""
        # A selector that waits is woken by the byte; a handler must not do more than that.
        os.write(self._write_end, bytes([number]))

    def fileno(self) -> int:
        """Return the file descriptor that a selector waits on."""
        return self._read_end

    def read_new_signals(self) -> list[int]:
        """Return signals received since the last call; those within 0.5 s count as one."""
        # The signal that the stop file names, once, unless a signal came before.
        if self._first_at is None and self._stop_file is not None and self._stop_file.exists():
            self.handle_signal(int(self._stop_file.read_text()))
            self._stop_file = None
        new = [*os.read(self._read_end, 64)] if select([self], [], [], 0)[0] else []
        now = time.monotonic()
        if new and self._first_at is None:
            self._first_at = now
            # Signals that came together are one request.
            del new[1:]
        elif self._first_at is not None and now - self._first_at < stop_signals.COALESCE_SECONDS:
            # A batch system may signal every process, and a process may pass a signal on.
            return []
        elif new and self._second_at is None:
            self._second_at = now
        self.received_signals += new
        return new

    def seconds_since_second_signal(self) -> float:
        """Return the seconds since the second signal, 0 before it."""
        return 0.0 if self._second_at is None else time.monotonic() - self._second_at


class StopFile(stop_signals.SignalHandler):
    """Context that writes the first signal to a file, for jobs that this process cannot signal.

    A second signal raises Interrupted.

    Args:
        path: the file, which jobs look for.

    Attributes:
        received_signal: number of the first signal; 0 before it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.received_signal = 0
        self._path = path
        self._first_at = 0.0

    def handle_signal(self, number: int) -> None:
        """Write the first signal's number to the file, or raise Interrupted for another one."""
        now = time.monotonic()
        if not self.received_signal:
            self.received_signal = number
            self._first_at = now
            files.write_text(self._path, str(number))
        elif now - self._first_at > stop_signals.COALESCE_SECONDS:
            raise stop_signals.Interrupted(number)
