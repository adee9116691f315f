"""What other programs use of the processors, without this process's own."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from runner.sweeps import other_programs
from runner.sweeps.other_programs import OtherPrograms, busy_sentence

LOOP = "while True: pass"
STRAY = f"""import subprocess, sys
print(subprocess.Popen([sys.executable, '-c', {LOOP!r}], stdout=subprocess.DEVNULL).pid)"""
ENDS = "import time\nwhile time.process_time() < 1: pass"


@pytest.fixture
def one_processor():
    """Run this process and those that it starts on one of its processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def own_loops(one_processor):
    """Start child processes that compute without end."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(4)]
    yield [psutil.Process(loop.pid) for loop in loops]
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.usefixtures("one_processor")
def test_another_program_is_measured():
    started = subprocess.run(
        [sys.executable, "-c", STRAY], stdout=subprocess.PIPE, check=True, timeout=60
    )
    try:  # its parent is gone: it is no child of this process
        others = OtherPrograms()
        time.sleep(2)
        # Whatever else keeps the processor busy counts as well.
        assert others.share() > other_programs.BUSY_SHARE
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)


def test_child_processes_are_not_measured(own_loops, monkeypatch):
    """Neither those that compute nor those that have ended; whatever else runs is left out here."""
    ended = subprocess.Popen([sys.executable, "-c", ENDS])
    members = [*own_loops, psutil.Process()]

    def spent():
        return sum(sum(process.cpu_times()[:2]) for process in members)

    monkeypatch.setattr(other_programs, "busy_seconds", lambda: 0.0)
    others = OtherPrograms()
    before = spent()
    ended.wait(120)
    monkeypatch.setattr(other_programs, "busy_seconds", lambda: 1 + spent() - before)
    assert others.share() < 0.1


def test_the_processors_in_use_count_and_the_time_of_their_guests_once(monkeypatch, one_processor):
    used = min(os.sched_getaffinity(0))
    none = psutil.cpu_times()._replace(**dict.fromkeys(psutil.cpu_times()._fields, 0.0))
    times = [none._replace(user=7.0)] * psutil.cpu_count()
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)
    times[used] = none._replace(user=3600.0, guest=1800.0, system=10.0, idle=9.0, iowait=5.0)
    assert other_programs.busy_seconds() == 3610


def test_a_small_share_is_no_reservation():
    assert not busy_sentence(0.25)
    assert busy_sentence(0.6).startswith("Other programs kept 60% of the processors busy")
