"""runner.advise.busy: other programs are seen where this one may run, and only there."""

import os
import subprocess
import sys

import pytest
import torch

from runner.advise.busy import busy

CPU = torch.device("cpu")


@pytest.fixture
def one_processor():
    """Of those that this process may use."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("one_processor")
def test_a_busy_program_is_seen():
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same processor
    try:
        assert max(busy(CPU) for _ in range(4)) > 0.8  # it starts
    finally:
        loop.kill()
        loop.wait()
    assert busy(torch.device("meta")) == 0
