"""Hundreds of kills with SIGKILL cost no checkpoint, no point and no bit: twenty minutes.

`python -m pytest -m soak tests/soak -s` prints what was counted; docs/reliability.md quotes it.
"""

import pytest
from killed_runs import compare_with_undisturbed
from killed_saves import killed_saves

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SAVE_KILLS, MEBIBYTES = 200, 16
RUN_KILLS, STEPS = 50, 2000


def test_no_kill_during_a_save_costs_a_checkpoint(tmp_path, clean):
    found = killed_saves(tmp_path, clean, SAVE_KILLS, MEBIBYTES)
    print(f"{SAVE_KILLS} kills while checkpoints of {MEBIBYTES} MiB are saved: {found}")
    assert found["in_a_write"] > 0
    assert found["lost"] == 0


def test_a_run_killed_at_many_random_steps_ends_as_one_that_was_not(tmp_path, clean):
    found = compare_with_undisturbed(tmp_path, clean, RUN_KILLS, STEPS)
    print(f"{RUN_KILLS} kills in {STEPS} steps: {found}")
    assert (found.runs, found.lost, found.doubled, found.changed) == (1, 0, 0, 0)
