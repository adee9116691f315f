"""Processes killed with SIGKILL: what they had saved and recorded is whole, and continues."""

import re
import sys

import pytest
from forked_process import run_forked


def table_of(root, clean, script, *arguments):
    """Return the cells of the table that a script of bench/ prints."""
    command = [sys.executable, str(root / "bench" / script), "--dry", *arguments]
    done = run_forked(command, cwd=root, env=clean)
    assert done.returncode == 0, done.stderr[-2000:]
    return [re.split(r" *\| *", line.strip("| ")) for line in done.stdout.splitlines()[2:]]


@pytest.mark.slow
def test_a_kill_during_a_save_costs_no_checkpoint(root, clean):
    ours, plain = table_of(root, clean, "kill_saves.py", "--kills", "12", "--megabytes", "8")
    assert int(ours[2]) > 0  # some kills did hit a save
    assert (ours[1], ours[3]) == ("12", "0")
    assert plain[1] == "12"


@pytest.mark.slow
def test_a_run_killed_at_random_steps_ends_as_one_that_was_not(root, clean):
    rows = table_of(root, clean, "kill_runs.py", "--kills", "2", "--steps", "80")
    assert [row[1].split(" of ")[0] for row in rows] == ["1", "0", "0", "0"]
