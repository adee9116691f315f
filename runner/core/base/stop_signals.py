"""Signals that ask a process to stop: Ctrl-C's and those of a closed terminal and a batch system.

A command without an open run or sweep exits in the handler, where no import and no library can
swallow the signal. A run continues until its step is complete (StopSignals).
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

from runner.core.base.errors import RunnerError
from runner.core.base.terminal import in_notebook

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

COALESCE_SECONDS = 0.5
"""Seconds after the first signal within which further ones count as the same request: a batch
system may signal every process, and a process may pass its signal on to another."""

# Time that the main thread has to handle a second SIGINT before the watching thread ends the
# process: Python runs handlers between two instructions, and never inside a call of a C library.
_HANDLER_GRACE_SECONDS = 1.0

# The two threads note the time of a signal at different moments. The difference must not turn a
# signal that the main thread has coalesced with the first one into a second one.
_CLOCK_MARGIN_SECONDS = 0.1


class Stopped(RunnerError):
    """A signal stopped the run, after a checkpoint if it had taken a step.

    The exit status is 128 + the signal's number: 130 for SIGINT, 143 for SIGTERM.

    Args:
        number: of the signal.
        hint: a sentence that says how to resume.
    """

    def __init__(self, number: int, hint: str = "") -> None:
        self.exit_status = 128 + number
        super().__init__(f"Stopped by {signal.Signals(number).name}. {hint}".strip())


class Interrupted(KeyboardInterrupt):
    """A signal ended a command that still has to end its open work.

    It is no Exception, so that no library's `except Exception` catches it.
    """

    def __init__(self, number: int = signal.SIGINT, hint: str = "") -> None:
        self.exit_status = 128 + number
        super().__init__(str(Stopped(number, hint)))

    _render_traceback_ = RunnerError._render_traceback_


def end_by_signal(number: int) -> NoReturn:
    """Exit this process at once, with the exit status of a signal."""
    _write_line(str(Stopped(number)))
    _exit_now(128 + number)


def _write_line(text: str) -> None:
    """Write a line to stderr from a handler of signals."""
    # Rank 0 prints the message for all processes that torchrun starts.
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"{text}\n".encode())


def _exit_now(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        # A handler may have interrupted a write to this very stream, which then cannot be flushed.
        with suppress(Exception):
            stream.flush()
    os._exit(status)


class SignalHandler:
    """Context in which `handle_signal` receives the stop signals of this process.

    Signals that the process was started to ignore stay ignored: nohup ignores SIGHUP, and the shell
    of a script ignores SIGINT in what it runs in the background. Outside the main thread the
    context changes nothing.
    """

    def __init__(self) -> None:
        self._previous_handlers: dict[int, Any] = {}
        self._owner_pid = os.getpid()

    def __enter__(self) -> Self:
        # Python sets handlers in the main thread only; a run in another thread must still start.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in SIGNALS:
            previous = signal.getsignal(number)
            # None is a handler that was installed from C: Python could not restore it.
            if previous not in (signal.SIG_IGN, None):
                self._previous_handlers[number] = previous
                signal.signal(number, self._handle_in_owner)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle_in_owner(self, number: int, frame: FrameType | None) -> None:
        # A process that was just forked has inherited this handler with its parent's state.
        if os.getpid() == self._owner_pid:
            self.handle_signal(number)

    def handle_signal(self, number: int) -> None:
        """Handle a signal; called in the main thread, between two instructions."""


class CommandSignals(SignalHandler):
    """Context of a command, in which a signal ends the process at once.

    Args:
        has_open_work: returns whether something must be ended before the process exits. Then the
            first signal raises Interrupted.

    Attributes:
        status: exit status of the command once it is over, which no signal changes; None before.
    """

    def __init__(self, has_open_work: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._has_open_work = has_open_work
        self._interrupted_at: float | None = None
        self.status: int | None = None

    def handle_signal(self, number: int) -> None:
        """End the process, or raise Interrupted if something must be ended first."""
        self.exit_if_finished()
        now = time.monotonic()
        if self._interrupted_at is None:
            if not self._has_open_work():
                end_by_signal(number)
            self._interrupted_at = now
            raise Interrupted(number)
        if now - self._interrupted_at > COALESCE_SECONDS:
            end_by_signal(number)

    def exit_if_finished(self) -> None:
        """Exit the process with the command's status if the command is over."""
        # Python's own exit takes seconds with torch, and handles no signal meanwhile.
        if self.status is not None and os.getpid() == self._owner_pid:
            _exit_now(self.status)


class StopSignals(SignalHandler):
    """Context of a run, in which the first signal is a request that the loop reads between steps.

    A second SIGINT raises KeyboardInterrupt. In a call that does not return, where that has no
    effect, a thread ends the process.

    Attributes:
        number: number of the first signal; None before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number: int | None = None
        self._requested_at = 0.0
        # Inside interruptible(), until a signal has interrupted it.
        self._interrupts = False
        self._was_interrupted = False
        self._second_sigints = 0
        self._is_watched = False

    def __enter__(self) -> Self:
        super().__enter__()
        # A notebook's process holds the user's variables: no thread may end it.
        self._is_watched = bool(self._previous_handlers) and not in_notebook()
        if self._is_watched:
            # The C part of Python's signal handling writes each signal's number to this pipe, also
            # while the main thread is in a call and runs no handler.
            self._pipe_read_end, self._pipe_write_end = os.pipe()
            os.set_blocking(self._pipe_write_end, False)
            self._previous_wakeup_fd = signal.set_wakeup_fd(
                self._pipe_write_end, warn_on_full_buffer=False
            )
            threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._is_watched:
            signal.set_wakeup_fd(self._previous_wakeup_fd)
            # No signal has the number 0: it ends the watching thread.
            os.write(self._pipe_write_end, b"\0")
            os.close(self._pipe_write_end)
        super().__exit__()
        if isinstance(raised[1], Exception):
            self._raise_interruption()

    def _raise_interruption(self) -> None:
        """Raise the signal's exception in place of an error that the interruption has caused."""
        if self._second_sigints:
            raise KeyboardInterrupt
        if self._was_interrupted:
            self.check()

    def handle_signal(self, number: int) -> None:
        """Record a signal; raise KeyboardInterrupt for a second SIGINT and in interruptible()."""
        now = time.monotonic()
        if self.number is None:
            self.number = number
            self._requested_at = now
            if number == signal.SIGINT and not self._interrupts:
                _write_line("Stopping after this step. Ctrl-C again stops at once.")
        elif number == signal.SIGINT and now - self._requested_at > COALESCE_SECONDS:
            self._second_sigints += 1
            raise KeyboardInterrupt
        if self._interrupts:
            # Once: a second exception would interrupt the `finally` clauses of the first.
            self._interrupts = False
            self._was_interrupted = True
            raise KeyboardInterrupt

    def record_remote_signal(self, number: int) -> None:
        """Record a signal that another process of the run has received; 0 is none."""
        if number and self.number is None:
            self.number = number
            self._requested_at = time.monotonic()

    def is_stop_requested(self) -> bool:
        """Return whether a signal was received."""
        return self.number is not None

    def check(self) -> None:
        """Raise Stopped if a signal was received."""
        if self.number is not None:
            raise Stopped(self.number)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Return a context in which a signal raises Stopped at once, for work that may be lost."""
        outer = self._interrupts
        self._interrupts = True
        try:
            self.check()
            yield
        except BaseException:
            # The interrupted work may raise another error: an import that was interrupted, for
            # example, an AttributeError.
            self._raise_interruption()
            raise
        finally:
            self._interrupts = outer
        # The work may have caught the KeyboardInterrupt.
        self.check()

    def _watch(self) -> None:
        """End the process at a second SIGINT that the main thread does not handle in time.

        Runs in a thread of its own: Python's handlers wait for the main thread, which may be in a
        call that does not return.
        """
        requested_at = None
        second_sigints = 0
        while True:
            number = os.read(self._pipe_read_end, 1)[0]
            if number == 0:
                break
            if number not in SIGNALS:
                continue
            now = time.monotonic()
            if requested_at is None:
                requested_at = now
            elapsed = now - requested_at
            if number == signal.SIGINT and elapsed > COALESCE_SECONDS + _CLOCK_MARGIN_SECONDS:
                second_sigints += 1
                time.sleep(_HANDLER_GRACE_SECONDS)
                if self._second_sigints < second_sigints:
                    end_by_signal(number)
        os.close(self._pipe_read_end)


@contextmanager
def signals_blocked(numbers: Collection[int] = SIGNALS) -> Iterator[None]:
    """Block signals within a context, to start a process that ignores them or will do so."""
    # A new process inherits the mask: a signal that arrives before it calls ignore_signals waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore stop signals in this process, which serves another one that will end it."""
    # A batch system may signal every process of a job.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


Item = TypeVar("Item")


def until_interrupted(items: Iterator[Item]) -> Iterator[Item]:
    """Yield items until a signal ends the wait for the next one (Stopped), which is no error."""
    with suppress(Stopped):
        yield from items


def interrupt_status(error: KeyboardInterrupt) -> int:
    """Return the exit status of a command that Ctrl-C or another signal has ended."""
    return error.exit_status if isinstance(error, Interrupted) else 130
