"""Signals that ask a process to stop: Ctrl-C's and those of a closed terminal and a batch system.

A command without an open run or sweep exits in the handler, where no import and no library can
swallow the signal. A run continues until its step is complete (StopSignals).
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

from runner.utils.errors import RunnerError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TOGETHER = 0.5
"""Seconds within which signals count as one: a batch system may signal every process, and a process
may pass its signal on to another."""
_HEED_SECONDS = 1.0
_MARGIN = 0.1


class Stopped(RunnerError):
    """The run was stopped by a signal, after a checkpoint if it had taken a step. Exit status
    128 + the signal's number: 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, number: int) -> None:
        self.exit_status = 128 + number
        super().__init__(f"Stopped by {signal.Signals(number).name}.")


class Interrupted(KeyboardInterrupt):
    """A signal came where nothing waits for it; no `except Exception` holds it up."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        self.exit_status = 128 + number
        super().__init__(str(Stopped(number)))


def end_by_signal(number: int) -> NoReturn:
    """Exit this process at once, with the status of a signal."""
    # Of the processes that torchrun starts, rank 0 prints the message.
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"error: {Stopped(number)}\n".encode())
    _leave(128 + number)


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # what is being written cannot be flushed
            stream.flush()
    os._exit(status)


class SignalHandler:
    """Context that has a method take the signals of this process, but for those that it was begun
    without (nohup ignores SIGHUP, a script's shell the SIGINT of what it runs behind itself) and
    those that something else listens to. Outside the main thread it changes nothing."""

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if (before := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    self._previous[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._owner:  # not in a process that was forked just now
            self.take(number)

    def take(self, number: int) -> None:
        """Handle a signal; called in the main thread, between two instructions."""


class CommandSignals(SignalHandler):
    """Context of a command: a signal ends it at once.

    Args:
        open: whether something has to be ended first. Then Interrupted is raised, once.

    Attributes:
        status: of the command once it is over; no signal changes it.
    """

    def __init__(self, open: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._open = open
        self._since: float | None = None
        self.status: int | None = None

    def take(self, number: int) -> None:
        """End the process, or raise Interrupted if something must be ended first."""
        self.leave()
        first, now = self._since, time.monotonic()
        if first is None and self._open():
            self._since = now
            raise Interrupted(number)
        if first is None or now - first > TOGETHER:
            end_by_signal(number)

    def leave(self) -> None:
        """Exit the process if the command is over: Python's own exit takes seconds with torch, and
        handles no signal."""
        if self.status is not None and os.getpid() == self._owner:
            _leave(self.status)


class StopSignals(SignalHandler):
    """Context of a run: the first signal is a request that the loop sees between steps. A second
    SIGINT interrupts at once, and ends the process where that has no effect: in a call that does
    not return.

    Attributes:
        number: of the first signal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number: int | None = None
        self._cuts = self._cut = False
        self._since, self._urgent = 0.0, 0

    def __enter__(self) -> Self:
        super().__enter__()
        if self._previous:
            self._woken, self._wake = os.pipe()
            os.set_blocking(self._wake, False)
            self._other = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._previous:
            signal.set_wakeup_fd(self._other)
            os.write(self._wake, b"\0")
            os.close(self._wake)
        super().__exit__()
        if isinstance(raised[1], Exception):
            self._explain()

    def _explain(self) -> None:
        """Raise the signal's exception in place of an error that the interruption has caused."""
        if self._urgent:
            raise KeyboardInterrupt
        if self._cut:
            self.check()

    def take(self, number: int) -> None:
        """Record a signal; raise KeyboardInterrupt if it interrupts at once."""
        now = time.monotonic()
        if self.number is None:
            self.number, self._since = number, now
        elif number == signal.SIGINT and now - self._since > TOGETHER:
            self._urgent += 1
            raise KeyboardInterrupt
        if self._cuts:
            self._cuts, self._cut = False, True
            raise KeyboardInterrupt

    def adopt(self, number: int) -> None:
        """Record a signal that another process of the run has received; 0 is none."""
        if number and self.number is None:
            self.number, self._since = number, time.monotonic()

    def requested(self) -> bool:
        """Return whether a signal has come."""
        return self.number is not None

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        if self.number is not None:
            raise Stopped(self.number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise Stopped at once for a signal within a context, for work that may be lost."""
        outer = self._cuts
        self._cuts = True
        try:
            self.check()
            yield
        except BaseException:
            self._explain()
            raise
        finally:
            self._cuts = outer
        self.check()

    def _watch(self) -> None:
        """End the process at a second SIGINT that the main thread does not handle within a second.

        Runs in a thread: Python's handlers wait for the main thread, which may be in a long call.
        """
        first, urgent = None, 0
        while (number := os.read(self._woken, 1)[0]) != 0:
            now = time.monotonic()
            if number not in SIGNALS:
                continue
            first = first or now
            if number == signal.SIGINT and now - first > TOGETHER + _MARGIN:
                urgent += 1
                time.sleep(_HEED_SECONDS)
                if self._urgent < urgent:
                    end_by_signal(number)
        os.close(self._woken)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals within a context, to start a process that will call ignore_signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore stop signals in this process, which serves another one that will end it.

    A batch system may signal every process of a job.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


T = TypeVar("T")


def until_interrupted(batches: Iterator[T]) -> Iterator[T]:
    """Yield the items of an iterable until a Stopped exception ends the wait for one."""
    with suppress(Stopped):
        yield from batches
