"""What signals do to a process, and when."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from runner.utils import stop_signals
from runner.utils.stop_signals import Interrupted, Stopped, StopSignals


@pytest.fixture
def apart(monkeypatch):
    """Signals that come one after the other are two."""
    monkeypatch.setattr(stop_signals, "TOGETHER", 0.0)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.01)


@pytest.mark.parametrize("number", stop_signals.SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_a_request(number):
    handler = signal.getsignal(number)
    with StopSignals() as signals:
        assert not signals.requested()
        signals.check()
        send(number)
        assert signals.requested()
        with pytest.raises(Stopped, match=f"Stopped by {number.name}") as caught:
            signals.check()
        assert caught.value.exit_status == 128 + number
    assert signal.getsignal(number) is handler


def test_a_second_ctrl_c_interrupts_at_once(apart):
    with StopSignals():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_what_comes_together_is_one():
    """The terminal and a launcher both tell of one Ctrl-C."""
    with StopSignals() as signals:
        send(signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT)
        assert signals.number == signal.SIGINT


def test_a_second_sigterm_stays_a_request(apart):
    with StopSignals() as signals:
        send(signal.SIGTERM, signal.SIGTERM)
        assert signals.number == signal.SIGTERM


def test_what_was_ignored_stays_ignored():
    """nohup, and the background of a script's shell."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            send(signal.SIGHUP)
            assert not signals.requested()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_the_handlers_stay():
    """Only the main thread may set one; a run in a worker thread must still start."""
    handler, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopSignals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.requested()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(handler, False)]


def test_work_that_loses_nothing_is_cut():
    with StopSignals() as signals:
        with pytest.raises(Stopped, match="SIGTERM"), signals.at_once(), signals.at_once():
            send(signal.SIGTERM, signal.SIGKILL)
        with pytest.raises(Stopped), signals.at_once():
            pytest.fail("it has begun")
        assert signals.number == signal.SIGTERM


def test_a_cut_that_something_swallows_is_not_lost():
    with (
        StopSignals() as signals,
        pytest.raises(Stopped),
        signals.at_once(),
        suppress(KeyboardInterrupt),
    ):
        send(signal.SIGTERM)


def test_what_fails_after_a_cut_is_the_cut():
    """A module that was imported in part, say."""

    def fails():
        try:
            send(signal.SIGTERM)
        finally:
            raise AttributeError

    with StopSignals() as signals, pytest.raises(Stopped), signals.at_once():
        fails()
    with pytest.raises(Stopped), StopSignals() as signals:  # noqa: PT012
        with suppress(Stopped), signals.at_once():
            fails()
        raise AttributeError


def test_a_second_ctrl_c_is_no_cut(apart):
    with StopSignals() as signals:
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signals.number == signal.SIGTERM


def python(code):
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


BLOCKED = """
import signal, time
from runner.utils.stop_signals import StopSignals
with StopSignals():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # another thread takes it
    print("ready", flush=True)
    import ctypes
    ctypes.CDLL(None).sleep(60)
"""


def test_a_second_ctrl_c_ends_a_call_that_does_not_return():
    process = python(BLOCKED)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(stop_signals.TOGETHER + 0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert process.communicate()[1] == "error: Stopped by SIGINT.\n"


COMMAND = """
import sys, time
from runner.utils.stop_signals import CommandSignals, Interrupted
with CommandSignals(lambda: {open}) as signals:
    signals.status = {status}
    try:
        print("ready", flush=True)
        time.sleep(60)
    except Interrupted as error:
        print(error)
        sys.exit(error.exit_status)
"""


@pytest.mark.parametrize(
    ("open", "status", "rc", "out", "err"),
    [
        (False, None, 138, "", "error: Stopped by SIGUSR1.\n"),
        (True, None, 138, "Stopped by SIGUSR1.\n", ""),
        (True, 0, 0, "", ""),
    ],
    ids=["nothing is open", "something is open", "over"],
)
def test_a_command_ends_at_once(open, status, rc, out, err):
    process = python(COMMAND.format(open=open, status=status))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == rc
    assert process.communicate() == (out, err)


def test_an_interrupt_passes_what_catches_exceptions():
    assert not issubclass(Interrupted, Exception)


SERVANT = """
import time
from runner.utils.stop_signals import ignore_signals
time.sleep(0.3)
ignore_signals()
print("lives", flush=True)
time.sleep(60)
"""


def test_a_process_that_ignores_signals_survives_them():
    with stop_signals.signals_blocked():
        process = python(SERVANT)
    try:
        for number in stop_signals.SIGNALS:  # before it ignores them, and after
            process.send_signal(number)
        assert process.stdout.readline() == "lives\n"
        for number in stop_signals.SIGNALS:
            process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
    finally:
        process.kill()
        process.communicate()
