"""Stop signals: which ones end a process, which ones a run reads between steps, and when."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress

import pytest

from runner.core.base import stop_signals
from runner.core.base.stop_signals import Interrupted, Stopped, StopSignals


@pytest.fixture
def no_coalescing(monkeypatch):
    """Count signals that are sent one after the other as two."""
    monkeypatch.setattr(stop_signals, "COALESCE_SECONDS", 0.0)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.01)


@pytest.mark.parametrize("number", stop_signals.SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_a_request(number):
    handler = signal.getsignal(number)
    with StopSignals() as signals:
        assert not signals.is_stop_requested()
        signals.check()
        send(number)
        assert signals.is_stop_requested()
        with pytest.raises(Stopped, match=f"Stopped by {number.name}") as caught:
            signals.check()
        assert caught.value.exit_status == 128 + number
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize(
    ("first", "second", "interrupts"),
    [
        (signal.SIGINT, signal.SIGINT, True),
        (signal.SIGTERM, signal.SIGINT, True),
        (signal.SIGTERM, signal.SIGTERM, False),
    ],
)
def test_a_second_signal_interrupts_at_once_if_ctrl_c(no_coalescing, first, second, interrupts):
    with StopSignals() as signals:
        send(first)
        with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
            send(second)
        assert signals.number == first


def test_signals_of_one_ctrl_c_count_as_one(monkeypatch, capfd):
    """The terminal and a launcher both pass one Ctrl-C on."""
    monkeypatch.setattr(stop_signals, "COALESCE_SECONDS", 600.0)  # however loaded the machine is
    with StopSignals() as signals:
        send(signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT)
        assert signals.number == signal.SIGINT
    assert capfd.readouterr().err == "Stopping after this step. Ctrl-C again stops at once.\n"


def test_a_signal_that_was_ignored_stays_ignored():
    """nohup, and the background of a script's shell."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            send(signal.SIGHUP)
            assert not signals.is_stop_requested()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_changes_no_handlers():
    """Only the main thread may set one; a run in a worker thread must still start."""
    handler, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopSignals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.is_stop_requested()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(handler, False)]


def test_a_signal_interrupts_interruptible_work_at_once():
    with StopSignals() as signals:
        with (
            pytest.raises(Stopped, match="SIGTERM"),
            signals.interruptible(),
            signals.interruptible(),
        ):
            send(signal.SIGTERM, signal.SIGKILL)
        with pytest.raises(Stopped), signals.interruptible():
            pytest.fail("the work must not start")
        assert signals.number == signal.SIGTERM


def test_an_interruption_that_the_work_catches_still_stops_it():
    with (
        StopSignals() as signals,
        pytest.raises(Stopped),
        signals.interruptible(),
        suppress(KeyboardInterrupt),
    ):
        send(signal.SIGTERM)


def test_an_error_that_an_interruption_causes_is_reported_as_the_signal():
    """A module that was imported in part, for example."""

    def fails():
        try:
            send(signal.SIGTERM)
        finally:
            raise AttributeError

    with StopSignals() as signals, pytest.raises(Stopped), signals.interruptible():
        fails()
    with pytest.raises(Stopped), StopSignals() as signals:  # noqa: PT012
        with suppress(Stopped), signals.interruptible():
            fails()
        raise AttributeError


def python(code):
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


BLOCKED = """
import ctypes, signal
from runner.core.base.stop_signals import StopSignals
sleep = ctypes.CDLL(None).sleep
with StopSignals():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # another thread takes it
    print("ready", flush=True)
    sleep(600)
"""


def test_a_second_ctrl_c_ends_a_call_that_does_not_return():
    process = python(BLOCKED)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(stop_signals.COALESCE_SECONDS + 0.2)
    assert process.poll() is None
    while process.poll() is None:  # a loaded machine may deliver two signals as one
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(stop_signals.COALESCE_SECONDS + 0.5)
    assert process.returncode == 130
    # A loaded machine may deliver the first one before the call, where its handler writes a line.
    assert process.communicate()[1].endswith("Stopped by SIGINT.\n")


COMMAND = """
import sys, time
from runner.core.base.stop_signals import CommandSignals, Interrupted
with CommandSignals(lambda: {open}) as signals:
    signals.status = {status}
    try:
        print("ready", flush=True)
        time.sleep(600)
    except Interrupted as error:
        print(error)
        sys.exit(error.exit_status)
"""


@pytest.mark.parametrize(
    ("open", "status", "rc", "out", "err"),
    [
        (False, None, 138, "", "Stopped by SIGUSR1.\n"),
        (True, None, 138, "Stopped by SIGUSR1.\n", ""),
        (True, 0, 0, "", ""),
    ],
    ids=["nothing is open", "something is open", "over"],
)
def test_a_command_ends_at_once(open, status, rc, out, err):
    process = python(COMMAND.format(open=open, status=status))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(600) == rc
    assert process.communicate() == (out, err)


def test_except_exception_does_not_catch_an_interrupt():
    assert not issubclass(Interrupted, Exception)


SERVANT = """
import time
from runner.core.base.stop_signals import ignore_signals
time.sleep(0.3)
ignore_signals()
print("lives", flush=True)
time.sleep(600)
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
