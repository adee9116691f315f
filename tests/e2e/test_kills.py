"""Processes killed with SIGKILL: what they had saved and recorded is whole, and continues."""

import os
import re
import subprocess
import sys

import pytest


def found(root, script, *arguments):
    """The cells of the table that a script of bench/ prints."""
    done = subprocess.run(
        [sys.executable, str(root / "bench" / script), "--dry", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [re.split(r" *\| *", line.strip("| ")) for line in done.stdout.splitlines()[2:]]


@pytest.mark.slow
def test_a_kill_during_a_save_costs_no_checkpoint(root):
    ours, plain = found(root, "kill_saves.py", "--kills", "25", "--megabytes", "8")
    assert int(ours[2]) > 0  # some kills did hit a save
    assert (ours[1], ours[3]) == ("25", "0")
    assert plain[1] == "25"


@pytest.mark.slow
def test_a_run_killed_at_random_steps_ends_as_one_that_was_not(root):
    rows = found(root, "kill_runs.py", "--kills", "2", "--steps", "120")
    assert [row[1].split(" of ")[0] for row in rows] == ["1", "0", "0", "0"]
