"""runner.sweep.advisor.system_load sees other programs, and leaves this one out."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from runner.sweep.advisor.system_load import other_programs_load

CPU = torch.device("cpu")
LOOP = "while True: pass"
STRAY = f"""import subprocess, sys
print(subprocess.Popen([sys.executable, '-c', {LOOP!r}], stdout=subprocess.DEVNULL).pid)"""


@pytest.fixture
def one_processor():
    """Of those that this process may use."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("one_processor")
def test_another_program_is_seen():
    started = subprocess.run(
        [sys.executable, "-c", STRAY], stdout=subprocess.PIPE, check=True, timeout=60
    )
    try:  # its parent is gone: it is nobody's here
        # Other tests may take a part of the processor; a quarter is what an answer warns of.
        assert max(other_programs_load(CPU) for _ in range(8)) > 0.25
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)
    assert other_programs_load(torch.device("meta")) == 0


@pytest.mark.usefixtures("one_processor")
def test_processes_of_its_own_are_not():
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(8)]
    try:
        assert min(other_programs_load(CPU) for _ in range(4)) < 0.6  # others may run here as well
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
