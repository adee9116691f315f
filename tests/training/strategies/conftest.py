"""Runs of several processes: many of them in one start, which costs seconds."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT, clean_env
from processes import Outcome

WORKER = Path(__file__).parents[2] / "helpers" / "worker.py"
PATH = f"{ROOT}:{ROOT / 'tests' / 'helpers'}"
TIMEOUT = 1800
"""Seconds that jobs may take: they hang or end long before, on a loaded machine, too."""


@pytest.fixture(scope="session")
def worker():
    """Return the process of tests/helpers/worker.py."""
    process = subprocess.Popen(
        [sys.executable, str(WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        env=clean_env(PYTHONPATH=PATH),
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="session")
def run_in_processes(worker):
    """Have jobs run by several processes, in turn; outcomes by folder.

    A job is a folder's name and its overrides, which hold no space.
    """

    def run(processes, jobs, folder):
        named = {str(folder / name): typed.split() for name, typed in jobs.items()}
        request = {"processes": processes, "folder": str(folder), "jobs": named}
        worker.stdin.write(json.dumps(request).encode() + b"\n")
        ready, _, _ = select.select([worker.stdout], [], [], TIMEOUT)
        assert ready, f"no end after {TIMEOUT} s"
        found = {name: Outcome(folder / name) for name in jobs}
        written = [path.read_text()[-3000:] for path in sorted(folder.glob("output-*.txt"))]
        failures = [one.text(f"failed-{rank}.txt") for one in found.values() for rank in (0, 1)]
        assert worker.stdout.readline() == b"0\n", "".join(written + failures)
        return found

    return run
