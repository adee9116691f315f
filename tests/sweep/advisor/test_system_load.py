"""runner.sweeps.advisor.schedule measures other programs, and leaves this process's own out."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from runner.sweeps.advisor.schedule import other_programs_load

CPU = torch.device("cpu")
LOOP = "while True: pass"
STRAY = f"""import subprocess, sys
print(subprocess.Popen([sys.executable, '-c', {LOOP!r}], stdout=subprocess.DEVNULL).pid)"""
LIMIT_SECONDS = 120.0


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


@pytest.fixture
def processor_used_by(monkeypatch):
    """Replace the reading of the processors' use by that of some processes, whatever else runs."""

    def replace(processes):
        def cpu_seconds():
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        def cpu_percent(interval, percpu):
            """Return percents once the processes have computed for a second."""
            before = cpu_seconds()
            began = time.perf_counter()
            while cpu_seconds() < before + 1:
                assert time.perf_counter() < began + LIMIT_SECONDS
                time.sleep(interval / 10)
            share = (cpu_seconds() - before) / (time.perf_counter() - began)
            return [100 * share] * psutil.cpu_count()

        monkeypatch.setattr(psutil, "cpu_percent", cpu_percent)

    return replace


@pytest.mark.usefixtures("one_processor")
def test_another_program_is_measured():
    started = subprocess.run(
        [sys.executable, "-c", STRAY], stdout=subprocess.PIPE, check=True, timeout=60
    )
    try:  # its parent is gone: it is no child of this process
        # Advice warns from a quarter on. Whatever else keeps the processor busy counts as well.
        assert max(other_programs_load(CPU) for _ in range(8)) > 0.25
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)


def test_child_processes_are_not_measured(own_loops, processor_used_by):
    processor_used_by(own_loops)
    assert other_programs_load(CPU) < 0.2


def test_the_share_is_that_of_the_processors_in_use(monkeypatch, one_processor):
    percents = [0.0] * psutil.cpu_count()
    percents[min(os.sched_getaffinity(0))] = 100.0

    def cpu_percent(interval, percpu):
        time.sleep(interval)
        return percents

    monkeypatch.setattr(psutil, "cpu_percent", cpu_percent)
    assert other_programs_load(CPU) > 0.8


def test_a_device_that_is_no_cpu_has_no_load():
    assert other_programs_load(torch.device("meta")) == 0
